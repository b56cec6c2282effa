"""Who waits for something to change: each watcher has one wake-up, however many changes it stands for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Changes:
    """Wakes its watchers; who is busy is woken once for all that has changed meanwhile, and no queue grows."""

    def __init__(self) -> None:
        """Nobody watches yet."""
        self._watchers: set[asyncio.Event] = set()

    def tell(self) -> None:
        """Something has changed."""
        for watcher in self._watchers:
            watcher.set()

    @contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        """An event that is set by each change, for the watcher to clear before it looks."""
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
