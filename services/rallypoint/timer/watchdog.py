"""The watchdog at work: wakes when a timer is due, and hands each expiry to the subscriber of its node."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from rallypoint.serving.logs import get_logger
from rallypoint.timer.core import TimerTable
from rallypoint.timer.refusals import LeaseLost, Refused, StreamReplaced
from rallypoint.timer.values import Expiry, Subscription, TimerSettings

log = get_logger(__name__)

# Answers to requests that were not taken, kept for a subscriber that doesn't read. Older ones are dropped.
_MOST_REFUSALS = 1000
# Expiries told in one message, so that it stays far below gRPC's 4 MiB.
_MOST_AT_ONCE = 1000


class Refusal:
    """An acquire of a subscriber that was not taken."""

    __slots__ = ("error", "scope", "sequence", "worker_id")

    def __init__(self, worker_id: str, scope: str, sequence: int, error: Refused) -> None:
        self.worker_id = worker_id
        self.scope = scope
        self.sequence = sequence
        self.error = error


class Mailbox:
    """What one subscriber is to be told. Bounded: an expiry that is told again takes the place of its first."""

    def __init__(self) -> None:
        self._expiries: dict[int, Expiry] = {}
        self._refusals: deque[Refusal] = deque(maxlen=_MOST_REFUSALS)
        self._ended = False
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def offer(self, expiry: Expiry) -> None:
        """An expiry to tell."""
        self._expiries[expiry.expiry_id] = expiry
        self._news.set()

    def refuse(self, refusal: Refusal) -> None:
        """A refusal to tell."""
        self._refusals.append(refusal)
        self._news.set()

    def end(self, error: Exception | None = None) -> None:
        """Nothing more comes: the stream ends, with the error if there is one. The first call counts."""
        if not self._ended:
            self._ended, self._error = True, error
            self._news.set()

    async def take(self) -> tuple[list[Expiry], list[Refusal]] | None:
        """Waits for what there is to tell; None at the end. Raises the error that `end` was given."""
        await self._news.wait()
        if self._error is not None:
            raise self._error
        chosen = list(islice(self._expiries, _MOST_AT_ONCE))
        expiries, refusals = [self._expiries.pop(each) for each in chosen], list(self._refusals)
        self._refusals.clear()
        if self._ended and not expiries and not refusals:
            return None
        if not self._ended and not self._expiries:
            self._news.clear()
        return expiries, refusals


class Watchdog:
    """A TimerTable with a clock that runs. Belongs to one event loop."""

    def __init__(
        self, settings: TimerSettings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Makes a watchdog without timers.

        Args:
            settings: bounds and durations.
            clock: monotonic seconds. Between two readings, the event loop's timers run at its pace.
        """
        self.table = TimerTable(clock(), settings)
        self.draining = False
        self._clock = clock
        self._mailboxes: dict[tuple[str, str], tuple[Subscription, Mailbox]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._due = math.inf

    def now(self) -> float:
        """Monotonic seconds, as the table is to be told them."""
        return self._clock()

    def subscribe(self, run_id: str, node_id: str, lease: int) -> tuple[Subscription, Mailbox]:
        """Makes the caller the node's one subscriber and ends the one before.

        Raises:
            Refused: as TimerTable.subscribe.
        """
        subscription = self.table.subscribe(run_id, node_id, lease, self.now())
        former = self._mailboxes.get((run_id, node_id))
        if former is not None:
            older = former[0].lease
            former[1].end(
                LeaseLost(run_id, node_id, older, lease) if older < lease else StreamReplaced(run_id, node_id)
            )
        mailbox = Mailbox()
        self._mailboxes[run_id, node_id] = (subscription, mailbox)
        log.info("agent subscribed", run_id=run_id, node_id=node_id, lease=lease)
        return subscription, mailbox

    def unsubscribe(self, subscription: Subscription) -> None:
        """The subscriber is gone; harmless if another has taken its place."""
        place = (subscription.run_id, subscription.node_id)
        current = self._mailboxes.get(place)
        if current is not None and current[0] == subscription:
            del self._mailboxes[place]
        self.table.unsubscribe(subscription, self.now())
        self.arm()
        log.info("agent gone", run_id=subscription.run_id, node_id=subscription.node_id)

    def drain(self) -> None:
        """Ends every subscription, so that the agents go elsewhere, and stops the clock."""
        self.draining = True
        if self._alarm is not None:
            self._alarm.cancel()
        for _, mailbox in self._mailboxes.values():
            mailbox.end()

    def arm(self) -> None:
        """To be called after every change of the table: sees to it that the watchdog wakes in time."""
        if self.draining:
            return
        now = self.now()
        due = self.table.next_wake(now)
        if due is None or due >= self._due:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._due = due
        # Up to a whole millisecond: uvloop rounds, and an alarm that rings too early rings in vain, repeatedly.
        delay = math.ceil((due - now) * 1000) / 1000
        self._alarm = asyncio.get_running_loop().call_later(delay, self.ring)

    def ring(self) -> None:
        """Lets time pass: what the alarm does when it is due."""
        now, due = self.now(), self._due
        self._due, self._alarm = math.inf, None
        try:
            advance = self.table.advance(now, min(due, now))
            if advance.forgiven:
                log.warning(
                    "the watchdog was not running; deadlines moved",
                    slept=round(now - due, 3),
                    moved_by=round(advance.forgiven, 3),
                )
            if advance.unclaimed or advance.abandoned:
                log.warning(
                    "timers ran out with no agent to tell",
                    unclaimed=advance.unclaimed,
                    abandoned=advance.abandoned,
                )
            for expiry in advance.expiries:
                self._tell(expiry)
        finally:
            self.arm()

    def _tell(self, expiry: Expiry) -> None:
        name = expiry.name
        if expiry.offers == 1:
            log.info("timer ran out", **name._asdict(), after=expiry.after, late_by=round(expiry.late_by, 3))
        subscriber = self._mailboxes.get((name.run_id, name.node_id))
        if subscriber is not None:
            subscriber[1].offer(expiry)
