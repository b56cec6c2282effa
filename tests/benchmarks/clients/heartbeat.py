"""Client process of `heartbeat`: messages without a reply, on open streams."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from benchmarks.clients.command import carry_out
from benchmarks.clients.swarm import FINAL, HEARTBEAT, ServerCost, Swarm, idle, join_requests, ready


@dataclass(frozen=True, slots=True)
class HeartbeatOrder:
    """A request to the client process.

    Attributes:
        endpoint: address of the server.
        server: its process id.
        nodes: number of nodes.
        each: number of heartbeats that each node sends back to back, and then again at its interval.
        interval: seconds between two heartbeats of a node.
        timeout: seconds until it counts as failed.
    """

    endpoint: str
    server: int
    nodes: int
    each: int
    interval: float
    timeout: float


@dataclass(frozen=True, slots=True)
class HeartbeatResult:
    """Seconds of the server's CPU per heartbeat: back to back, and spread evenly over time."""

    burst: float
    paced: float


async def heartbeat(order: HeartbeatOrder) -> HeartbeatResult:
    """Carry out the order.

    Raises:
        SwarmError: Streams were lost.
    """
    await ready(order.endpoint)
    swarm = Swarm(order.endpoint, join_requests(range(order.nodes), places=order.nodes))
    swarm.start()
    await swarm.reached(FINAL, order.timeout)
    burst = await _cost(order, swarm, 0.0)
    paced = await _cost(order, swarm, order.interval)
    swarm.check_whole()
    return HeartbeatResult(burst, paced)


async def _cost(order: HeartbeatOrder, swarm: Swarm, interval: float) -> float:
    loop = asyncio.get_running_loop()

    async def beat(index: int) -> None:
        due = loop.time() + interval * index / order.nodes
        for _ in range(order.each):
            if interval:
                await asyncio.sleep(due - loop.time())
                due += interval
            await swarm.calls[index].write(HEARTBEAT)

    await idle(order.server)
    before = ServerCost.of(order.server)
    async with asyncio.timeout(order.timeout), asyncio.TaskGroup() as beating:
        for index in range(order.nodes):
            beating.create_task(beat(index))
    # Heartbeats have no reply: wait until the server has read the last one.
    await idle(order.server)
    return (ServerCost.of(order.server).cpu - before.cpu) / (order.nodes * order.each)


if __name__ == "__main__":
    carry_out(HeartbeatOrder, heartbeat)
