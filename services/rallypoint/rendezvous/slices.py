"""The long work of a process, in slices: the event loop has its turn after each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from rallypoint.rendezvous.gradual import Work

_T = TypeVar("_T")

_SLICE = 0.01
"""Seconds for which the event loop is held. Whatever else is under way meanwhile, a keep-alive or a commit, takes as
many slices as it has steps, some ten. Shorter makes it quicker, until the turns of the loop cost more than the work."""


class Slices:
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
