"""How much is done between two turns of an event loop: what can be said of how long it is held on any machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TickingClock:
    """Goes on by so many seconds whenever it is read."""

    def __init__(self, tick: float) -> None:
        self.now = 0.0
        self._tick = tick

    def __call__(self) -> float:
        self.now += self._tick
        return self.now


class Turns:
    """Counts the turns of the loop, and what was done between two of them.

    Attributes:
        taken: How many turns there were.
        most: The most that was done between two.
        done: All that was done.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.most = 0
        self.done = 0
        self._in_this = 0

    def did(self, amount: int) -> None:
        """Take note of something that takes time."""
        self.done += amount
        self._in_this += amount
        self.most = max(self.most, self._in_this)

    async def _count(self) -> None:
        while True:
            self.taken += 1
            self._in_this = 0
            await asyncio.sleep(0)


@asynccontextmanager
async def counting() -> AsyncIterator[Turns]:
    """Counts, as one of those who wait for their turns would."""
    turns = Turns()
    counter = asyncio.create_task(turns._count())
    await asyncio.sleep(0)
    try:
        yield turns
    finally:
        counter.cancel()
