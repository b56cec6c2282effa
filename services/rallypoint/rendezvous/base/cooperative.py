"""Long work in many small parts, so that whoever carries it out can pause between two of them. Pure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Generic, TypeAlias, TypeVar

from rallypoint.rendezvous.core.commands import Refused

_T = TypeVar("_T")

Work: TypeAlias = Generator[None, None, _T]
"""Yields after every part of it, which takes microseconds as a rule, and returns what comes of it."""


def finish(work: Work[_T]) -> _T:
    """Carry it out without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _T = end.value
            return result


# ---- The long work of a process, in slices: the event loop has its turn after each.


_SLICE = 0.01
"""Seconds for which the event loop is held. Whatever else is under way meanwhile, a keep-alive or a commit, takes as
many slices as it has steps, some ten. Shorter makes it quicker, until the turns of the loop cost more than the work."""


class CooperativeRunner:
    """Carries out one work at a time; all that work in one event loop share it.

    With a slice for each of several works in every turn, the loop would be held for as many slices as there are works.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds, going on while work is done."""
        self._clock = clock
        self._free = asyncio.Lock()

    async def carry_out(self, work: Work[_T]) -> _T:
        """What comes of the work; it begins once those that came before it are done.

        Cancelling the caller ends it where it is.

        Raises:
            Exception: What the work raises.
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


# ---- A slot between one writer of states and one reader that may be slow.


class LatestValue(Generic[_T]):
    """Holds the latest value only: a reader that falls behind skips states, and never makes a queue grow."""

    def __init__(self) -> None:
        self._value: _T | None = None
        self._end: BaseException | None = None
        self._ended = False
        self._filled = asyncio.Event()

    def put(self, value: _T) -> None:
        """Replace the value that waits, if any."""
        if not self._ended:
            self._value = value
            self._filled.set()

    def end(self, error: BaseException | None = None) -> None:
        """After the value that waits, if any, comes nothing, or `error`. The first end counts."""
        if not self._ended:
            self._ended, self._end = True, error
            self._filled.set()

    def cut(self, error: BaseException) -> None:
        """Nothing comes any more, not even the value that waits; `error`, if the slot had not been ended."""
        self._value = None
        self.end(error)

    def wake(self) -> None:
        """Have `take_or_wake` return, without a value if none waits."""
        self._filled.set()

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more, but for a value that waits."""
        return self._ended

    async def take(self) -> _T | None:
        """Wait for a value and take it; None at the end.

        Raises:
            BaseException: The error that the slot was ended with.
        """
        while (value := await self.take_or_wake()) is None and not self._ended:
            pass
        return value

    async def take_or_wake(self) -> _T | None:
        """Wait for a value and take it; None at the end, or when woken without one.

        Raises:
            BaseException: The error that the slot was ended with.
        """
        await self._filled.wait()
        value, self._value = self._value, None
        if not self._ended:
            self._filled.clear()
        if value is None and self._end is not None:
            # Many slots may be ended with one error: a raise must not add to the traceback of another.
            raise self._end.with_traceback(None)
        return value


# ---- Answers to requests that wait: given once, and to nobody who has gone.


def settle(answer: asyncio.Future[_T], outcome: _T | Refused) -> None:
    """Tell who waits for `answer` what came out, or why it was refused."""
    if answer.done():  # its caller has gone
        return
    if isinstance(outcome, Refused):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
