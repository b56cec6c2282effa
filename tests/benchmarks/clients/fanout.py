"""Client process of `fanout`: one change of a round that runs, and when each of its nodes was told.

The change is a failed worker: the round ends, the same nodes form the next one at once, and each is told its
place in it, in one message.
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
    """What to do.

    Attributes:
        endpoint: of the server.
        nodes: how many.
        changes: how many changes, one after another.
        confirm: whether nodes confirm each new round, after the last was told of it; the floor has no rounds.
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
        first: seconds from the change until the first node was told.
        last: seconds until the last was.
        message: bytes of what a node was told.
    """

    first: float
    last: float
    message: int


async def fanout(order: FanoutOrder) -> FanoutResult:
    """Carry it out.

    Raises:
        SwarmError: Somebody was not told.
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
