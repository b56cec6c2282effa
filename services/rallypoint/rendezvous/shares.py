"""What is counted over all shards of a process, because the limits of a service are limits of the whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.rendezvous.limits import KeptEvents


@dataclass(slots=True)
class Total:
    """A sum that several have shares of."""

    used: int = 0


class Share:
    """One shard's part of a total."""

    __slots__ = ("_total", "own")

    def __init__(self, total: Total | None = None) -> None:
        """Begin with nothing; without a total to count in, be the whole of one."""
        self._total = total or Total()
        self.own = 0

    @property
    def together(self) -> int:
        """What all have."""
        return self._total.used

    @property
    def others(self) -> int:
        """What the others have."""
        return self._total.used - self.own

    def add(self, more: int) -> None:
        """Count more; or less, if negative."""
        self.own += more
        self._total.used += more

    def release(self) -> None:
        """Give back all of it."""
        self.add(-self.own)


@dataclass(slots=True)
class Totals:
    """What the shards of one process use together.

    Attributes:
        runs: Runs.
        events: The events that are kept for people.
        states: Runs that have a fenced state.
        state_bytes: Bytes of these.
        state_queued_bytes: Bytes of sets that wait for a commit to begin.
        state_watchers: Open watches of fenced states.
    """

    runs: Total = field(default_factory=Total)
    events: KeptEvents = field(default_factory=KeptEvents)
    states: Total = field(default_factory=Total)
    state_bytes: Total = field(default_factory=Total)
    state_queued_bytes: Total = field(default_factory=Total)
    state_watchers: Total = field(default_factory=Total)
