"""A journal that can be asked to wait for what is on its way to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rallypoint.rendezvous.journal.journal import Entry, Journal, Recovered


class TrackedJournal:
    """A journal that others can read too, who may see a commit before its owner has learned that it was made.

    So an owner that answers from memory could tell what was, after somebody else told what is. It doesn't if it first
    waits, with `settled`, for the commits under way: what one of them brought is in memory then.
    """

    def __init__(self, journal: Journal) -> None:
        """Track what is appended to `journal`."""
        self._journal = journal
        self._under_way: set[asyncio.Future[None]] = set()

    async def open(self) -> Recovered:
        """See `Journal.open`."""
        return await self._journal.open()

    async def append(self, entries: Sequence[Entry]) -> None:
        """See `Journal.append`."""
        ended = asyncio.get_running_loop().create_future()
        self._under_way.add(ended)
        try:
            await self._journal.append(entries)
        finally:
            # Whoever appended goes on in this very step of the event loop, and takes over what is durable; those who
            # wait for it come after.
            self._under_way.discard(ended)
            ended.set_result(None)

    async def close(self) -> None:
        """See `Journal.close`."""
        await self._journal.close()

    async def settled(self) -> None:
        """Return when each append that is under way has ended, well or not."""
        if self._under_way:
            await asyncio.wait([*self._under_way])
