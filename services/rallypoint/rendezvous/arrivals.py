"""First answers to newcomers, held back while more of them are coming.

A node that waits for a round needs its lease soon, not at once; what it waits for is its place. In a storm of newcomers
every message written is time in which nobody else is let in. So while they keep coming, the lease of each waits, and
often goes out in one message with its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# Newcomers that come this close together are one storm, seconds. A lone one waits no longer than this for its lease.
_QUIET = 0.02
# Of its lease's time to live: what a node may wait for it. With it, it learns how often to say that it is alive, and
# has time to do so: its first heartbeat comes after another third, or half at most.
_SHARE_OF_TERM = 1 / 3
# And however long that is, seconds: whoever connects gives up after a while without an answer.
_MOST_PATIENCE = 5.0


class Arrivals:
    """Newcomers of one run who have not been answered. Belongs to an event loop."""

    def __init__(self) -> None:
        # Until when each waits at most, in the order of their coming: in one run all wait equally long.
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, wake: Callable[[], None], time_to_live: float) -> None:
        """Have a newcomer woken when it is quiet, and before a third of its lease's time to live (seconds) is over."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        self._waiting.append((self._last + min(_MOST_PATIENCE, time_to_live * _SHARE_OF_TERM), wake))
        if self._timer is None:
            self._look_again(loop)

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_at(min(self._last + _QUIET, self._waiting[0][0]), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        quiet = now >= self._last + _QUIET
        while self._waiting and (quiet or now >= self._waiting[0][0]):
            self._waiting.popleft()[1]()
        if self._waiting:
            self._look_again(loop)
        else:
            self._timer = None
