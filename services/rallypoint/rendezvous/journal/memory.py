"""A journal for as long as the process lives."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.rendezvous.journal.journal import Entry, Recovered


class MemoryJournal:
    """Keeps nothing beyond its process: for `--standalone`, where the run ends with the process anyway."""

    async def open(self) -> Recovered:
        """Nothing to recover."""
        return Recovered([], [], [])

    async def append(self, entries: Sequence[Entry]) -> None:
        """As durable as the process at once."""

    async def close(self) -> None:
        """Nothing to give up."""
