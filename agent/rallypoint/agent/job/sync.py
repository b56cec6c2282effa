"""Background tasks of a job, and notifications of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


class Background:
    """Runs tasks in the background; no error is lost."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        """`on_error` is called on the event loop with an exception that a task raised."""
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def end(self) -> None:
        """Cancel all running tasks, and return when they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)


# ---- Notification of changes: each watcher has one event, for any number of changes.


class Notifier:
    """Wakes its watchers. A busy watcher is woken once for all changes in the meantime, so no queue grows."""

    def __init__(self) -> None:
        """Create it without watchers."""
        self._watchers: set[asyncio.Event] = set()

    def notify(self) -> None:
        """Wake all watchers."""
        for watcher in self._watchers:
            watcher.set()

    @contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        """Yield an event that each change sets; the watcher clears it before it reads the state."""
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
