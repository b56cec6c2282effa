"""torch's own `timer.expires`, carried by Rallypoint's watchdog.

One line of a program changes, the one with `configure`:

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

# Ten years: the longest that a timer can have. torch takes any time to come, infinity too.
_LONGEST = 315_360_000.0
# A timer that ran out before it was set runs out at once, rather than being no timer.
_SHORTEST = 1e-9
# torch 2.13 looks one frame too near for its default scope, so that it names a line of contextlib for all blocks.
_DEFAULT_SCOPE = f"{contextlib.__file__}#"
_NOT_THE_CALLER = (contextlib.__file__, api.__file__)


class RallypointTimerClient(TimerClient):  # type: ignore[misc]  # torch has no types here
    """Timers of this process, at the agent that `rallypoint.timer.expires` uses too.

    As torch has it, there is one timer for each scope of a process: acquiring it anew replaces its deadline, also
    from another thread. A child process that is forked begins without any. Where threads or nested blocks share
    a scope, `rallypoint.timer.expires` is better: each of its blocks has a timer of its own. To torch 2.13 all
    blocks that name no scope have the same one; what is shown of them here is the line that they are in.
    """

    def __init__(self, signal: int | None = None) -> None:
        """Makes a client without timers.

        Args:
            signal: what a worker that hangs is sent before SIGKILL, 1 to 64; 0: it is not killed, only reported.
                Default: SIGKILL at once.
        """
        self._signal = signal
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        # A signal handler may interrupt the thread that has it, and use a timer itself.
        self._changing = threading.RLock()
        self._held: dict[str, Guard] = {}

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Starts a timer, in place of the one of that scope.

        Args:
            scope_id: what the code is doing.
            expiration_time: seconds since the epoch, as `time.time()` has them now. That clock may be set, so
                what counts is how far off it is at this moment. Less than zero: release.

        Raises:
            RuntimeError: there is no agent; see `rallypoint.timer.configure`.
            ValueError: `expiration_time` or the client's signal makes no sense.
        """
        after = expiration_time - time.time()
        if expiration_time < 0:
            self.release(scope_id)
            return
        guard = expires(after=_within_bounds(after), scope=_shown(scope_id), signal=self._signal)
        self._own()
        with self._changing:
            former = self._held.get(scope_id)
            # Noted first: if a signal handler raises, the scope's next acquire or release finds it.
            self._held[scope_id] = guard
            if former is not None:
                former.__exit__(None, None, None)
            guard.__enter__()

    def release(self, scope_id: str) -> None:
        """Ends a timer. One that this process doesn't hold is no error."""
        self._own()
        with self._changing:
            guard = self._held.pop(scope_id, None)
            if guard is not None:
                guard.__exit__(None, None, None)

    def _own(self) -> None:
        """After a fork: the timers are the parent's, and so may be the lock's holder."""
        if os.getpid() != self._pid:
            self._begin()


def _within_bounds(after: float) -> float:
    return after if after != after else min(max(after, _SHORTEST), _LONGEST)  # noqa: PLR0124 - not a number


def _shown(scope_id: str) -> str:
    """What people are shown of a scope."""
    if not scope_id.startswith(_DEFAULT_SCOPE):
        # An empty one would be taken for one that was not given.
        return scope_id or "unnamed"
    frame = sys._getframe(2)
    while frame.f_code.co_filename in _NOT_THE_CALLER:
        if frame.f_back is None:
            return scope_id
        frame = frame.f_back
    return f"{frame.f_code.co_filename}#{frame.f_lineno}"
