"""A slot between one writer of states and one reader that may be slow."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Slot(Generic[_T]):
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
