"""The time by which leases and deadlines of runs are judged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rallypoint.rpc.clock import LagSettings, WatchClock


class LeaseClock:
    """Seconds that leave out the time for which this process was paused, and stand still once it drains.

    While nodes can't show that they are alive, nothing may be held against them.

    A timer of its own notices pauses, so that nothing else which takes long (a commit) is taken for one. Each reading
    notices them too: the timer need not be the first to run when the process wakes.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        lag: LagSettings,
        on_forgiven: Callable[[float, float], None] = lambda seconds, now: None,
    ) -> None:
        """Set up; `watch` begins.

        Args:
            clock: Monotonic seconds.
            lag: How pauses are noticed and forgiven.
            on_forgiven: Called with the seconds that were left out just now, and the time that this clock shows since.
        """
        self._clock = clock
        self._lag = lag
        self._on_forgiven = on_forgiven
        self._shown = WatchClock(clock(), lag)
        self._timer: asyncio.TimerHandle | None = None
        # By when the timer is to have fired, if there is one.
        self._due = 0.0
        self._stopped_at: float | None = None

    def now(self) -> float:
        """The time, seconds."""
        if self._stopped_at is not None:
            return self._stopped_at
        self._look()
        return self._shown.read(self._clock())

    def stop(self) -> None:
        """Stand still from now on."""
        self._stopped_at = self.now()
        self.watch(wanted=False)

    def patience(self, deadline: float | None) -> float | None:
        """Seconds to wait for a deadline; None: for ever. It may prove to be too early, if there is a pause."""
        if deadline is None or self._stopped_at is not None:
            return None
        return max(0.0, deadline - self.now())

    def watch(self, *, wanted: bool) -> None:
        """Notice pauses from now on, or no longer: without deadlines nobody need be woken for that."""
        if not wanted:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None and self._stopped_at is None:
            self._due = self._clock() + self._lag.pulse
            self._set_timer()

    def leave_out(self, since: float) -> None:
        """Leave out the time since the clock that this one goes by showed `since`, if it is long enough for a pause."""
        self._forgive(since + self._lag.pulse)

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._lag.pulse, self._pulse)

    def _pulse(self) -> None:
        self._look()
        self._set_timer()

    def _look(self) -> None:
        if self._timer is not None:
            due, self._due = self._due, self._clock() + self._lag.pulse
            self._forgive(due)

    def _forgive(self, due: float) -> None:
        now = self._clock()
        if (seconds := self._shown.observe(now, due)) > 0:
            self._on_forgiven(seconds, self._shown.read(now))
