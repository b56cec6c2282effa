"""Client process of `rendezvous`: all nodes at once, from their first connect until the last is told.

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
    """What to do.

    Attributes:
        endpoint: of the server.
        server: its process id.
        nodes: how many.
        until: the last thing that each is told: FROZEN, which gives it its ranks, or FINAL.
        timeout: seconds until it counts as failed.
        ca: file with the authority of the server's certificate; empty: plaintext.
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
    """What came of it.

    Attributes:
        ranks: seconds from the first connect until the last node knew its ranks.
        final: seconds until the last was told FINAL; as `ranks` where the order ends there.
        memory: bytes that the server grew by, all nodes connected.
        cpu: seconds of the server, up to then.
        failure: why it has no other figures; empty if it has.
        lost: streams that ended although nobody ended them, by how.
    """

    ranks: float = 0.0
    final: float = 0.0
    memory: int = 0
    cpu: float = 0.0
    failure: str = ""
    lost: dict[str, int] = field(default_factory=dict)


async def storm(order: StormOrder) -> StormResult:
    """Carry it out."""
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
