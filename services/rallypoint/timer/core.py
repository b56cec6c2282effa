"""The watchdog's decisions: which timers there are, which ran out, who is to be told. Pure; time is an argument.

`now` is the monotonic clock's, in seconds; it never goes back. Deadlines are kept on a WatchClock (see lag.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rallypoint.serving.lag import WatchClock
from rallypoint.timer.deadlines import DeadlineQueue
from rallypoint.timer.refusals import InvalidField, LeaseLost, StreamReplaced, TooMany
from rallypoint.timer.values import (
    Advance,
    Expiry,
    Subscription,
    TimerName,
    TimerSettings,
    TimerState,
    TimerView,
)

MAX_NAME_BYTES = 256
# Twice what a worker may name: room for what its agent adds to tell equal scopes apart.
MAX_SCOPE_BYTES = 512
# Ten years: a slip of units is caught, and no sum of durations overflows anything.
MAX_AFTER = 315_360_000.0
# A deadline this close, in seconds, has come. Deadlines are moved between two clocks, and a sum of floats that
# rounds the wrong way must not have the caller wake at the same instant for ever.
_ROUNDING = 1e-6
# Timers judged in one go. A hundred thousand that run out in one instant must not hold up the event loop for a
# second, in which releases would wait; the rest are due at once and get their turn after the loop had its own.
_MOST_AT_ONCE = 2000


@dataclass(slots=True, eq=False)
class _Timer:
    node: _Node
    worker_id: str
    scope: str
    after: float
    # When it runs out: on the watch clock, which decides, and on the plain one, which says how late we are.
    deadline: float
    due: float
    # The client's number, and the subscription that sent it last; both 0 for a single call.
    sequence: int
    stream: int
    # Not 0: it ran out.
    expiry_id: int = 0
    offers: int = 0

    @property
    def name(self) -> TimerName:
        return TimerName(self.node.run_id, self.node.node_id, self.worker_id, self.scope)


@dataclass(slots=True, eq=False)
class _Node:
    run_id: str
    node_id: str
    # The highest lease seen.
    lease: int = 0
    # The number of the subscription in force; 0 if there is none.
    stream: int = 0
    workers: dict[str, dict[str, _Timer]] = field(default_factory=dict)
    # Timers that ran out, by expiry id.
    expired: dict[int, _Timer] = field(default_factory=dict)
    timers: int = 0


class TimerTable:
    """All timers of a service. A request that is refused raises a refusals.Refused and changes nothing."""

    def __init__(self, now: float, settings: TimerSettings | None = None) -> None:
        self.settings = settings or TimerSettings()
        self._clock = WatchClock(now, self.settings.lag)
        self._nodes: dict[tuple[str, str], _Node] = {}
        self._queue: DeadlineQueue[_Timer | _Node] = DeadlineQueue()
        self._timers = 0
        self._last_number = 0
        self._last_expiry = 0

    def __len__(self) -> int:
        return self._timers

    # What agents do, on a stream.

    def subscribe(self, run_id: str, node_id: str, lease: int, now: float) -> Subscription:
        """Makes the caller the node's one subscriber. Expiries that wait are told by the next `advance`.

        Raises:
            InvalidField: a name is empty or too long, or the lease is negative.
            LeaseLost: a newer lease of the node is known.
            TooMany: too many nodes.
        """
        node = self._claim(run_id, node_id, lease)
        self._last_number += 1
        node.stream = self._last_number
        self._queue.drop(node)
        for timer in node.expired.values():
            self._queue.schedule(timer, self._clock.read(now))
        return Subscription(run_id, node_id, lease, node.stream)

    def unsubscribe(self, subscription: Subscription, now: float) -> None:
        """The subscriber is gone. Its timers go on; harmless if it isn't the subscriber any more."""
        node = self._nodes.get((subscription.run_id, subscription.node_id))
        if node is None or node.stream != subscription.number:
            return
        node.stream = 0
        for timer in node.expired.values():
            self._queue.schedule(timer, self._clock.read(now) + self.settings.retention)
        self._forget_if_idle(node, now)

    def register(
        self,
        subscription: Subscription,
        worker_id: str,
        scope: str,
        after: float,
        now: float,
        *,
        sequence: int,
        elapsed: float = 0.0,
    ) -> None:
        """Starts the timer of a subscriber's worker `elapsed` seconds ago, in place of the one of that name.

        Registering the same sequence number again changes nothing, so a timer that ran out stays run out.

        Raises:
            InvalidField, TooMany: the timer is not taken.
            LeaseLost, StreamReplaced: the subscription is not in force any more.
        """
        node = self._subscribed(subscription)
        if sequence <= 0:
            raise InvalidField("sequence", "must be more than zero")
        if not elapsed >= 0:
            raise InvalidField("elapsed", "must not be negative")
        timer = _find(node, worker_id, scope)
        if timer is not None and timer.sequence == sequence:
            timer.stream = subscription.number
            return
        due = now + after - elapsed
        deadline = self._clock.read(due)
        self._start(_Timer(node, worker_id, scope, after, deadline, due, sequence, subscription.number))

    def end(self, subscription: Subscription, worker_id: str, scope: str) -> None:
        """Ends the timer of a subscriber's worker; harmless if there is none.

        Raises:
            LeaseLost, StreamReplaced: the subscription is not in force any more.
        """
        self._drop(_find(self._subscribed(subscription), worker_id, scope))

    def clear(self, subscription: Subscription, worker_id: str) -> None:
        """Ends all timers of a worker that is gone, run out or not.

        Raises:
            LeaseLost, StreamReplaced: the subscription is not in force any more.
        """
        node = self._subscribed(subscription)
        for timer in list(node.workers.get(worker_id, {}).values()):
            self._drop(timer)

    def acknowledge(self, subscription: Subscription, expiry_id: int) -> None:
        """The expiry was dealt with, its timer ends; harmless if there is no such expiry on the node.

        Raises:
            LeaseLost, StreamReplaced: the subscription is not in force any more.
        """
        self._drop(self._subscribed(subscription).expired.get(expiry_id))

    def registered(self, subscription: Subscription) -> None:
        """All timers of the node were registered: those that only an earlier subscription knew end.

        Raises:
            LeaseLost, StreamReplaced: the subscription is not in force any more.
        """
        node = self._subscribed(subscription)
        held = [timer for scopes in node.workers.values() for timer in scopes.values()]
        for timer in held:
            if 0 < timer.stream < subscription.number:
                self._drop(timer)

    # What single calls do.

    def acquire(self, name: TimerName, after: float, now: float, *, lease: int | None = None) -> None:
        """Starts a timer in place of the one of that name.

        Raises:
            InvalidField, TooMany: the timer is not taken.
            LeaseLost: a newer lease of the node is known.
        """
        node = self._claim(name.run_id, name.node_id, lease)
        due = now + after
        try:
            self._start(_Timer(node, name.worker_id, name.scope, after, self._clock.read(due), due, 0, 0))
        finally:
            self._forget_if_idle(node, now)

    def release(self, name: TimerName, now: float, *, lease: int | None = None) -> bool:
        """Ends a timer; says whether there was one.

        Raises:
            InvalidField: a name is empty or too long.
            LeaseLost: a newer lease of the node is known.
        """
        _check_name("run_id", name.run_id)
        _check_name("node_id", name.node_id)
        _check_name("worker_id", name.worker_id)
        _check_name("scope", name.scope, MAX_SCOPE_BYTES)
        node = self._nodes.get((name.run_id, name.node_id))
        if node is None:
            return False
        _check_lease(node, lease)
        timer = _find(node, name.worker_id, name.scope)
        self._drop(timer)
        self._forget_if_idle(node, now)
        return timer is not None

    def timers(
        self, now: float, run_id: str = "", node_id: str = "", beyond: TimerName | None = None
    ) -> Iterator[TimerView]:
        """The timers of a run and node ("": of all), ordered by their names, from `beyond` (excluded) on."""
        for key in sorted(self._nodes):
            if (
                (run_id and key[0] != run_id)
                or (node_id and key[1] != node_id)
                or (beyond and key < beyond[:2])
            ):
                continue
            workers = self._nodes[key].workers
            for worker_id in sorted(workers):
                for scope in sorted(workers[worker_id]):
                    if beyond is None or (*key, worker_id, scope) > beyond:
                        yield self._view(workers[worker_id][scope], now)

    # What time does.

    def next_wake(self, now: float) -> float | None:
        """When to call `advance` next, in the time of `now`; None: not before something else happens."""
        earliest = self._queue.earliest()
        if earliest is None:
            return None
        return max(now, min(earliest + self._clock.forgiven, now + self.settings.lag.pulse))

    def advance(self, now: float, due: float) -> Advance:
        """Lets time pass. All that arrived before is to be put in first. If much is due, the rest waits for the
        next call, for which `next_wake` then says `now`.

        Args:
            now: the monotonic clock, in seconds.
            due: when this call was meant to be made: what `next_wake` said. If it comes late, every deadline
                moves by as much (and some more, see LagSettings) before any timer is judged.
        """
        forgiven = self._clock.observe(now, due)
        watch = self._clock.read(now)
        expiries: list[Expiry] = []
        unclaimed = abandoned = 0
        for _ in range(_MOST_AT_ONCE):
            item = self._queue.pop_due(watch + _ROUNDING)
            if item is None:
                break
            if isinstance(item, _Node):
                del self._nodes[item.run_id, item.node_id]
            elif item.node.stream:
                self._expire(item)
                self._queue.schedule(item, watch + self.settings.reoffer_interval)
                expiries.append(_offer(item, now))
            elif not item.expiry_id:
                self._expire(item)
                self._queue.schedule(item, watch + self.settings.retention)
                unclaimed += 1
            else:
                self._drop(item)
                self._forget_if_idle(item.node, now)
                abandoned += 1
        return Advance(expiries, unclaimed, abandoned, forgiven)

    # Within.

    def _claim(self, run_id: str, node_id: str, lease: int | None) -> _Node:
        node = self._nodes.get((run_id, node_id))
        if node is None:
            _check_name("run_id", run_id)
            _check_name("node_id", node_id)
            if len(self._nodes) >= self.settings.max_nodes:
                raise TooMany("too many nodes", self.settings.max_nodes)
            node = _Node(run_id, node_id)
        _check_lease(node, lease)
        node.lease = max(node.lease, lease or 0)
        return self._nodes.setdefault((run_id, node_id), node)

    def _subscribed(self, subscription: Subscription) -> _Node:
        node = self._nodes.get((subscription.run_id, subscription.node_id))
        if node is None:
            raise StreamReplaced(subscription.run_id, subscription.node_id)
        _check_lease(node, subscription.lease)
        if node.stream != subscription.number:
            raise StreamReplaced(subscription.run_id, subscription.node_id)
        return node

    def _start(self, timer: _Timer) -> None:
        node = timer.node
        _check_name("worker_id", timer.worker_id)
        _check_name("scope", timer.scope, MAX_SCOPE_BYTES)
        if not 0 < timer.after <= MAX_AFTER:
            raise InvalidField("after", "must be more than zero and at most ten years")
        former = _find(node, timer.worker_id, timer.scope)
        if former is None:
            if node.timers >= self.settings.max_timers_per_node:
                raise TooMany(f"too many timers on node {node.node_id!r}", self.settings.max_timers_per_node)
            if self._timers >= self.settings.max_timers:
                raise TooMany("too many timers", self.settings.max_timers)
        self._drop(former)
        node.workers.setdefault(timer.worker_id, {})[timer.scope] = timer
        node.timers += 1
        self._timers += 1
        self._queue.schedule(timer, timer.deadline)

    def _expire(self, timer: _Timer) -> None:
        if not timer.expiry_id:
            self._last_expiry += 1
            timer.expiry_id = self._last_expiry
            timer.node.expired[timer.expiry_id] = timer

    def _drop(self, timer: _Timer | None) -> None:
        if timer is None:
            return
        node = timer.node
        scopes = node.workers[timer.worker_id]
        del scopes[timer.scope]
        if not scopes:
            del node.workers[timer.worker_id]
        node.expired.pop(timer.expiry_id, None)
        node.timers -= 1
        self._timers -= 1
        self._queue.drop(timer)

    def _forget_if_idle(self, node: _Node, now: float) -> None:
        if node.stream or node.timers:
            self._queue.drop(node)
        elif node.lease:
            # Its lease must still fence an agent that was superseded and doesn't know yet.
            self._queue.schedule(node, self._clock.read(now) + self.settings.retention)
        else:
            del self._nodes[node.run_id, node.node_id]

    def _view(self, timer: _Timer, now: float) -> TimerView:
        state, remaining = TimerState.COUNTING, timer.deadline - self._clock.read(now)
        if timer.expiry_id:
            state = TimerState.OFFERED if timer.node.stream else TimerState.UNCLAIMED
            remaining = timer.due - now
        return TimerView(timer.name, timer.after, remaining, state, timer.offers)


def _find(node: _Node, worker_id: str, scope: str) -> _Timer | None:
    return node.workers.get(worker_id, {}).get(scope)


def _offer(timer: _Timer, now: float) -> Expiry:
    timer.offers += 1
    return Expiry(timer.expiry_id, timer.name, timer.after, now - timer.due, timer.sequence, timer.offers)


def _check_name(field: str, value: str, limit: int = MAX_NAME_BYTES) -> None:
    if not value:
        raise InvalidField(field, "must not be empty")
    # No character takes more than four bytes: the usual short name is not encoded just to be measured.
    if len(value) * 4 > limit and len(value.encode()) > limit:
        raise InvalidField(field, f"must have at most {limit} bytes of UTF-8")


def _check_lease(node: _Node, lease: int | None) -> None:
    if lease is None:
        return
    if lease < 0:
        raise InvalidField("lease", "must not be negative")
    if lease < node.lease:
        raise LeaseLost(node.run_id, node.node_id, lease, node.lease)
