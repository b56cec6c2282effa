"""Waits that are bounded by a time, many at once: as `asyncio.timeout`, with one timer for all that share a time.

Most waits are over long before their time, and a timer for each costs more than the rest of them: a tenth of what a
service did while a thousand nodes connected.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

_T = TypeVar("_T")


class _Wait:
    """One wait: of a task that is let go at a deadline, unless it has gone by then (None)."""

    __slots__ = ("cancelling", "deadline", "over", "task")

    def __init__(self, task: asyncio.Task[Any], deadline: float) -> None:
        self.task: asyncio.Task[Any] | None = task
        self.deadline = deadline
        self.cancelling = task.cancelling()
        self.over = False


class _Waits:
    """The waits of one loop that share a time: they come due in the order in which they began."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._waits: deque[_Wait] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> _Wait:
        """Begin to wait, in the task that calls."""
        task = asyncio.current_task(self._loop)
        assert task is not None, "only a task can be let go"
        wait = _Wait(task, self._loop.time() + self._seconds)
        waits = self._waits
        while waits and waits[0].task is None:
            waits.popleft()
        waits.append(wait)
        if self._timer is None:
            self._timer = self._loop.call_at(wait.deadline, self._look)
        return wait

    def _look(self) -> None:
        now = self._loop.time()
        while self._waits and (self._waits[0].task is None or self._waits[0].deadline <= now):
            wait = self._waits.popleft()
            if wait.task is not None:
                wait.over = True
                wait.task.cancel()
        self._timer = self._loop.call_at(self._waits[0].deadline, self._look) if self._waits else None


_waits: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, _Waits]] = WeakKeyDictionary()


async def bounded(awaitable: Awaitable[_T], seconds: float) -> _T:
    """Wait for something for so many seconds at most. For times of which there are few: each is kept in mind.

    Raises:
        TimeoutError: It took longer, and was cancelled.
    """
    loop = asyncio.get_running_loop()
    of_loop = _waits.get(loop)
    if of_loop is None:
        of_loop = _waits[loop] = {}
    waits = of_loop.get(seconds)
    if waits is None:
        waits = of_loop[seconds] = _Waits(loop, seconds)
    wait = waits.begin()
    task = wait.task
    try:
        return await awaitable
    except asyncio.CancelledError:
        # Cancelled by nobody else as well: as asyncio.timeout tells the two apart.
        if wait.over and task is not None and task.uncancel() <= wait.cancelling:
            raise TimeoutError from None
        raise
    finally:
        wait.task = None
