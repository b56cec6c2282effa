"""The running watchdog: wakes when something is due, and passes the results to the subscribers."""

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
    LeaseSuperseded,
    Subscription,
    SubscriptionReplaced,
    TimerSettings,
    TooMany,
    check_name,
)
from rallypoint.timer.server.outbox import MOST_LEARNED, Outbox

log = get_logger(__name__)

_NodeKey = tuple[str, str]


class Watchdog:
    """A TimerTable and a ProgressBoard driven by a clock. Belongs to one event loop.

    Requests that concern only timers go to `table`, those that also concern progress or learned scopes to the
    watchdog. Call `arm` after every change of the table. Requests with a Subscription that is not in force any more
    raise LeaseSuperseded or SubscriptionReplaced, except `unsubscribe` and `has_forgotten`.
    """

    def __init__(
        self, settings: TimerSettings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a watchdog without timers. `clock` is monotonic seconds, at the pace of the event loop's timers."""
        self.table = TimerTable(clock(), settings)
        self.draining = False
        # Called with False when a run has learned something, with True when learned scopes were forgotten.
        self.on_learned: Callable[[bool], None] | None = None
        settings = self.table.settings
        self._pulse = settings.lag.pulse
        self._progress = ProgressBoard(
            ProgressSettings(stall_after=settings.stall_after, retention=settings.retention)
        )
        # The time for calls of the table, in monotonic seconds.
        self.now = clock
        # Seconds left out by the table's watch clock: progress is measured on the same clock.
        self._forgiven = 0.0
        self._outboxes: dict[_NodeKey, tuple[Subscription, Outbox]] = {}
        self._nodes_of: dict[str, set[str]] = {}
        # Scopes that a subscriber was asked to forget. Until it confirms, its observations of them may be old. Bounded
        # as its outbox is, for a subscriber that never confirms: the oldest are dropped.
        self._forgetting: dict[_NodeKey, dict[str, None]] = {}
        # Nodes for which it was logged that they report more than is kept.
        self._overflowing: set[_NodeKey] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._due = math.inf

    # Subscribers.

    def subscribe(
        self,
        run_id: str,
        node_id: str,
        lease: int,
        stall_after: float | None = None,
        *,
        incarnation: str = "",
        lease_age: float = 0.0,
        token: bytes = b"",
        identity: str = "",
    ) -> tuple[Subscription, Outbox]:
        """Make the caller the node's only subscriber; end the previous subscription.

        `stall_after`: seconds without progress until the run counts as stalled; 0: never; None: as the settings. The
        other arguments are as for TimerTable.subscribe.

        Raises:
            TimerRefused: as TimerTable.subscribe.
        """
        subscription = self.table.subscribe(
            run_id,
            node_id,
            lease,
            self.now(),
            incarnation=incarnation,
            lease_age=lease_age,
            token=token,
            identity=identity,
        )
        former = self._outboxes.get((run_id, node_id))
        if former is not None:
            former[1].end(_superseded(former[0], subscription))
        self._forgetting.pop((run_id, node_id), None)
        outbox = Outbox()
        self._outboxes[run_id, node_id] = (subscription, outbox)
        self._nodes_of.setdefault(run_id, set()).add(node_id)
        self._progress.subscribe(run_id, node_id, stall_after, self._watch())
        for learned in self.table.learned_of(run_id):
            outbox.learn(learned)
        if (stall := self._progress.stall_of(run_id, self._watch())) is not None:
            outbox.stall(stall)
        log.info("agent subscribed", run_id=run_id, node_id=node_id, lease=lease)
        return subscription, outbox

    def unsubscribe(self, subscription: Subscription) -> None:
        """Note that the subscriber is gone; harmless if another has replaced it."""
        run_id, node_id = key = (subscription.run_id, subscription.node_id)
        if self._is_in_force(subscription):
            del self._outboxes[key]
            self._nodes_of[run_id].discard(node_id)
            if not self._nodes_of[run_id]:
                del self._nodes_of[run_id]
            self._overflowing.discard(key)
            self._forgetting.pop(key, None)
            self._progress.unsubscribe(run_id, node_id, self._watch())
        self.table.unsubscribe(subscription, self.now())
        self.arm()
        log.info("agent gone", run_id=run_id, node_id=node_id)

    def drain(self) -> None:
        """End every subscription, so that the agents reconnect to another server, and stop the clock."""
        self.draining = True
        if self._alarm is not None:
            self._alarm.cancel()
        for _, outbox in self._outboxes.values():
            outbox.end()

    # Requests that concern more than timers.

    def registered(self, subscription: Subscription) -> None:
        """End a registration: drop timers and progress that only an earlier subscription registered."""
        self.table.registered(subscription)
        self._progress.registered(subscription.run_id, subscription.node_id, self._watch())

    def clear(self, subscription: Subscription, worker_id: str) -> None:
        """Remove a subscriber's worker that is gone, with all its timers and its progress."""
        self.table.clear(subscription, worker_id)
        self._progress.clear(subscription.run_id, subscription.node_id, worker_id, self._watch())

    def clear_worker(self, run_id: str, node_id: str, worker_id: str, lease: int | None, token: bytes) -> int:
        """Remove a worker that is gone, on a unary call. Return how many timers it had.

        Raises:
            TimerRefused: as TimerTable.clear_worker.
        """
        cleared = self.table.clear_worker(run_id, node_id, worker_id, self.now(), lease=lease, token=token)
        self._progress.clear(run_id, node_id, worker_id, self._watch())
        return cleared

    def report_progress(
        self, subscription: Subscription, worker_id: str, rank: int, step: int, elapsed: float
    ) -> None:
        """Record that a subscriber's worker reached a step `elapsed` seconds ago; drop it if there are too many.

        Raises:
            InvalidField: a name is empty or too long, or a number is out of range.
        """
        run_id, node_id = subscription.run_id, subscription.node_id
        if not self._is_in_force(subscription):
            raise SubscriptionReplaced(run_id, node_id)
        if not self._progress.report(
            run_id, node_id, worker_id, self._watch(), rank=rank, step=step, elapsed=elapsed
        ):
            self._log_once(
                subscription, "too many workers report progress; progress of further workers is dropped"
            )

    def observe(self, subscription: Subscription, scope: str, count: int, longest: float) -> None:
        """Learn from `count` completions of a scope by workers of a subscriber. Too many scopes are not learned.

        Raises:
            InvalidField: a name is empty or too long, or a number is out of range.
        """
        self._learn(self.table.observe, subscription, scope, count, longest)

    def learn(self, subscription: Subscription, scope: str, count: int, longest: float) -> None:
        """Merge data that an earlier service had published to a subscriber. Too many scopes are not learned.

        Raises:
            InvalidField: a name is empty or too long, or a number is out of range.
        """
        self._learn(self.table.learn, subscription, scope, count, longest)

    def has_forgotten(self, subscription: Subscription, scope: str) -> None:
        """Note that a subscriber has forgotten a scope as asked: its observations from now on are new.

        Raises:
            InvalidField: the name is empty or too long.
        """
        check_name("scope", scope, MAX_SCOPE_BYTES)
        if self._is_in_force(subscription):
            self._forgetting.get((subscription.run_id, subscription.node_id), {}).pop(scope, None)

    def forget_scopes(self, run_id: str, scope: str) -> int:
        """Make a run learn a scope ("": all) again; return how many were forgotten.

        Raises:
            InvalidField: a name is malformed.
        """
        forgotten = self.table.forget_scopes(run_id, scope)
        # At once: data learned from now on must not hide from the agents that the scope was forgotten.
        self._publish_changes()
        if forgotten and self.on_learned is not None:
            self.on_learned(True)
        log.info("scopes forgotten", run_id=run_id, scope=scope or "all", forgotten=forgotten)
        return forgotten

    def progress_of(self, run_id: str, most: int, first: int = 0) -> RunProgress:
        """Return the progress of a run, with at most `most` of its workers: those after the `first` ones."""
        return self._progress.progress_of(run_id, most, self._watch(), first)

    # Time.

    def arm(self) -> None:
        """Publish the effects of a change of the table, and schedule the next wake-up. Call it after every change."""
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
        # Rounded up to a whole millisecond: uvloop rounds, and a timer that fires too early is wasted, repeatedly.
        delay = math.ceil((due - now) * 1000) / 1000
        self._alarm = asyncio.get_running_loop().call_later(delay, self.ring)

    def ring(self) -> None:
        """Advance time; the callback of the alarm."""
        now, due = self.now(), self._due
        self._due, self._alarm = math.inf, None
        try:
            advance = self.table.advance(now, min(due, now))
            self._forgiven += advance.forgiven
            if advance.forgiven:
                log.warning(
                    "the watchdog was paused; deadlines moved",
                    slept=round(now - due, 3),
                    moved_by=round(advance.forgiven, 3),
                )
            if advance.unclaimed or advance.abandoned:
                log.warning(
                    "timers expired while no agent was subscribed",
                    unclaimed=advance.unclaimed,
                    abandoned=advance.abandoned,
                )
            for expiry in advance.expiries:
                self._publish_expiry(expiry)
            self._progress.judge(self._watch())
        finally:
            self.arm()

    def _watch(self) -> float:
        return self.now() - self._forgiven

    def _next_wake(self, now: float) -> float | None:
        """Return when the table or the board is due. At least every pulse: pauses must be noticed."""
        due = self.table.next_wake(now)
        examination = self._progress.next_due()
        if examination is None:
            return due
        examination = max(now, min(examination + self._forgiven, now + self._pulse))
        return examination if due is None else min(due, examination)

    def _is_in_force(self, subscription: Subscription) -> bool:
        current = self._outboxes.get((subscription.run_id, subscription.node_id))
        return current is not None and current[0] == subscription

    def _learn(
        self,
        merge: Callable[[Subscription, str, int, float], None],
        subscription: Subscription,
        scope: str,
        count: int,
        longest: float,
    ) -> None:
        if scope in self._forgetting.get((subscription.run_id, subscription.node_id), ()):
            # The subscriber sent it before it had forgotten the scope: it would bring the old longest completion back.
            return
        try:
            merge(subscription, scope, count, longest)
        except TooMany as error:
            self._log_once(subscription, str(error))
            return
        if self.on_learned is not None:
            self.on_learned(False)

    def _log_once(self, subscription: Subscription, problem: str) -> None:
        """Log a problem once per subscription: dropped data comes again with every message."""
        key = (subscription.run_id, subscription.node_id)
        if key not in self._overflowing:
            self._overflowing.add(key)
            log.warning(
                "a limit is reached; data of this node is dropped",
                run_id=subscription.run_id,
                node_id=subscription.node_id,
                reason=problem,
            )

    def _publish_changes(self) -> None:
        for run_id, learned in self.table.take_learned():
            for node_id in self._nodes_of.get(run_id, ()):
                self._outboxes[run_id, node_id][1].learn(learned)
                if not learned.count:
                    forgetting = self._forgetting.setdefault((run_id, node_id), {})
                    forgetting[learned.scope] = None
                    if len(forgetting) > MOST_LEARNED:
                        del forgetting[next(iter(forgetting))]
        for stall in self._progress.take_new_stalls():
            _log_stall(stall)
            for outbox in self._outboxes_of(stall.run_id):
                outbox.stall(stall)

    def _outboxes_of(self, run_id: str) -> list[Outbox]:
        return [self._outboxes[run_id, node_id][1] for node_id in self._nodes_of.get(run_id, ())]

    def _publish_expiry(self, expiry: Expiry) -> None:
        name = expiry.name
        if expiry.offers == 1:
            log.info(
                "timer expired",
                **name._asdict(),
                after=expiry.after,
                late_by=round(expiry.late_by, 3),
                **_learned_fields(expiry.learned),
            )
        subscriber = self._outboxes.get((name.run_id, name.node_id))
        if subscriber is not None:
            subscriber[1].offer(expiry)


def _superseded(older: Subscription, newer: Subscription) -> LeaseSuperseded | SubscriptionReplaced:
    run_id, node_id, lease = older.run_id, older.node_id, older.lease
    of_other_run = bool(older.incarnation and newer.incarnation) and older.incarnation != newer.incarnation
    if of_other_run or lease < newer.lease:
        return LeaseSuperseded(run_id, node_id, lease, newer.lease, of_other_run)
    return SubscriptionReplaced(run_id, node_id)


def _learned_fields(learned: Learned | None) -> dict[str, object]:
    return {} if learned is None else {"learned_from": learned.count, "longest": round(learned.longest, 3)}


def _log_stall(stall: Stall) -> None:
    first = stall.first
    fields = {
        "run_id": stall.run_id,
        "node_id": first.node_id,
        "worker_id": first.worker_id,
        "rank": first.rank,
        "step": first.step,
        "idle": round(stall.idle, 3),
    }
    if stall.over:
        log.info("the run is no longer stalled", **fields)
    else:
        log.warning(
            "the run is stalled: no worker advances; this worker stopped first",
            **fields,
            stopped_for=round(first.idle, 3),
            workers=stall.workers,
            at_same_step=stall.at_same_step,
        )
