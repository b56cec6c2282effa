"""One read for all who want it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class SharedRead(Generic[_T]):
    """Reads something for whoever asks, once for all who ask while another read is under way.

    They share the next one and not the one under way: that may have looked before something happened which they know
    of already. So whoever asks sees everything that was done before it asked.
    """

    def __init__(self, read: Callable[[], Awaitable[_T]]) -> None:
        """Read with `read`, never twice at a time."""
        self._read = read
        self._current: asyncio.Task[_T] | None = None
        self._next: asyncio.Task[_T] | None = None

    async def ask(self) -> _T:
        """What a read finds that begins after this was called.

        Raises:
            Exception: What the read raises.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._after(self._current))
            self._next.add_done_callback(self._done)
        # Whoever gives up takes nothing from the others.
        return await asyncio.shield(self._next)

    async def _after(self, current: asyncio.Task[_T] | None) -> _T:
        if current is not None:
            await asyncio.wait({current})
        self._current, self._next = self._next, None
        return await self._read()

    def _done(self, task: asyncio.Task[_T]) -> None:
        if self._current is task:
            self._current = None
        if not task.cancelled():
            task.exception()  # nobody may be waiting for it any more
