"""Waiting until something that changes has changed as wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class News:
    """Tells whoever waits that something changed; each looks for itself at what.

    Attributes:
        count: How often there was news.
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self.count = 0

    def tell(self) -> None:
        """Have everybody look who waits."""
        self.count += 1
        for each in self._waiting:
            if not each.done():
                each.set_result(None)

    async def until(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        """Return True as soon as a condition holds; False after `timeout` seconds without."""
        try:
            async with asyncio.timeout(timeout):
                while not holds():
                    await self._next()
        except TimeoutError:
            return holds()
        return True

    async def since(self, seen: int, timeout: float | None) -> None:
        """Return when there has been news after the `seen`-th, or after `timeout` seconds."""
        await self.until(lambda: self.count > seen, timeout)

    async def _next(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)
