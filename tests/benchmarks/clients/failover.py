"""Client process of `failover`: the surviving nodes, after another node's process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass

from benchmarks.clients.command import carry_out
from benchmarks.clients.swarm import FINAL, Swarm, join_requests, ready
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

_JOINABLE = (pb.PHASE_JOINABLE, 0)
_REPLACED = (pb.PHASE_FROZEN, 2)
# Seconds between the round's start and the kill, so that the start does not affect the measurement.
_CALM = 1.0


@dataclass(frozen=True, slots=True)
class FailoverOrder:
    """A request to the client process.

    Attributes:
        endpoint: address of the server.
        `lost_node`: process id of the client with the one other node, which is killed.
        places: number of nodes of the round, including that one.
        spare: True if a spare joins, to replace the lost node.
        timeout: seconds until it counts as failed.
    """

    endpoint: str
    lost_node: int
    places: int
    spare: bool
    timeout: float


@dataclass(frozen=True, slots=True)
class FailoverResult:
    """Seconds from the SIGKILL until the first and the last survivor were notified."""

    first: float
    last: float


async def failover(order: FailoverOrder) -> FailoverResult:
    """Carry out the order.

    Raises:
        SwarmError: A node was not notified.
    """
    await ready(order.endpoint)
    own = range(1, order.places + (1 if order.spare else 0))
    swarm = Swarm(order.endpoint, join_requests(own, places=order.places))
    swarm.start()
    await swarm.reached(FINAL, order.timeout, count=order.places - 1)
    await asyncio.sleep(_CALM)
    began = time.perf_counter()
    os.kill(order.lost_node, signal.SIGKILL)
    told = await swarm.reached(_REPLACED if order.spare else _JOINABLE, order.timeout)
    return FailoverResult(told.first - began, told.last - began)


if __name__ == "__main__":
    carry_out(FailoverOrder, failover)
