"""What one service, and one run of it, may use, so that no run starves another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

from rallypoint.rendezvous.core.refusals import Refused


@dataclass(frozen=True, slots=True)
class RendezvousLimits:
    """Bounds of a rendezvous service. Whoever comes past one is refused, and told when to try again."""

    # Runs at a time, closed ones that have not expired included. An idle run takes some 10 KB.
    runs: int = 10_000
    # Nodes of a run at a time, spares included. A node takes some 40 KB, most of it for its connection.
    nodes_per_run: int = 16_384
    # Streams of WatchRun and WatchEvents on a run at a time. Each change of a run is told to all of them.
    subscribers_per_run: int = 1_000
    # What is kept of a run's events for ListEvents and WatchEvents: the last ones, by number and by bytes,
    # whichever bound comes first. Two rounds of 8,000 nodes have 32,000. They are held in memory.
    events_per_run: int = 50_000
    event_bytes_per_run: int = 16 * 1024 * 1024
    # What is kept of the events of all runs together, in bytes: past it the longest histories are shortened first.
    event_bytes: int = 512 * 1024 * 1024
    # Seconds that a run without nodes is remembered; as long as torch's etcd rendezvous keeps one. Longer lets a
    # job come back later, and keeps more runs.
    run_ttl: float = 7_200.0
    # Messages that a node may send on its stream: so many a second for ever, and so many at once. An agent sends a
    # heartbeat every 5 s, and a few messages when a round changes; one that sends more is broken or hostile, and its
    # stream is ended with TOO_MANY_REQUESTS. A message costs some 50 us, so 200 a second are 1 % of a core.
    messages_per_second: float = 200.0
    message_burst: int = 1_000


@dataclass(eq=False)
class LimitReached(Refused):
    """Something is used up. `reason` is the machine's word for what, `retry_after` in seconds."""

    reason: str
    run_id: str
    detail: str
    limit: int
    retry_after: float = 5.0

    def __str__(self) -> str:
        return f"{self.detail} (the limit is {self.limit})"


class EventHistory(Protocol):
    """The events of one run that are kept."""

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""

    def shorten(self, most_bytes: int) -> None:
        """Drop the oldest, until at most so many bytes are kept."""


@dataclass(slots=True)
class KeptEvents:
    """What several histories keep together.

    Attributes:
        bytes: Bytes of all of them.
        histories: All of them.
    """

    bytes: int = 0
    histories: WeakSet[EventHistory] = field(default_factory=WeakSet)
