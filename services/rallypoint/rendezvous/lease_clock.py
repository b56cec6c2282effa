"""The time by which leases and deadlines of runs are judged."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.serving.lag import LagSettings, WatchClock


class LeaseClock:
    """Seconds that leave out what time this process was paused, and stand still once it drains.

    While nodes can't show that they are alive, nothing may be held against them.
    """

    def __init__(self, clock: Callable[[], float], lag: LagSettings) -> None:
        """Go as `clock` does, monotonic seconds; `lag` says how pauses are noticed and forgiven."""
        self._clock = clock
        self._lag = lag
        self._watch = WatchClock(clock(), lag)
        self._looked = clock()
        self._stopped_at: float | None = None

    def now(self) -> float:
        """What it shows."""
        return self._watch.read(self._clock()) if self._stopped_at is None else self._stopped_at

    def stop(self) -> None:
        """Stand still from now on."""
        # Not past the last look: a pause that nobody has noticed yet must not count against anybody.
        self._stopped_at = self._watch.read(min(self._clock(), self._looked + self._lag.pulse))

    def patience(self, deadline: float | None) -> float | None:
        """How long to wait for a deadline before it is looked at the clock again; None: for ever."""
        if deadline is None or self._stopped_at is not None:
            return None
        # However far the deadline: only who looks often can tell that it was paused in between.
        return min(max(0.0, deadline - self.now()), self._lag.pulse)

    def look(self, *, waited: bool) -> float:
        """Take note that this process is awake, and had a deadline to wait for or not; the seconds forgiven."""
        now = self._clock()
        forgiven = self._watch.observe(now, self._looked + self._lag.pulse) if waited else 0.0
        self._looked = now
        return forgiven
