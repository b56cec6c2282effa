"""The watchdog's own clock: it stands still while the watchdog was not watching.

A watchdog that was paused (SIGSTOP, a starved machine, a paused VM) finds on waking that timers are overdue
whose releases wait, unread, in its sockets. It must not accuse those workers. So deadlines are kept on a clock
that leaves out the time of which the watchdog can tell that it slept through it. That moves every deadline at
once, at no cost.
"""

from __future__ import annotations

from dataclasses import dataclass

# Seconds by which sums of floats may be off.
_ROUNDING = 1e-6
# Seconds from a pause to the first look after it. Half of it is the most by which another pause, right after the first,
# may be forgiven too little.
_FIRST_LOOK = 0.01


@dataclass(frozen=True, slots=True)
class LagSettings:
    """How lag is measured and forgiven. All in seconds."""

    # A wake-up this late is ordinary scheduling and forgives nothing. Default 0.1: twice the lateness that
    # expiries may have, so that a busy machine doesn't slow the clock for good. Lower accuses less readily and
    # expires later under load.
    tolerance: float = 0.1
    # The watchdog wakes at least this often while it has timers, only to notice whether it was stopped; oftener right
    # after a pause, see WatchClock.next_look.
    # Default 0.25: four wake-ups a second cost nothing. A pause is noticed short by at most this much.
    pulse: float = 0.25
    # What is forgiven beyond a measured lag of at least the pulse, though never more than the lag itself: the part
    # of a pause that the pulse did not see, and time to read what waits in the sockets. Default 1. A shorter lag is
    # a busy machine, not a pause, and comes again: doubled, it would make expiries late for nothing.
    settle: float = 1.0


class WatchClock:
    """Monotonic seconds, less those in which the watchdog was not watching.

    A pause of at least twice the pulse is left out whole. The time h from its beginning to the look that was due is
    hidden; the rest of its length P, at least a pulse, is measured and forgiven, with a grace on top that must make up
    for h. Long after the pause before, the grace is `settle` or as much as was measured, each of which is at least h.
    Soon after it, only half of the time watched since may be taken back. So looks are close together then: each is due
    after as long as was watched before it, so that h, which is no longer than that, is at most half of what was watched
    by the time of the look.

    It may step back, by at most `settle`. It always gets on: of the time really watched, `settle` takes back at
    most half, so a worker that hangs is accused even by a watchdog that stumbles for ever.
    """

    def __init__(self, now: float, settings: LagSettings) -> None:
        self._settings = settings
        self._forgiven = 0.0
        self._settled_at = now - 2 * settings.settle

    @property
    def forgiven(self) -> float:
        """Seconds left out so far."""
        return self._forgiven

    def read(self, now: float) -> float:
        """What this clock shows when the monotonic clock shows `now`."""
        return now - self._forgiven

    def next_look(self, now: float) -> float:
        """When to look next, by the monotonic clock, so that no pause from now on is forgiven too little."""
        watched = self.read(now) - self._settled_at
        return now + min(self._settings.pulse, max(_FIRST_LOOK, watched))

    def observe(self, now: float, due: float) -> float:
        """Takes note that the watchdog wakes at `now` and meant to at `due`; returns the seconds forgiven."""
        lag = now - due
        if lag <= self._settings.tolerance:
            return 0.0
        grace = 0.0
        if lag >= self._settings.pulse - _ROUNDING:
            watched = self.read(due) - self._settled_at
            grace = max(0.0, min(self._settings.settle, lag, watched / 2))
        self._forgiven += lag + grace
        self._settled_at = self.read(now)
        return lag + grace
