"""The watchdog's own clock: it stands still while the watchdog did not run.

When a watchdog was paused (SIGSTOP, a starved machine, a paused VM), timers are overdue after it, and their releases
wait unread in its sockets. It must not report those workers. So deadlines are kept on a clock that leaves out the time
in which the watchdog measurably did not run. That moves every deadline at once, at no cost.
"""

from __future__ import annotations

from dataclasses import dataclass

ROUNDING = 1e-6
"""A deadline this close, in seconds, counts as reached, or is waited for this long. Deadlines are converted between two
clocks; without this margin, a rounding error could make the caller wake at the same instant for ever."""
# Seconds from a pause to the first check after it. Half of it is the largest amount by which a second pause, right
# after the first, may be compensated too little.
_FIRST_LOOK = 0.01


@dataclass(frozen=True, slots=True)
class LagSettings:
    """How lag is measured and compensated. All in seconds."""

    # A wake-up this late is ordinary scheduling and is not compensated. Default 0.1: twice the lateness that
    # expiries may have, so that a busy machine does not slow the clock permanently. Lower gives fewer false expiries,
    # and later ones under load.
    tolerance: float = 0.1
    # The watchdog wakes at least this often while it has timers, only to detect its own pauses; more often right
    # after a pause, see WatchClock.next_look.
    # Default 0.25: four wake-ups a second cost nothing. A pause is measured too short by at most this much.
    pulse: float = 0.25
    # Extra compensation for a lag of at least the pulse, but never more than the lag itself: for the part of a pause
    # before the missed wake-up, and for time to read the messages in the sockets. Default 1. A shorter lag is a busy
    # machine, not a pause, and comes again: doubled, it would make expiries late without a reason.
    settle: float = 1.0


class WatchClock:
    """Monotonic seconds, less those in which the watchdog did not run.

    A pause of at least twice the pulse is left out whole. The time h from its beginning to the next planned check is
    hidden; the rest of its length P, at least a pulse, is measured and compensated, plus a grace that must make up for
    h. Long after the previous pause, the grace is `settle` or the measured time, each of which is at least h. Soon
    after it, only half of the time watched since then may be taken back. So checks are close together then: each is due
    after as long as was watched before it, so that h, which is no longer than that, is at most half of the time watched
    until the check.

    The clock may step back, by at most `settle`. It always advances: of the time really watched, `settle` takes back at
    most half, so a worker that hangs is reported even by a watchdog that is paused again and again.
    """

    def __init__(self, now: float, settings: LagSettings) -> None:
        self._settings = settings
        self._forgiven = 0.0
        self._settled_at = now - 2 * settings.settle

    @property
    def forgiven(self) -> float:
        """Seconds left out until now."""
        return self._forgiven

    def read(self, now: float) -> float:
        """Return the time of this clock when the monotonic clock is at `now`."""
        return now - self._forgiven

    def next_look(self, now: float) -> float:
        """Return when to check next, by the monotonic clock, so that every later pause is compensated in full."""
        watched = self.read(now) - self._settled_at
        return now + min(self._settings.pulse, max(_FIRST_LOOK, watched))

    def observe(self, now: float, due: float) -> float:
        """Record that the watchdog wakes at `now` and planned to at `due`; return the seconds left out for it."""
        lag = now - due
        if lag <= self._settings.tolerance:
            return 0.0
        grace = 0.0
        if lag >= self._settings.pulse - ROUNDING:
            watched = self.read(due) - self._settled_at
            grace = max(0.0, min(self._settings.settle, lag, watched / 2))
        self._forgiven += lag + grace
        self._settled_at = self.read(now)
        return lag + grace
