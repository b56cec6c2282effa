"""Background tasks of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
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
