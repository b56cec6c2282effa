"""When to tell the service what has changed: gathered, but never for so long that a timer would expire late."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

# A timer is told of within this part of its duration, but there is no use in less than so many seconds.
_PART, _LEAST = 0.1, 0.01


class Gathering:
    """Changes wait here for others, so that they travel together. Belongs to one event loop."""

    def __init__(self, linger: float) -> None:
        """Nothing waits. `linger`: most seconds that a change waits."""
        self._linger = linger
        self._due = math.inf
        self._earlier = asyncio.Event()

    def note(self, after: float = math.inf) -> None:
        """Something changed. `after`: seconds that a timer may take, if that is what began."""
        self._tell_within(min(self._linger, max(_LEAST, after * _PART)))

    def hurry(self) -> None:
        """What has changed is to be told at once."""
        self._tell_within(0.0)

    def _tell_within(self, seconds: float) -> None:
        due = asyncio.get_running_loop().time() + seconds
        if due < self._due:
            self._due = due
            self._earlier.set()

    async def gathered(self) -> None:
        """Returns when something has changed and is to be told."""
        loop = asyncio.get_running_loop()
        while (left := self._due - loop.time()) > 0:
            self._earlier.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._earlier.wait(), left if left < math.inf else None)
        self._due = math.inf
