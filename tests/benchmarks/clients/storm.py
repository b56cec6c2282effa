"""Client process of `rendezvous`: all nodes join at once; time until the last is notified.

python -m benchmarks.clients.storm '{"endpoint": "127.0.0.1:29400", "server": 4711, "nodes": 256, "until": "FINAL"}'
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.clients.command import carry_out
from benchmarks.clients.swarm import (
    FINAL,
    FROZEN,
    PLAINTEXT,
    ServerCost,
    Swarm,
    SwarmError,
    join_requests,
    ready,
)
from rallypoint.rpc.endpoint import ClientTLS

_MOMENTS = {"FROZEN": FROZEN, "FINAL": FINAL}


@dataclass(frozen=True, slots=True)
class StormOrder:
    """A request to the client process.

    Attributes:
        endpoint: address of the server.
        server: its process id.
        nodes: number of nodes.
        until: the last phase that each node receives: FROZEN, which has its ranks, or FINAL.
        timeout: seconds until it counts as failed.
        ca: file with the CA certificate of the server; empty: plaintext.
        token: file with a token; empty: none.
    """

    endpoint: str
    server: int
    nodes: int
    until: str
    timeout: float
    ca: str = ""
    token: str = ""


@dataclass(frozen=True, slots=True)
class StormResult:
    """The result of an order.

    Attributes:
        ranks: seconds from the first connect until the last node knew its ranks.
        final: seconds until the last received FINAL; equal to `ranks` if the order ends there.
        memory: growth of the server in bytes, with all nodes connected.
        cpu: CPU seconds of the server until then.
        failure: reason for which there are no other figures; empty if there are.
        lost: number of streams that ended unexpectedly, by status.
    """

    ranks: float = 0.0
    final: float = 0.0
    memory: int = 0
    cpu: float = 0.0
    failure: str = ""
    lost: dict[str, int] = field(default_factory=dict)


async def storm(order: StormOrder) -> StormResult:
    """Carry out the order."""
    tls = ClientTLS(Path(order.ca), token=Path(order.token) if order.token else None)
    security = tls if order.ca else PLAINTEXT
    await ready(order.endpoint, security)
    requests = join_requests(range(order.nodes), places=order.nodes)
    swarm = Swarm(order.endpoint, requests, confirm=order.until == "FINAL", security=security)
    before = ServerCost.of(order.server)
    began = swarm.start()
    try:
        final = await swarm.reached(_MOMENTS[order.until], order.timeout)
    except SwarmError as error:
        return StormResult(failure=str(error), lost=dict(swarm.lost))
    after = ServerCost.of(order.server)
    return StormResult(
        ranks=swarm.told[FROZEN].last - began,
        final=final.last - began,
        memory=after.memory - before.memory,
        cpu=after.cpu - before.cpu,
        lost=dict(swarm.lost),
    )


if __name__ == "__main__":
    carry_out(StormOrder, storm)
