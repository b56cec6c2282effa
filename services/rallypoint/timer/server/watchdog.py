"""The watchdog at work: wakes when something is due, and hands what comes of it to the subscribers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from rallypoint.rpc.logs import get_logger
from rallypoint.timer.core.core import TimerTable
from rallypoint.timer.core.progress import ProgressBoard, ProgressSettings, RunProgress, Stall
from rallypoint.timer.core.values import (
    MAX_SCOPE_BYTES,
    Expiry,
    Learned,
    LeaseLost,
    StreamReplaced,
    Subscription,
    TimerSettings,
    TooMany,
    check_name,
)
from rallypoint.timer.server.outbox import Outbox

log = get_logger(__name__)

_Place = tuple[str, str]


class Watchdog:
    """A TimerTable and a ProgressBoard with a clock that runs. Belongs to one event loop.

    Timers are told to the `table`; what also says something of progress, or of what runs learn, to the watchdog.
    `arm` is to be called after every change of the table.
    """

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
        # Called when a run has learned something, or, with True, was told to forget it.
        self.on_learned: Callable[[bool], None] | None = None
        settings = self.table.settings
        self._pulse = settings.lag.pulse
        self._progress = ProgressBoard(
            ProgressSettings(stall_after=settings.stall_after, retention=settings.retention)
        )
        self._clock = clock
        # What the table's watch clock leaves out: progress goes by the same one.
        self._forgiven = 0.0
        self._mailboxes: dict[_Place, tuple[Subscription, Outbox]] = {}
        self._nodes_of: dict[str, set[str]] = {}
        # Scopes that a subscriber was told to forget. Until it says that it has, what it tells of them may be old.
        self._forgetting: dict[_Place, set[str]] = {}
        # Runs and nodes of which it was logged that they tell more than is kept.
        self._overflowing: set[_Place] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._due = math.inf

    def now(self) -> float:
        """Monotonic seconds, as the table is to be told them."""
        return self._clock()

    # Who is there.

    def subscribe(
        self,
        run_id: str,
        node_id: str,
        lease: int,
        stall_after: float | None = None,
        *,
        incarnation: str = "",
        lease_age: float = 0.0,
    ) -> tuple[Subscription, Outbox]:
        """Makes the caller the node's one subscriber and ends the one before.

        Args:
            run_id: name of the run.
            node_id: name of the node.
            lease: the node's.
            stall_after: seconds after which the run counts as stalled; 0: never; None: the settings decide.
            incarnation: as TimerTable.subscribe.
            lease_age: as TimerTable.subscribe.

        Raises:
            Refused: as TimerTable.subscribe.
        """
        subscription = self.table.subscribe(
            run_id, node_id, lease, self.now(), incarnation=incarnation, lease_age=lease_age
        )
        former = self._mailboxes.get((run_id, node_id))
        if former is not None:
            former[1].end(_superseded(former[0], subscription))
        self._forgetting.pop((run_id, node_id), None)
        mailbox = Outbox()
        self._mailboxes[run_id, node_id] = (subscription, mailbox)
        self._nodes_of.setdefault(run_id, set()).add(node_id)
        self._progress.subscribe(run_id, node_id, stall_after, self._watch())
        for learned in self.table.learned_of(run_id):
            mailbox.learn(learned)
        if (stall := self._progress.stall_of(run_id, self._watch())) is not None:
            mailbox.stall(stall)
        log.info("agent subscribed", run_id=run_id, node_id=node_id, lease=lease)
        return subscription, mailbox

    def unsubscribe(self, subscription: Subscription) -> None:
        """The subscriber is gone; harmless if another has taken its place."""
        run_id, node_id = place = (subscription.run_id, subscription.node_id)
        if self._is_in_force(subscription):
            del self._mailboxes[place]
            self._nodes_of[run_id].discard(node_id)
            if not self._nodes_of[run_id]:
                del self._nodes_of[run_id]
            self._overflowing.discard(place)
            self._forgetting.pop(place, None)
            self._progress.unsubscribe(run_id, node_id, self._watch())
        self.table.unsubscribe(subscription, self.now())
        self.arm()
        log.info("agent gone", run_id=run_id, node_id=node_id)

    def drain(self) -> None:
        """Ends every subscription, so that the agents go elsewhere, and stops the clock."""
        self.draining = True
        if self._alarm is not None:
            self._alarm.cancel()
        for _, mailbox in self._mailboxes.values():
            mailbox.end()

    # What agents and others tell of more than timers.

    def registered(self, subscription: Subscription) -> None:
        """All that the node knows was told; what only an earlier subscription knew ends.

        Raises:
            LeaseLost, StreamReplaced: the subscription is not in force any more.
        """
        self.table.registered(subscription)
        self._progress.registered(subscription.run_id, subscription.node_id, self._watch())

    def clear(self, subscription: Subscription, worker_id: str) -> None:
        """A subscriber's worker is gone, with all its timers and its progress.

        Raises:
            LeaseLost, StreamReplaced: the subscription is not in force any more.
        """
        self.table.clear(subscription, worker_id)
        self._progress.clear(subscription.run_id, subscription.node_id, worker_id, self._watch())

    def clear_worker(self, run_id: str, node_id: str, worker_id: str, lease: int | None) -> int:
        """A worker is gone, says a single call. Returns how many timers it had.

        Raises:
            Refused: as TimerTable.clear_worker.
        """
        cleared = self.table.clear_worker(run_id, node_id, worker_id, self.now(), lease=lease)
        self._progress.clear(run_id, node_id, worker_id, self._watch())
        return cleared

    def report_progress(
        self, subscription: Subscription, worker_id: str, rank: int, step: int, elapsed: float
    ) -> None:
        """A subscriber's worker came to a step, so many seconds ago. Too many of them are not kept.

        Raises:
            InvalidField: a name is empty or too long, or a number is out of range.
            StreamReplaced: the subscription is not in force any more.
        """
        run_id, node_id = subscription.run_id, subscription.node_id
        if not self._is_in_force(subscription):
            raise StreamReplaced(run_id, node_id)
        if not self._progress.report(
            run_id, node_id, worker_id, self._watch(), rank=rank, step=step, elapsed=elapsed
        ):
            self._log_once(subscription, "too many workers tell progress; that of others is not kept")

    def observe(self, subscription: Subscription, scope: str, count: int, longest: float) -> None:
        """Workers of a subscriber have left a scope, so many times. Too many scopes are not learned.

        Raises:
            InvalidField: a name is empty or too long, or a number is out of range.
            LeaseLost, StreamReplaced: the subscription is not in force any more.
        """
        self._learn(self.table.observe, subscription, scope, count, longest)

    def learn(self, subscription: Subscription, scope: str, count: int, longest: float) -> None:
        """A subscriber brings what an earlier service had learned. Too many scopes are not learned.

        Raises:
            InvalidField: a name is empty or too long, or a number is out of range.
            LeaseLost, StreamReplaced: the subscription is not in force any more.
        """
        self._learn(self.table.learn, subscription, scope, count, longest)

    def has_forgotten(self, subscription: Subscription, scope: str) -> None:
        """A subscriber has forgotten a scope, as it was told: what it tells of it from now on is new.

        Raises:
            InvalidField: the name is empty or too long.
        """
        check_name("scope", scope, MAX_SCOPE_BYTES)
        if self._is_in_force(subscription):
            self._forgetting.get((subscription.run_id, subscription.node_id), set()).discard(scope)

    def forget_scopes(self, run_id: str, scope: str) -> int:
        """Has a run learn a scope ("": all of them) anew; says how many were forgotten.

        Raises:
            InvalidField: a name is malformed.
        """
        forgotten = self.table.forget_scopes(run_id, scope)
        # At once: what is learned anew must not hide from the agents that it was forgotten.
        self._publish_changes()
        if forgotten and self.on_learned is not None:
            self.on_learned(True)
        log.info("scopes forgotten", run_id=run_id, scope=scope or "all", forgotten=forgotten)
        return forgotten

    def progress_of(self, run_id: str, most: int) -> RunProgress:
        """How far a run has come, with at most so many of its workers."""
        return self._progress.progress_of(run_id, most, self._watch())

    # Time.

    def arm(self) -> None:
        """To be called after every change of the table: tells what came of it, and sees to waking in time."""
        if self.draining:
            return
        self._publish_changes()
        now = self.now()
        due = self._next_wake(now)
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
            self._forgiven += advance.forgiven
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
                self._publish_expiry(expiry)
            self._progress.judge(self._watch())
        finally:
            self.arm()

    # Within.

    def _watch(self) -> float:
        return self._clock() - self._forgiven

    def _next_wake(self, now: float) -> float | None:
        """When the table or the board has something to do. Never later than a pulse: pauses must be noticed."""
        due = self.table.next_wake(now)
        judgement = self._progress.next_due()
        if judgement is None:
            return due
        judgement = max(now, min(judgement + self._forgiven, now + self._pulse))
        return judgement if due is None else min(due, judgement)

    def _is_in_force(self, subscription: Subscription) -> bool:
        current = self._mailboxes.get((subscription.run_id, subscription.node_id))
        return current is not None and current[0] == subscription

    def _learn(
        self,
        take: Callable[[Subscription, str, int, float], None],
        subscription: Subscription,
        scope: str,
        count: int,
        longest: float,
    ) -> None:
        if scope in self._forgetting.get((subscription.run_id, subscription.node_id), ()):
            # It was told before the subscriber heard of it, and would bring the old longest back.
            return
        try:
            take(subscription, scope, count, longest)
        except TooMany as error:
            self._log_once(subscription, str(error))
            return
        if self.on_learned is not None:
            self.on_learned(False)

    def _log_once(self, subscription: Subscription, problem: str) -> None:
        """Logs it once per subscription: what can't be kept comes again with every message."""
        place = (subscription.run_id, subscription.node_id)
        if place not in self._overflowing:
            self._overflowing.add(place)
            log.warning(
                "not all can be kept", run_id=subscription.run_id, node_id=subscription.node_id, why=problem
            )

    def _publish_changes(self) -> None:
        for run_id, learned in self.table.take_learned():
            for node_id in self._nodes_of.get(run_id, ()):
                self._mailboxes[run_id, node_id][1].learn(learned)
                if not learned.count:
                    self._forgetting.setdefault((run_id, node_id), set()).add(learned.scope)
        for stall in self._progress.take_new_stalls():
            _log_stall(stall)
            for mailbox in self._mailboxes_of(stall.run_id):
                mailbox.stall(stall)

    def _mailboxes_of(self, run_id: str) -> list[Outbox]:
        return [self._mailboxes[run_id, node_id][1] for node_id in self._nodes_of.get(run_id, ())]

    def _publish_expiry(self, expiry: Expiry) -> None:
        name = expiry.name
        if expiry.offers == 1:
            log.info(
                "timer ran out",
                **name._asdict(),
                after=expiry.after,
                late_by=round(expiry.late_by, 3),
                **_learned_fields(expiry.learned),
            )
        subscriber = self._mailboxes.get((name.run_id, name.node_id))
        if subscriber is not None:
            subscriber[1].offer(expiry)


def _superseded(older: Subscription, newer: Subscription) -> LeaseLost | StreamReplaced:
    run_id, node_id, lease = older.run_id, older.node_id, older.lease
    of_other_run = bool(older.incarnation and newer.incarnation) and older.incarnation != newer.incarnation
    if of_other_run or lease < newer.lease:
        return LeaseLost(run_id, node_id, lease, newer.lease, of_other_run)
    return StreamReplaced(run_id, node_id)


def _learned_fields(learned: Learned | None) -> dict[str, object]:
    return {} if learned is None else {"learned_from": learned.count, "longest": round(learned.longest, 3)}


def _log_stall(stall: Stall) -> None:
    first = stall.first
    who = {
        "run_id": stall.run_id,
        "node_id": first.node_id,
        "worker_id": first.worker_id,
        "rank": first.rank,
        "step": first.step,
        "idle": round(stall.idle, 3),
    }
    if stall.over:
        log.info("the run stalls no more", **who)
    else:
        log.warning(
            "the run stalls: no worker advances, and this one stopped first",
            **who,
            stopped_for=round(first.idle, 3),
            workers=stall.workers,
            at_same_step=stall.at_same_step,
        )
