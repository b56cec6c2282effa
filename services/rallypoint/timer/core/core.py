"""The watchdog's decisions: which requests are accepted, and their effects. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.timer.core.countdown import Countdown
from rallypoint.timer.core.learning import ScopeBook
from rallypoint.timer.core.nodes import Nodes, Timer
from rallypoint.timer.core.values import (
    MAX_AFTER,
    MAX_SCOPE_BYTES,
    RAN_OUT,
    Advance,
    InvalidField,
    Learned,
    ScopeView,
    Subscription,
    TimerName,
    TimerSettings,
    TimerState,
    TimerView,
    TooMany,
    check_name,
    check_seconds,
)


class TimerTable:
    """All timers of a service. A rejected request raises values.TimerRefused and changes nothing.

    Requests with a Subscription that is not in force any more raise LeaseSuperseded or SubscriptionReplaced, except
    `unsubscribe`.
    `now` is monotonic seconds and never goes back.
    """

    def __init__(self, now: float, settings: TimerSettings | None = None) -> None:
        self.settings = settings or TimerSettings()
        self._book: ScopeBook[Timer] = ScopeBook(self.settings)
        self._nodes = Nodes(self.settings.max_nodes, self._book)
        self._countdown = Countdown(now, self.settings, self._nodes, self._book)
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._countdown)

    # Requests of agents, on a stream.

    def subscribe(
        self,
        run_id: str,
        node_id: str,
        lease: int,
        now: float,
        *,
        incarnation: str = "",
        lease_age: float = 0.0,
        token: bytes = b"",
        identity: str = "",
    ) -> Subscription:
        """Make the caller the node's only subscriber. The next `advance` sends it the expiries that wait.

        Args:
            lease: the lease of the node.
            incarnation: the incarnation of the run that granted the lease; empty: unknown.
            lease_age: seconds for which the node has held it, at least 0.
            token: the secret of the agent, which single calls about the node then need; empty: it has none.
            identity: the name in the caller's certificate or token; empty: it has none.

        Raises:
            InvalidField: a name is empty or too long, or a number is out of range.
            NotTheAgent: the node's agent is subscribed, and the caller is another one.
            LeaseSuperseded: a newer lease of the node is known.
            TakeoverUnconfirmed: another incarnation's agent is subscribed: call again.
            TooMany: too many nodes.
        """
        check_seconds("lease_age", lease_age)
        former = self._nodes.get(run_id, node_id)
        if former is not None:
            former.check_agent(lease, incarnation, token, identity)
        is_over = former is not None and former.incarnation and former.began_again(incarnation)
        node = self._nodes.claim(run_id, node_id, lease, incarnation, now - lease_age)
        if is_over:
            # Its workers are gone, and the workers of the new incarnation have the same names.
            for worker_id in list(node.workers):
                self._countdown.clear(node, worker_id)
        if token != node.token:
            # What others registered must not reach the workers of this agent.
            for timer in node.all_timers():
                if not timer.stream:
                    self._countdown.drop(timer)
        node.token, node.identity = token, identity
        self._last_number += 1
        node.stream = self._last_number
        self._countdown.subscribed(node, now)
        return Subscription(run_id, node_id, lease, node.stream, incarnation)

    def unsubscribe(self, subscription: Subscription, now: float) -> None:
        """Note that the subscriber is gone. Its timers go on; harmless if it was already replaced."""
        node = self._nodes.get(subscription.run_id, subscription.node_id)
        if node is None or node.stream != subscription.number:
            return
        node.stream = 0
        self._countdown.unsubscribed(node, now)

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
        learned_as: str = "",
    ) -> None:
        """Start the timer of a subscriber's worker `elapsed` seconds ago, in place of the one of that name.

        Registering the same sequence number again changes nothing, so an expired timer stays expired.

        Args:
            scope: the name of the timer within the worker.
            after: timeout in seconds; 0 if it is learned.
            sequence: the client's number for the timer, more than 0.
            elapsed: seconds of the timer that have passed, at least 0.
            learned_as: the scope to learn from; empty: `after` is given.

        Raises:
            InvalidField, TooMany: the timer is rejected.
        """
        node = self._nodes.subscribed(subscription)
        if sequence <= 0:
            raise InvalidField("sequence", "must be more than zero")
        check_seconds("elapsed", elapsed)
        former = node.find(worker_id, scope)
        if former is not None and former.sequence == sequence:
            former.stream = subscription.number
            return
        began = now - elapsed
        start = self._countdown.watch(began)
        timer = Timer(node, worker_id, scope, after, start, began, sequence, subscription.number)
        self._start(timer, former, learned_as)

    def end(self, subscription: Subscription, worker_id: str, scope: str) -> None:
        """End the timer of a subscriber's worker; harmless if there is none."""
        timer = self._nodes.subscribed(subscription).find(worker_id, scope)
        if timer is not None:
            self._countdown.drop(timer)

    def clear(self, subscription: Subscription, worker_id: str) -> None:
        """End all timers of a worker that is gone, expired or not."""
        self._countdown.clear(self._nodes.subscribed(subscription), worker_id)

    def acknowledge(self, subscription: Subscription, expiry_id: int) -> None:
        """End the timer of a handled expiry; harmless if the node has no such expiry."""
        timer = self._nodes.subscribed(subscription).expired.get(expiry_id)
        if timer is not None:
            self._countdown.drop(timer)

    def registered(self, subscription: Subscription) -> None:
        """End a registration: drop the node's timers that only an earlier subscriber registered."""
        node = self._nodes.subscribed(subscription)
        for timer in node.all_timers():
            if 0 < timer.stream < subscription.number:
                self._countdown.drop(timer)

    def observe(self, subscription: Subscription, scope: str, count: int, longest: float) -> None:
        """Learn from completions of a scope by workers of the node.

        Args:
            scope: the name their timers were `learned_as`.
            count: new completions, each sent once; at least 1.
            longest: the longest completion ever, in seconds.

        Raises:
            InvalidField, TooMany: nothing was learned.
        """
        node = self._nodes.subscribed(subscription)
        _check_learned(scope, count, longest)
        ripe = self._book.observe(node.run_id, scope, count, longest)
        if ripe is not None:
            self._countdown.ripen(ripe)

    def learn(self, subscription: Subscription, scope: str, count: int, longest: float) -> None:
        """Merge data that an earlier service had learned of the run and had published to the agent.

        `count`: completions seen, some of ours possibly included; at least 1. `longest`: the longest of them, in
        seconds.

        Raises:
            InvalidField, TooMany: nothing was learned.
        """
        node = self._nodes.subscribed(subscription)
        _check_learned(scope, count, longest)
        ripe = self._book.learn(node.run_id, scope, count, longest)
        if ripe is not None:
            self._countdown.ripen(ripe)

    # Unary calls.

    def acquire(
        self,
        name: TimerName,
        after: float,
        now: float,
        *,
        elapsed: float = 0.0,
        lease: int | None = None,
        token: bytes = b"",
    ) -> None:
        """Start a timer `elapsed` seconds ago, in place of the one of that name.

        Raises:
            InvalidField, TooMany: the timer is rejected.
            NotTheAgent: the token is not that of the node's agent.
            LeaseSuperseded: a newer lease of the node is known.
        """
        check_seconds("elapsed", elapsed)
        if (known := self._nodes.get(name.run_id, name.node_id)) is not None:
            known.check_token(token)
        node = self._nodes.claim(name.run_id, name.node_id, lease)
        began = now - elapsed
        timer = Timer(node, name.worker_id, name.scope, after, self._countdown.watch(began), began, 0, 0)
        try:
            self._start(timer, node.find(name.worker_id, name.scope))
        finally:
            self._countdown.forget_if_idle(node, now)

    def release(self, name: TimerName, now: float, *, lease: int | None = None, token: bytes = b"") -> bool:
        """End a timer; return True if there was one.

        Raises:
            InvalidField: a name is empty or too long.
            NotTheAgent: the token is not that of the node's agent.
            LeaseSuperseded: a newer lease of the node is known.
        """
        check_name("run_id", name.run_id)
        check_name("node_id", name.node_id)
        check_name("worker_id", name.worker_id)
        check_name("scope", name.scope, MAX_SCOPE_BYTES)
        node = self._nodes.get(name.run_id, name.node_id)
        if node is None:
            return False
        node.check_token(token)
        node.check_lease(lease)
        timer = node.find(name.worker_id, name.scope)
        if timer is None:
            return False
        self._countdown.drop(timer)
        self._countdown.forget_if_idle(node, now)
        return True

    def is_subscribed(self, run_id: str, node_id: str) -> bool:
        """True if an agent is subscribed for the node."""
        node = self._nodes.get(run_id, node_id)
        return node is not None and node.stream != 0

    def clear_worker(
        self,
        run_id: str,
        node_id: str,
        worker_id: str,
        now: float,
        *,
        lease: int | None = None,
        token: bytes = b"",
    ) -> int:
        """End all timers of a worker that is gone, expired or not; return how many.

        Raises:
            InvalidField: a name is empty or too long.
            NotTheAgent: the token is not that of the node's agent.
            LeaseSuperseded: a newer lease of the node is known.
        """
        check_name("run_id", run_id)
        check_name("node_id", node_id)
        check_name("worker_id", worker_id)
        node = self._nodes.get(run_id, node_id)
        if node is None:
            return 0
        node.check_token(token)
        node.check_lease(lease)
        cleared = self._countdown.clear(node, worker_id)
        if cleared:
            self._countdown.forget_if_idle(node, now)
        return cleared

    def timers(
        self,
        now: float,
        run_id: str = "",
        node_id: str = "",
        beyond: TimerName | None = None,
        states: frozenset[TimerState] = frozenset(),
    ) -> Iterator[TimerView]:
        """Yield the timers of a run and node ("": any) in `states` (empty: any), ordered by name, after `beyond`."""
        only_expired = bool(states) and states <= RAN_OUT
        for node in self._nodes.ordered(run_id, node_id, beyond):
            for timer in node.ordered_expired(beyond) if only_expired else node.ordered(beyond):
                state = self._countdown.state(timer)
                if not states or state in states:
                    yield self._countdown.view(timer, state, now)

    # Learned scopes.

    def forget_scopes(self, run_id: str, scope: str) -> int:
        """Forget a learned scope of the run ("": all); return how many were forgotten.

        Its running timers can't expire until a new warm-up is complete.

        Raises:
            InvalidField: a name is empty or too long.
        """
        check_name("run_id", run_id)
        if scope:
            check_name("scope", scope, MAX_SCOPE_BYTES)
        return self._book.forget(run_id, scope)

    def scopes(self, run_id: str = "", beyond: tuple[str, str] | None = None) -> Iterator[ScopeView]:
        """Yield the scopes of a run ("": of all), ordered by run_id and scope, starting after `beyond`."""
        return self._book.scopes(run_id, beyond)

    def learned_of(self, run_id: str) -> list[Learned]:
        """Return all learned scopes of the run; a new subscriber receives them."""
        return self._book.learned_of(run_id)

    def all_learned(self) -> Iterator[tuple[str, Learned]]:
        """Yield all learned scopes with their run_id, in the order in which to `restore` them."""
        return self._book.all_learned()

    def take_learned(self) -> list[tuple[str, Learned]]:
        """Return the changes since the last call that are worth publishing: see ScopeBook.take_learned."""
        return self._book.take_learned()

    def restore(self, run_id: str, learned: Learned, now: float) -> None:
        """Take back a scope that `all_learned` yielded earlier. It is not published.

        Raises:
            InvalidField, TooMany: nothing was learned.
        """
        check_name("run_id", run_id)
        _check_learned(learned.scope, learned.count, learned.longest)
        ripe = self._book.restore(run_id, learned, now)
        if ripe is not None:
            self._countdown.ripen(ripe)

    # Time.

    def next_wake(self, now: float) -> float | None:
        """Return when to call `advance` next, in the time of `now`; None: not before another call."""
        return self._countdown.next_wake(now)

    def advance(self, now: float, due: float) -> Advance:
        """Advance time; all requests that have arrived must have been processed before.

        If much is due, the rest waits for the next call, for which `next_wake` then returns `now`.

        `due` is when this call was planned, as returned by `next_wake`. If it comes late, every deadline moves by as
        much (and some more, see LagSettings) before any timer is examined.
        """
        return self._countdown.advance(now, due)

    def _start(self, timer: Timer, former: Timer | None, learned_as: str = "") -> None:
        node = timer.node
        check_name("worker_id", timer.worker_id)
        check_name("scope", timer.scope, MAX_SCOPE_BYTES)
        if learned_as:
            check_name("learned_as", learned_as, MAX_SCOPE_BYTES)
            if timer.after:
                raise InvalidField("after", "must not be set for a timer that learns")
        elif not 0 < timer.after <= MAX_AFTER:
            raise InvalidField("after", "must be more than zero and at most ten years")
        if former is None:
            if node.timers >= self.settings.max_timers_per_node:
                raise TooMany(f"too many timers on node {node.node_id!r}", self.settings.max_timers_per_node)
            if len(self._countdown) >= self.settings.max_timers:
                raise TooMany("too many timers", self.settings.max_timers)
        if learned_as:
            timer.learns = self._book.scope(node.run_id, learned_as)
        self._countdown.start(timer, former)


def _check_learned(scope: str, count: int, longest: float) -> None:
    check_name("scope", scope, MAX_SCOPE_BYTES)
    if count < 1:
        raise InvalidField("count", "must be at least 1")
    check_seconds("longest", longest)
