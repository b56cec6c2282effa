"""torch's own `timer.expires`, watched by Rallypoint's timer service.

Only the line with `configure` changes in a program:

    from torch.distributed.elastic import timer
    from rallypoint.torch.timer import RallypointTimerClient

    timer.configure(RallypointTimerClient())
    with timer.expires(after=60):
        loss = step(batch)
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from torch.distributed.elastic.timer import TimerClient, api

from rallypoint.timer import expires

if TYPE_CHECKING:
    from rallypoint.timer.worker.expires import Guard

__all__ = ["RallypointTimerClient"]

# Ten years: the longest time of a timer. torch accepts any later time, infinity too.
_LONGEST = 315_360_000.0
# A timer whose time has passed already expires at once.
_SHORTEST = 1e-9
# torch 2.13 looks one frame too near for its default scope, which is then a line of contextlib for all blocks.
_DEFAULT_SCOPE = f"{contextlib.__file__}#"
_NOT_THE_CALLER = (contextlib.__file__, api.__file__)


class RallypointTimerClient(TimerClient):  # type: ignore[misc]  # torch has no types here
    """Timers of this process, at the same agent that `rallypoint.timer.expires` uses.

    As in torch, a process has one timer per scope: a second `acquire` replaces its deadline, also from another
    thread. A forked child starts without timers. If threads or nested blocks share a scope, use
    `rallypoint.timer.expires`: each of its blocks has its own timer. To torch 2.13 all blocks without a named scope
    have the same one; here they are shown with the line that they are in.
    """

    def __init__(self, signal: int | None = None) -> None:
        """Make a client without timers.

        Args:
            signal: Signal sent to a hung worker before SIGKILL, 1 to 64; 0: the hang is only reported. Default: SIGKILL
                at once.
        """
        self._signal = signal
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        # A signal handler may interrupt the thread that holds the lock, and use a timer itself.
        self._changing = threading.RLock()
        self._held: dict[str, Guard] = {}

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Start a timer, in place of the scope's present one.

        Args:
            scope_id: Name of the code that runs under the timer.
            expiration_time: Seconds since the epoch by `time.time()`. That clock may be set, so only the distance from
                now counts. Less than zero: release.

        Raises:
            RuntimeError: There is no agent; see `rallypoint.timer.configure`.
            ValueError: `expiration_time` or the client's signal is invalid.
        """
        after = expiration_time - time.time()
        if expiration_time < 0:
            self.release(scope_id)
            return
        guard = expires(after=_within_bounds(after), scope=_shown(scope_id), signal=self._signal)
        self._own()
        with self._changing:
            former = self._held.get(scope_id)
            # Stored first: if a signal handler raises, the scope's next acquire or release finds it.
            self._held[scope_id] = guard
            if former is not None:
                former.__exit__(None, None, None)
            guard.__enter__()

    def release(self, scope_id: str) -> None:
        """End a timer. A timer that this process does not hold is ignored."""
        self._own()
        with self._changing:
            guard = self._held.pop(scope_id, None)
            if guard is not None:
                guard.__exit__(None, None, None)

    def _own(self) -> None:
        """Start without timers after a fork: they are the parent's, and so may be the lock's holder."""
        if os.getpid() != self._pid:
            self._begin()


def _within_bounds(after: float) -> float:
    return after if after != after else min(max(after, _SHORTEST), _LONGEST)  # noqa: PLR0124 - not a number


def _shown(scope_id: str) -> str:
    """Return the name under which a scope is shown to people."""
    if not scope_id.startswith(_DEFAULT_SCOPE):
        # An empty name would count as not given.
        return scope_id or "unnamed"
    frame = sys._getframe(2)
    while frame.f_code.co_filename in _NOT_THE_CALLER:
        if frame.f_back is None:
            return scope_id
        frame = frame.f_back
    return f"{frame.f_code.co_filename}#{frame.f_lineno}"
