"""Work that goes on in the background of a job, and may not fail unheard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


class Background:
    """Runs it."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        """`on_error` is called with what work raises, on the event loop."""
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def end(self) -> None:
        """Cancel all that runs, and return when it has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)


# ---- Who waits for something to change: each watcher has one wake-up, however many changes it stands for.


class Notifier:
    """Wakes its watchers; who is busy is woken once for all that has changed meanwhile, and no queue grows."""

    def __init__(self) -> None:
        """Nobody watches yet."""
        self._watchers: set[asyncio.Event] = set()

    def notify(self) -> None:
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
