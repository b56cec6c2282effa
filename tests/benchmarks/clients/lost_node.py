"""Client process of `failover` that will be killed: it holds one node, and reports that on stdout."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import NoReturn

from benchmarks.clients.command import carry_out
from benchmarks.clients.swarm import JOINED, Swarm, join_requests, ready


@dataclass(frozen=True, slots=True)
class LostNodeOrder:
    """A request to the client process.

    Attributes:
        endpoint: address of the server.
        places: number of nodes of a round.
        timeout: seconds to join.
    """

    endpoint: str
    places: int
    timeout: float


async def hold(order: LostNodeOrder) -> NoReturn:
    """Join, and hold the node until killed.

    Raises:
        SwarmError: It could not join.
    """
    await ready(order.endpoint)
    swarm = Swarm(order.endpoint, join_requests(range(1), places=order.places))
    swarm.start()
    await swarm.reached(JOINED, order.timeout)
    sys.stdout.write("joined\n")
    sys.stdout.flush()
    await asyncio.Event().wait()
    raise AssertionError("an event that nobody sets")


if __name__ == "__main__":
    carry_out(LostNodeOrder, hold)
