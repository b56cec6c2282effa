"""Long work in many small parts, so that its caller can pause between two of them. Pure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Generic, TypeAlias, TypeVar

_T = TypeVar("_T")

Work: TypeAlias = Generator[None, None, _T]
"""Yields after every part of it, which usually takes microseconds, and returns its result."""


def finish(work: Work[_T]) -> _T:
    """Carry out a work without a pause; returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _T = end.value
            return result


# ---- Long work of a process, in time slots: the event loop runs after each.


_SLICE = 0.01
"""Seconds for which the event loop is blocked. Other tasks meanwhile, a keep-alive or a commit, wait for one slot for
each of their steps, some ten. Shorter makes them faster, until the iterations of the loop cost more than the work."""


class CooperativeRunner:
    """Carries out one work at a time; shared by all long work in one event loop.

    If each of several works had a time slot per iteration, the loop would be blocked for the sum of them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds; must advance during work."""
        self._clock = clock
        self._free = asyncio.Lock()

    async def carry_out(self, work: Work[_T]) -> _T:
        """Carry out a work after those that came before; returns its result.

        Cancelling the caller ends it where it is.

        Raises:
            Exception: The error that the work raises.
        """
        try:
            async with self._free:
                while True:
                    end = self._clock() + _SLICE
                    while self._clock() < end:
                        next(work)
                    await asyncio.sleep(0)
        except StopIteration as end_of_work:
            result: _T = end_of_work.value
            return result
        finally:
            work.close()


# ---- A value with one writer, and one reader that may be slow.


class LatestValue(Generic[_T]):
    """Holds the latest value only: a reader that falls behind skips states, and never makes a queue grow."""

    def __init__(self) -> None:
        self._value: _T | None = None
        self._end: BaseException | None = None
        self._ended = False
        self._filled = asyncio.Event()

    def put(self, value: _T) -> None:
        """Replace the waiting value, if any."""
        if not self._ended:
            self._value = value
            self._filled.set()

    def end(self, error: BaseException | None = None) -> None:
        """After the waiting value, if any, return None to the reader, or raise `error`. The first end counts."""
        if not self._ended:
            self._ended, self._end = True, error
            self._filled.set()

    def cut(self, error: BaseException) -> None:
        """End at once, and drop the waiting value; `error` counts unless it was ended before."""
        self._value = None
        self.end(error)

    def wake(self) -> None:
        """Make `take_or_wake` return, with None if no value waits."""
        self._filled.set()

    @property
    def ended(self) -> bool:
        """True if no value can be put any more; one may still wait."""
        return self._ended

    async def take(self) -> _T | None:
        """Wait for a value and take it; None at the end.

        Raises:
            BaseException: The error of `end` or `cut`.
        """
        while (value := await self.take_or_wake()) is None and not self._ended:
            pass
        return value

    async def take_or_wake(self) -> _T | None:
        """Wait for a value and take it; None at the end, or when woken without one.

        Raises:
            BaseException: The error of `end` or `cut`.
        """
        await self._filled.wait()
        value, self._value = self._value, None
        if not self._ended:
            self._filled.clear()
        if value is None and self._end is not None:
            # Many values may be ended with one error: a raise must not add to the traceback of another.
            raise self._end.with_traceback(None)
        return value
