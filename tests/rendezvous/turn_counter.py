"""The work done between two turns of an event loop: a measure of blocking that is the same on any machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TickingClock:
    """Advances by `tick` seconds whenever it is read."""

    def __init__(self, tick: float) -> None:
        self.now = 0.0
        self._tick = tick

    def __call__(self) -> float:
        self.now += self._tick
        return self.now


class Turns:
    """Counts the turns of the loop, and the work done between two of them.

    Attributes:
        taken: The number of turns.
        most: The most work between two turns.
        done: All work so far.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.most = 0
        self.done = 0
        self._in_this = 0

    def did(self, amount: int) -> None:
        """Count `amount` units of work."""
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
    """Count the turns, as a waiting task sees them."""
    turns = Turns()
    counter = asyncio.create_task(turns._count())
    await asyncio.sleep(0)
    try:
        yield turns
    finally:
        counter.cancel()
