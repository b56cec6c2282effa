"""Client process of `fanout`: one change of an active round, and when each of its nodes was notified.

The change is a failed worker: the round ends, the same nodes form the next one at once, and each receives its ranks
in it, in one message.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from benchmarks.clients.command import carry_out
from benchmarks.clients.swarm import FINAL, Swarm, join_requests, ready, worker_failed
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class FanoutOrder:
    """A request to the client process.

    Attributes:
        endpoint: address of the server.
        nodes: number of nodes.
        changes: number of changes, one after another.
        confirm: True if nodes confirm each new round, after the last has received it; the floor has no rounds.
        timeout: seconds until it counts as failed.
    """

    endpoint: str
    nodes: int
    changes: int
    confirm: bool
    timeout: float


@dataclass(frozen=True, slots=True)
class FanoutResult:
    """Medians over the changes.

    Attributes:
        first: seconds from the change until the first node was notified.
        last: seconds until the last node was.
        message: bytes of the message to a node.
    """

    first: float
    last: float
    message: int


async def fanout(order: FanoutOrder) -> FanoutResult:
    """Carry out the order.

    Raises:
        SwarmError: A node was not notified.
    """
    await ready(order.endpoint)
    requests = join_requests(range(order.nodes), places=order.nodes, max_restarts=order.changes)
    swarm = Swarm(order.endpoint, requests, confirm=order.confirm)
    swarm.start()
    await swarm.reached(FINAL, order.timeout)
    swarm.confirm = False
    firsts, lasts = [], []
    for round_ in range(1, order.changes + 1):
        began = time.perf_counter()
        await swarm.calls[0].write(worker_failed(round_))
        told = await swarm.reached((pb.PHASE_FROZEN, round_ + 1), order.timeout)
        firsts.append(told.first - began)
        lasts.append(told.last - began)
        if order.confirm:
            await swarm.confirm_round(round_ + 1)
            await swarm.reached((pb.PHASE_FINAL, round_ + 1), order.timeout)
    return FanoutResult(statistics.median(firsts), statistics.median(lasts), swarm.last_message_bytes)


if __name__ == "__main__":
    carry_out(FanoutOrder, fanout)
