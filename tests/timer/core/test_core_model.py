"""The timer table against dictionaries: exactly the timers held past their deadline expire.

Times are multiples of 1/8 s, so sums of floats are exact.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rallypoint.timer.core.core import TimerTable
from rallypoint.timer.core.values import (
    RAN_OUT,
    Advance,
    Expiry,
    Learned,
    LeaseSuperseded,
    Subscription,
    SubscriptionReplaced,
    TimerName,
    TimerState,
    TooMany,
)
from support.marks import slow
from support.timer_model import ROUNDING, SETTINGS, Held, Known, Model, Place


def eighths(least: int, most: int) -> st.SearchStrategy[float]:
    return st.integers(least, most).map(lambda number: number / 8)


PLACES = st.sampled_from([("run", "a"), ("run", "a"), ("run", "b"), ("other", "a")])
# The same, and a node whose agent never comes.
CALLED = PLACES | st.just(("run", "c"))
RUNS = st.sampled_from(["run", "other"])
WORKERS = st.sampled_from(["0@1", "1@1"])
SCOPES = st.sampled_from(["train.py#1", "train.py#2"])
# Mostly one scope, so that it has several timers at once.
LEARNED = st.sampled_from(["step", "step", "step", "step", "save", "third"])
AFTER = eighths(1, 80)
# True: the caller has lost its subscription and does not know it yet.
LATE = st.integers(0, 5).map(lambda number: number == 5)
# 0: the timer learns.
AFTER_OR_LEARNS = st.just(0.0) | AFTER


class Against(RuleBasedStateMachine):
    """Every rule does the same to the table and to the dictionaries; after each, both must show the same."""

    @initialize(warm=st.integers(0, SETTINGS.learn_warm_up))
    def begin(self, warm: int) -> None:
        self.model = Model(1000.0)
        self.table = TimerTable(self.model.now, SETTINGS)
        # Ended subscriptions, the last of each node.
        self.former: dict[Place, Subscription] = {}
        # The data of scopes sent to agents, and the scopes forgotten since.
        self.told: dict[tuple[str, str], Learned] = {}
        self.forgotten: set[tuple[str, str]] = set()
        self.sequence = 0
        self.expiries: list[Expiry] = []
        self.number_of_expiry: dict[int, TimerName] = {}
        if warm:
            self.restore("run", "step", warm, 0.5)

    def agent(self, place: Place, late: bool) -> Subscription:
        """Return the node's subscription, made if need be; if `late`, one that is no longer in force."""
        node = self.model.nodes.get(place)
        subscriber = node.subscriber if node else None
        if late and subscriber and not self.model.in_force(subscriber):
            return subscriber
        if late and place in self.former:
            return self.former[place]
        if subscriber is None or not self.model.in_force(subscriber):
            self.subscribe(place, 0)
        subscription = self.model.nodes[place].subscriber
        assert subscription is not None
        return subscription

    def refused_unless_in_force(self, subscription: Subscription, call: Callable[[], None]) -> bool:
        """Make the call; return True if it was accepted, as it must be if the subscription is in force."""
        if self.model.in_force(subscription):
            call()
            return True
        with pytest.raises((SubscriptionReplaced, LeaseSuperseded)):
            call()
        return False

    # Requests of agents.

    @rule(place=PLACES, newer=st.integers(0, 1))
    def subscribe(self, place: Place, newer: int) -> None:
        lease = self.model.nodes.get(place, Known()).lease + newer
        subscription = self.table.subscribe(*place, lease, self.model.now)
        node = self.model.claim(place, lease)
        if node.subscriber is not None:
            self.former[place] = node.subscriber
        node.subscriber, node.until = subscription, None
        for timer in self.model.on(place).values():
            timer.again = self.model.watch
        told = {learned.scope: learned for learned in self.table.learned_of(place[0])}
        assert told == {
            scope: learned for (run, scope), learned in self.model.learned.items() if run == place[0]
        }

    @rule(place=PLACES, late=LATE)
    def unsubscribe(self, place: Place, late: bool) -> None:
        subscription = self.agent(place, late)
        self.table.unsubscribe(subscription, self.model.now)
        node = self.model.nodes.get(place)
        if node is not None and node.subscriber == subscription:
            node.subscriber, self.former[place] = None, subscription
            for timer in self.model.on(place).values():
                timer.again = self.model.watch + SETTINGS.retention
            self.model.forget_if_idle(place)

    @rule(
        place=PLACES,
        late=LATE,
        worker=WORKERS,
        scope=SCOPES,
        after=AFTER_OR_LEARNS,
        learned_as=LEARNED,
        elapsed=eighths(0, 16),
        again=st.booleans(),
    )
    def register(
        self,
        place: Place,
        *,
        late: bool,
        worker: str,
        scope: str,
        after: float,
        learned_as: str,
        elapsed: float,
        again: bool,
    ) -> None:
        subscription = self.agent(place, late)
        name = TimerName(*place, worker, scope)
        former = self.model.held.get(name)
        repeats = again and former is not None and former.sequence > 0
        self.sequence += 1
        number = former.sequence if repeats and former else self.sequence
        learns = "" if after else learned_as

        def take() -> None:
            self.table.register(
                subscription,
                worker,
                scope,
                after,
                self.model.now,
                sequence=number,
                elapsed=elapsed,
                learned_as=learns,
            )

        if (
            self.model.in_force(subscription)
            and not repeats
            and learns
            and not self.model.has_room(name.run_id, learns)
        ):
            with pytest.raises(TooMany):
                take()
        elif self.refused_unless_in_force(subscription, take):
            if repeats and former:
                former.stream = subscription.number
            else:
                start = self.model.watch - elapsed
                self.model.held[name] = Held(start, after, learns, number, subscription.number)

    @rule(place=PLACES, late=LATE, worker=WORKERS, scope=SCOPES)
    def end(self, place: Place, late: bool, worker: str, scope: str) -> None:
        subscription = self.agent(place, late)
        if self.refused_unless_in_force(subscription, lambda: self.table.end(subscription, worker, scope)):
            self.model.held.pop(TimerName(*place, worker, scope), None)

    @rule(place=PLACES, late=LATE, worker=WORKERS)
    def clear(self, place: Place, late: bool, worker: str) -> None:
        subscription = self.agent(place, late)
        if self.refused_unless_in_force(subscription, lambda: self.table.clear(subscription, worker)):
            for name in self.model.on(place):
                if name.worker_id == worker:
                    del self.model.held[name]

    @rule(place=PLACES, late=LATE)
    def registered(self, place: Place, late: bool) -> None:
        subscription = self.agent(place, late)
        if self.refused_unless_in_force(subscription, lambda: self.table.registered(subscription)):
            for name, timer in self.model.on(place).items():
                if 0 < timer.stream < subscription.number:
                    del self.model.held[name]

    @precondition(lambda self: self.expiries)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        """Acknowledge any expiry ever sent, also of a timer that was replaced since."""
        expiry = data.draw(st.sampled_from(self.expiries))
        node = self.model.nodes.get(expiry.name[:2])
        if node and node.subscriber and self.model.in_force(node.subscriber):
            self.table.acknowledge(node.subscriber, expiry.expiry_id)
            timer = self.model.held.get(expiry.name)
            if timer and timer.expiry_id == expiry.expiry_id:
                del self.model.held[expiry.name]

    # Single calls.

    @rule(place=CALLED, worker=WORKERS, scope=SCOPES, after=AFTER, newer=st.integers(-1, 1) | st.none())
    def acquire(self, place: Place, worker: str, scope: str, after: float, newer: int | None) -> None:
        name = TimerName(*place, worker, scope)
        current = self.model.nodes.get(place, Known()).lease
        lease = None if newer is None else max(0, current + newer)
        if lease is not None and lease < current:
            with pytest.raises(LeaseSuperseded):
                self.table.acquire(name, after, self.model.now, lease=lease)
            return
        self.table.acquire(name, after, self.model.now, lease=lease)
        self.model.claim(place, lease or 0).until = None
        self.model.held[name] = Held(self.model.watch, after, "", 0, 0)

    @rule(place=CALLED, worker=WORKERS, scope=SCOPES, data=st.data())
    def release(self, place: Place, worker: str, scope: str, data: st.DataObject) -> None:
        """Release a timer that exists or not, of a node that is known or not."""
        name = data.draw(st.sampled_from([TimerName(*place, worker, scope), *sorted(self.model.held)]))
        place = name[:2]
        there = self.model.held.pop(name, None) is not None
        assert self.table.release(name, self.model.now) == there
        if there:
            self.model.forget_if_idle(place)

    @rule(place=CALLED, worker=WORKERS, stale=st.booleans())
    def clear_worker(self, place: Place, worker: str, stale: bool) -> None:
        lease = self.model.nodes.get(place, Known()).lease
        if stale and lease:
            with pytest.raises(LeaseSuperseded):
                self.table.clear_worker(*place, worker, self.model.now, lease=lease - 1)
            return
        gone = [name for name in self.model.on(place) if name.worker_id == worker]
        assert self.table.clear_worker(*place, worker, self.model.now, lease=lease) == len(gone)
        for name in gone:
            del self.model.held[name]
        if gone:
            self.model.forget_if_idle(place)

    # Learning.

    @rule(place=PLACES, late=LATE, scope=LEARNED, count=st.integers(1, 3), longest=eighths(0, 24))
    def observe(self, place: Place, late: bool, scope: str, count: int, longest: float) -> None:
        """Send completions, each once."""
        subscription = self.agent(place, late)

        def take() -> None:
            self.table.observe(subscription, scope, count, longest)

        self.take_account(subscription, scope, take, lambda old: old.count + count, longest)

    @rule(place=PLACES, late=LATE, scope=LEARNED, count=st.integers(1, 5), longest=eighths(0, 24))
    def learn(self, place: Place, late: bool, scope: str, count: int, longest: float) -> None:
        """Echo the same completions, counted by another agent."""
        subscription = self.agent(place, late)

        def take() -> None:
            self.table.learn(subscription, scope, count, longest)

        self.take_account(subscription, scope, take, lambda old: max(old.count, count), longest)

    def take_account(
        self,
        subscription: Subscription,
        scope: str,
        take: Callable[[], None],
        count: Callable[[Learned], int],
        longest: float,
    ) -> None:
        if self.model.in_force(subscription) and not self.model.has_room(subscription.run_id, scope):
            with pytest.raises(TooMany):
                take()
        elif self.refused_unless_in_force(subscription, take):
            self.model.merge(subscription.run_id, scope, count, longest)

    @rule(node=st.sampled_from(["a", "b"]), worker=WORKERS, scope=SCOPES)
    def enter(self, node: str, worker: str, scope: str) -> None:
        """Start a timer that learns, as workers do again and again."""
        self.register(
            ("run", node),
            late=False,
            worker=worker,
            scope=scope,
            after=0.0,
            learned_as="step",
            elapsed=0.0,
            again=False,
        )

    @precondition(lambda self: any(timer.learned_as for timer in self.model.held.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """End a timer that learns, and send its duration."""
        learning = [name for name, timer in self.model.held.items() if timer.learned_as]
        name = data.draw(st.sampled_from(learning))
        timer = self.model.held[name]
        place = name[:2]
        self.end(place, False, name.worker_id, name.scope)
        if timer.start <= self.model.watch:
            self.observe(place, False, timer.learned_as, 1, self.model.watch - timer.start)

    @rule(run=RUNS, scope=LEARNED, count=st.integers(1, 5), longest=eighths(0, 24))
    def restore(self, run: str, scope: str, count: int, longest: float) -> None:
        """Data from a file is not sent to agents."""
        if not self.model.has_room(run, scope):
            with pytest.raises(TooMany):
                self.table.restore(run, Learned(scope, count, longest), self.model.now)
            return
        self.take_learned()
        self.table.restore(run, Learned(scope, count, longest), self.model.now)
        assert self.table.take_learned() == []
        self.model.merge(run, scope, lambda old: max(old.count, count), longest)
        self.told[run, scope] = self.model.learned[run, scope]
        if not any(place[0] == run for place in self.model.nodes):
            self.model.idle.setdefault(run, self.model.now)

    @rule(run=RUNS, scope=LEARNED | st.just(""))
    def forget_scopes(self, run: str, scope: str) -> None:
        gone = [place for place in self.model.learned if place[0] == run and scope in ("", place[1])]
        assert self.table.forget_scopes(run, scope) == len(gone)
        for place in gone:
            del self.model.learned[place]
        self.forgotten.update(gone)
        if not any(of == run for of, _ in self.model.learned):
            self.model.idle.pop(run, None)

    @rule()
    def take_learned(self) -> None:
        """Agents never have more than happened, and lag behind in counts only."""
        news = self.table.take_learned()
        changed = [(run, learned.scope) for run, learned in news]
        assert len(set(changed)) == len(changed), "told twice"
        for run, learned in news:
            place = (run, learned.scope)
            assert learned == self.model.learned.get(place, Learned(learned.scope, 0, 0.0))
            before = self.told.get(place, Learned(learned.scope, 0, 0.0))
            ripened = before.count < SETTINGS.learn_warm_up <= learned.count
            grown = learned.longest > before.longest
            assert ripened or grown or place in self.forgotten, "told for a count alone"
            self.told[place] = learned
        self.forgotten.clear()
        for place, learned in self.model.learned.items():
            told = self.told.get(place, Learned(learned.scope, 0, 0.0))
            assert told.longest == learned.longest
            assert told.count <= learned.count
            assert (told.count >= SETTINGS.learn_warm_up) == (learned.count >= SETTINGS.learn_warm_up)
        for place, told in self.told.items():
            assert not told.count or place in self.model.learned, "forgotten, and nobody was told"

    # The passing of time.

    @rule(wait=eighths(0, 30), late=eighths(0, 20))
    def advance(self, wait: float, late: float) -> None:
        self.let_pass(self.model.now + wait, late)

    @rule(wait=st.sampled_from([30.0, 60.0, 100.0, 200.0, 400.0]))
    def advance_far(self, wait: float) -> None:
        """Advance as a watchdog that waits on purpose: nothing is forgiven."""
        self.let_pass(self.model.now + wait, 0.0)

    @rule(wait=eighths(0, 40))
    def sleep(self, wait: float) -> None:
        """Advance from one alarm to the next, as the watchdog does: each timer is reported when it expires."""
        end = self.model.now + wait
        for _ in range(1000):
            wake = self.table.next_wake(self.model.now)
            if wake is None or wake > end:
                break
            deadlines = {
                name: timer.start + after
                for name, timer in self.model.held.items()
                if not timer.expired and (after := self.model.after_of(name)) is not None
            }
            began = self.model.now
            for expiry in self.let_pass(wake, 0.0).expiries:
                deadline = deadlines.get(expiry.name, 0.0) + self.model.forgiven
                assert deadline <= began or deadline == pytest.approx(self.model.now, abs=2 * ROUNDING)
        else:
            raise AssertionError("the alarm never stops ringing")
        self.model.now = end

    def let_pass(self, due: float, late: float) -> Advance:
        self.model.now = due + late
        advance = self.table.advance(self.model.now, due)
        if late <= SETTINGS.lag.tolerance:
            assert advance.forgiven == 0
        else:
            assert late <= advance.forgiven <= late + min(late, SETTINGS.lag.settle)
        self.model.forgiven += advance.forgiven
        self.forgotten |= self.model.forget_runs()
        expected, unclaimed, abandoned = self.model.judge()
        assert {expiry.name: expiry.sequence for expiry in advance.expiries} == expected
        assert len(advance.expiries) == len(expected), "told twice at once"
        assert (advance.unclaimed, advance.abandoned) == (unclaimed, abandoned)
        for expiry in advance.expiries:
            self.check(expiry)
        self.expiries.extend(advance.expiries)
        return advance

    def check(self, expiry: Expiry) -> None:
        timer = self.model.held[expiry.name]
        assert timer.expiry_id in (0, expiry.expiry_id), "told again under another id"
        assert self.number_of_expiry.setdefault(expiry.expiry_id, expiry.name) == expiry.name
        timer.expiry_id = expiry.expiry_id
        assert expiry.after == timer.after
        if timer.learned_as:
            assert expiry.learned is not None
            assert expiry.learned.scope == timer.learned_as
            assert expiry.learned.count >= SETTINGS.learn_warm_up
        else:
            assert expiry.learned is None

    # Both must show the same.

    @invariant()
    def shows_the_same_timers(self) -> None:
        shown = {view.name: view for view in self.table.timers(self.model.now)}
        assert list(shown) == sorted(self.model.held)
        assert len(self.table) == len(self.model.held)
        assert len(self.table._nodes) == len(self.model.nodes)
        for name, timer in self.model.held.items():
            view, after = shown[name], self.model.after_of(name)
            assert view.learned_as == timer.learned_as
            assert view.after == after
            assert view.state is self.model.state_of(name)
            assert (view.remaining is None) == (after is None)
            if not timer.expired and after is not None:
                assert view.remaining == pytest.approx(timer.start + after - self.model.watch, abs=1e-9)
        for states in (*(frozenset({state}) for state in TimerState), RAN_OUT):
            expected = [view for view in shown.values() if view.state in states]
            assert list(self.table.timers(self.model.now, states=states)) == expected
            for position, view in enumerate(expected):
                rest = self.table.timers(self.model.now, beyond=view.name, states=states)
                assert list(rest) == expected[position + 1 :]

    @invariant()
    def shows_the_same_scopes(self) -> None:
        expected = {
            (run, scope): Learned(scope, 0, 0.0)
            for run in ("run", "other")
            for scope in self.model.scopes_of(run)
        } | self.model.learned
        views = list(self.table.scopes())
        assert [(view.run_id, view.learned.scope) for view in views] == sorted(expected)
        for view in views:
            assert view.learned == expected[view.run_id, view.learned.scope]
            assert view.after == self.model.after_learned(view.run_id, view.learned.scope)
            assert view.timers == sum(
                name.run_id == view.run_id and timer.learned_as == view.learned.scope
                for name, timer in self.model.held.items()
            )
        assert {
            (run, learned.scope): learned for run, learned in self.table.all_learned()
        } == self.model.learned

    @invariant()
    def wakes_in_time(self) -> None:
        wake = self.table.next_wake(self.model.now)
        for name, timer in self.model.held.items():
            assert wake is not None
            assert self.model.now <= wake <= self.model.now + SETTINGS.lag.pulse
            after = self.model.after_of(name)
            if after is not None:
                when = timer.again if timer.expired else timer.start + after
                assert wake <= max(self.model.now, when + self.model.forgiven)
        for node in self.model.nodes.values():
            if node.until is not None:
                assert wake is not None
                assert wake <= max(self.model.now, node.until + self.model.forgiven)
        if (
            not self.model.held
            and not self.model.idle
            and all(node.subscriber for node in self.model.nodes.values())
        ):
            # At once, for timers that ended while they were waiting for their deadlines.
            assert wake in (None, self.model.now), "wakes for nothing"


@pytest.mark.parametrize("examples", [40, slow(200)])
def test_the_table_behaves_like_its_model(examples: int) -> None:
    """The table and its model agree on any requests in any order."""
    run_state_machine_as_test(Against, settings=settings(max_examples=examples, stateful_step_count=50))
