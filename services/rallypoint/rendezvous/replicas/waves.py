"""Shards move by the dozen, as a rule: who reads the log is told of each wave once, not of each shard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass

QUIET = 0.5
"""Seconds without another shard after which a wave is over."""

LONGEST = 5.0
"""Seconds after which a wave is told of though it goes on."""


@dataclass(frozen=True, slots=True)
class Wave:
    """What moved alike: so many shards, with so many runs, the slowest of them in so many seconds."""

    shards: int = 0
    runs: int = 0
    slowest: float = 0.0


class Waves:
    """Adds up shards that move alike and soon after one another, and tells of them together."""

    def __init__(self, tell: Callable[[Hashable, Wave], None]) -> None:
        """`tell` is called with what is alike, and with how many it was."""
        self._tell = tell
        self._waves: dict[Hashable, Wave] = {}
        self._ends: asyncio.TimerHandle | None = None
        self._tell_by = 0.0

    def add(self, alike: Hashable, *, runs: int, seconds: float = 0.0) -> None:
        """A shard moved.

        Args:
            alike: What it has in common with the others of its wave.
            runs: How many runs are in it.
            seconds: How long it took.
        """
        loop = asyncio.get_running_loop()
        if not self._waves:
            self._tell_by = loop.time() + LONGEST
        before = self._waves.get(alike, Wave())
        self._waves[alike] = Wave(before.shards + 1, before.runs + runs, max(before.slowest, seconds))
        if self._ends is not None:
            self._ends.cancel()
        self._ends = loop.call_at(min(loop.time() + QUIET, self._tell_by), self.end)

    def end(self) -> None:
        """Tell of what there is now."""
        if self._ends is not None:
            self._ends.cancel()
        waves, self._waves, self._ends = self._waves, {}, None
        for alike, wave in waves.items():
            self._tell(alike, wave)
