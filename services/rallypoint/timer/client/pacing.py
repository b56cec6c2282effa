"""When to send changes to the service: in batches, but early enough that no timer expires late."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rallypoint.rpc.clock import LagSettings, WatchClock

# A new timer is sent within this part of its duration, but no earlier than after this many seconds.
_PART, _LEAST = 0.1, 0.01


class Batching:
    """Delays changes so that they are sent together. Belongs to one event loop."""

    def __init__(self, linger: float) -> None:
        """Create it empty. `linger`: most seconds that a change waits."""
        self._linger = linger
        self._due = math.inf
        self._earlier = asyncio.Event()

    def note(self, after: float = math.inf) -> None:
        """Note a change. `after`: the timeout in seconds, if the change is a new timer."""
        self._send_within(min(self._linger, max(_LEAST, after * _PART)))

    def hurry(self) -> None:
        """Send the changes at once."""
        self._send_within(0.0)

    def _send_within(self, seconds: float) -> None:
        due = asyncio.get_running_loop().time() + seconds
        if due < self._due:
            self._due = due
            self._earlier.set()

    async def gathered(self) -> None:
        """Wait until there are changes to send."""
        loop = asyncio.get_running_loop()
        while (left := self._due - loop.time()) > 0:
            self._earlier.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._earlier.wait(), left if left < math.inf else None)
        self._due = math.inf


# ---- The time for which an agent has really watched its workers: its own pauses are left out.
#
# An agent that was paused, alone or with its host, receives expiries of timers whose releases it has not read yet. And
# a worker on a paused host has hung only while the host ran. So a timer counts as expired only by this clock.


# Most pauses whose times are kept. A time before the oldest is treated as just before it.
_MOST_PAUSES = 64


class Watch:
    """A clock of seconds of watching. Belongs to one event loop."""

    def __init__(
        self, clock: Callable[[], float], settings: LagSettings, on_pause: Callable[[float, float], None]
    ) -> None:
        """Create a watch that does not notice pauses before `start`. `clock`: monotonic seconds.

        `on_pause` is called with the length of each pause, and the seconds that are left out for it.
        """
        self._clock = clock
        self._settings = settings
        self._on_pause = on_pause
        self._shown = WatchClock(clock(), settings)
        # For each pause, when it was noticed, and the seconds left out before it: the total, less this and later
        # pauses.
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_MOST_PAUSES)
        self._alarm: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        """Begin to notice pauses; wakes regularly from now on."""
        now = self._clock()
        self._due = self._shown.next_look(now)
        self._alarm = asyncio.get_running_loop().call_later(self._due - now, self._beat)

    def stop(self) -> None:
        """Stop noticing pauses."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def now(self) -> float:
        """Return this clock's reading. Notices a pause even if the loop runs another callback first after it."""
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
        """Return this clock's reading at a past or present time of the monotonic clock."""
        shown = self.now()
        forgiven = self._shown.forgiven
        for noticed, before in reversed(self._pauses):
            if moment >= noticed:
                break
            forgiven = before
        # A timer that began during a pause counts as begun at its end.
        return min(moment - forgiven, shown)

    def _beat(self) -> None:
        self.now()
        self.start()
