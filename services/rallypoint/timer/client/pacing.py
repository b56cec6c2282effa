"""When to tell the service what has changed: gathered, but never for so long that a timer would expire late."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rallypoint.rpc.clock import LagSettings, WatchClock

# A timer is told of within this part of its duration, but there is no use in less than so many seconds.
_PART, _LEAST = 0.1, 0.01


class Batching:
    """Changes wait here for others, so that they travel together. Belongs to one event loop."""

    def __init__(self, linger: float) -> None:
        """Nothing waits. `linger`: most seconds that a change waits."""
        self._linger = linger
        self._due = math.inf
        self._earlier = asyncio.Event()

    def note(self, after: float = math.inf) -> None:
        """Something changed. `after`: seconds that a timer may take, if that is what began."""
        self._send_within(min(self._linger, max(_LEAST, after * _PART)))

    def hurry(self) -> None:
        """What has changed is to be told at once."""
        self._send_within(0.0)

    def _send_within(self, seconds: float) -> None:
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


# ---- The time for which an agent has really watched its workers: its own pauses are left out.
#
# An agent that was stopped, with its host or alone, finds expiries of timers whose releases it never read. And a
# worker whose host was paused has hung no longer than the host ran. So a timer counts as run out only by this
# clock.


# Pauses of which is known when they were. A moment before the oldest is taken for one shortly before it.
_MOST_PAUSES = 64


class Watch:
    """Seconds of watching. Belongs to one event loop."""

    def __init__(
        self,
        clock: Callable[[], float],
        settings: LagSettings,
        on_pause: Callable[[float, float], None],
    ) -> None:
        """Makes a watch that notices no pause yet.

        Args:
            clock: monotonic seconds.
            settings: see LagSettings.
            on_pause: called with the length of each pause, and the seconds that are left out for it.
        """
        self._clock = clock
        self._settings = settings
        self._on_pause = on_pause
        self._shown = WatchClock(clock(), settings)
        # When a pause was noticed, and what was left out until then: in all, but for this and later pauses.
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_MOST_PAUSES)
        self._alarm: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        """Begins to notice pauses. It wakes regularly from now on: who does not look can't miss anything."""
        now = self._clock()
        self._due = self._shown.next_look(now)
        self._alarm = asyncio.get_running_loop().call_later(self._due - now, self._beat)

    def stop(self) -> None:
        """Ends."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def now(self) -> float:
        """What this clock shows. Notices a pause at once, whatever of the loop's work comes first after it."""
        now = self._clock()
        if self._alarm is not None:
            before = self._shown.forgiven
            forgiven = self._shown.observe(now, min(self._due, now))
            if forgiven:
                self._pauses.append((now, before))
                slept = now - self._due
                if self._alarm is not None:
                    self._alarm.cancel()
                self.start()
                self._on_pause(slept, forgiven)
        return self._shown.read(now)

    def at(self, moment: float) -> float:
        """What this clock showed, or would have shown, at a moment of the monotonic clock, not after now."""
        shown = self.now()
        forgiven = self._shown.forgiven
        for noticed, before in reversed(self._pauses):
            if moment >= noticed:
                break
            forgiven = before
        # What began during a pause is as old as the end of the pause.
        return min(moment - forgiven, shown)

    def _beat(self) -> None:
        self.now()
        self.start()
