"""First answers to newcomers, held back while more of them are coming.

A node that waits for a round needs its lease soon, not at once; what it waits for is its place. In a storm of newcomers
every message written is time in which nobody else is let in. So while they keep coming, the lease of each waits, and
often goes out in one message with its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Newcomers that come this close together are one storm, seconds. A lone one waits no longer than this for its lease.
_QUIET = 0.02
# Of the interval at which a node is to say that it is alive, which it learns with its lease: so much may pass before.
_SHARE_OF_INTERVAL = 0.5
# However long that interval, a node must not take the service for dead, seconds.
_MOST_PATIENCE = 5.0


class Arrivals:
    """Newcomers of one run who have not been answered. Belongs to an event loop."""

    def __init__(self) -> None:
        self._wakes: list[Callable[[], None]] = []
        self._patience = 0.0
        self._first = self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, wake: Callable[[], None], keep_alive_interval: float) -> None:
        """Have a newcomer woken when it is quiet, and before half of its keep-alive interval (seconds) is over."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        self._wakes.append(wake)
        if self._timer is None:
            self._first = self._last
            self._patience = min(keep_alive_interval * _SHARE_OF_INTERVAL, _MOST_PATIENCE)
            self._look_again(loop)

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        at = min(self._last + _QUIET, self._first + self._patience)
        self._timer = loop.call_at(at, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop.time() < min(self._last + _QUIET, self._first + self._patience):
            self._look_again(loop)
            return
        self._timer = None
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()
