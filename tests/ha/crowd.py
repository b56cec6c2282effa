"""Hundreds of nodes in this process that join runs, with a record of the events that would stop their workers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rallypoint.rendezvous.client import Admitted, Event
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_duration
from torture.crowd import Crowd
from torture.tormented_node import TormentedNode

LEASE = 20.0
"""Time to live of a node's lease, seconds."""


class WatchedNode(TormentedNode):
    """A node that records when it resumed its lease, and which events stopped its workers.

    Attributes:
        resumed_at: Times at which it resumed its lease on a new stream, by the event loop's clock.
        disturbances: Events that stopped its workers: an end of the round, or of its lease.
    """

    resumed_at: list[float]
    disturbances: list[str]

    def _on_event(self, event: Event) -> None:
        before = self.place
        super()._on_event(event)
        if before is not None and self.place != before:
            self.disturbances.append(f"{self.name} had {before}, has {self.place} after {event}")
        if isinstance(event, Admitted) and event.resumed:
            self.resumed_at.append(asyncio.get_running_loop().time())


class WatchedCrowd(Crowd):
    """Nodes of one run, each with a connection of its own.

    Attributes:
        watched: The nodes.
    """

    def __init__(self, endpoints: str, run_id: str, count: int, settings: pb.RunSettings) -> None:
        """Create `count` nodes; none has joined."""
        super().__init__(endpoints, settings, 0, random.Random())
        self.watched: list[WatchedNode] = []
        for number in range(count):
            name, draw = f"node-{number}", random.Random()
            node = WatchedNode(name, endpoints, settings, draw, self.changed.set, run_id=run_id)
            node.resumed_at, node.disturbances = [], []
            self.watched.append(node)
        self.nodes.extend(self.watched)

    @property
    def disturbances(self) -> list[str]:
        """The events that stopped workers, of all nodes."""
        return [each for node in self.watched for each in node.disturbances]

    async def resumed(self, since: float, timeout: float) -> float:
        """Wait until all nodes have resumed their leases after `since`; return the time of the last one.

        Times are those of the event loop's clock.

        Raises:
            AssertionError: A node has not in time.
        """

        def all_have() -> bool:
            return all(node.resumed_at and node.resumed_at[-1] > since for node in self.watched)

        await self.until("all nodes to resume", all_have, timeout)
        return max(next(at for at in node.resumed_at if at > since) for node in self.watched)


def steady(count: int) -> pb.RunSettings:
    """Return the settings of a run of exactly `count` nodes."""
    return pb.RunSettings(
        min_nodes=count,
        max_nodes=count,
        max_restarts=1_000,
        keep_alive_interval=to_duration(LEASE / 4),
        keep_alive_max_attempt=4,
    )


def patient(count: int) -> pb.RunSettings:
    """As `steady`, but a node may be disconnected for a minute without being removed."""
    settings = steady(count)
    settings.keep_alive_interval.FromSeconds(15)
    settings.disconnect_grace.FromSeconds(60)
    return settings


@asynccontextmanager
async def watched_crowd(
    endpoints: str, run_id: str, count: int, settings: pb.RunSettings | None = None
) -> AsyncIterator[WatchedCrowd]:
    """Yield nodes that have joined, or are about to; stop all of them after the block."""
    crowd = WatchedCrowd(endpoints, run_id, count, settings or steady(count))
    crowd.join()
    try:
        yield crowd
    finally:
        await crowd.die()
