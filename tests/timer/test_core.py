"""The timer table against a dictionary: who held a timer past its deadline is accused, and nobody else is.

Times are multiples of 1/8 s, so sums of floats are exact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from rallypoint.serving.lag import LagSettings
from rallypoint.timer.core import MAX_AFTER, TimerTable
from rallypoint.timer.refusals import InvalidField, LeaseLost, Refused, StreamReplaced, TooMany
from rallypoint.timer.values import Expiry, Subscription, TimerName, TimerSettings, TimerState

SETTINGS = TimerSettings(
    reoffer_interval=5.0, retention=60.0, lag=LagSettings(tolerance=0.125, pulse=0.5, settle=1.0)
)
NODES = st.sampled_from(["a", "b"])
WORKERS = st.sampled_from(["0@1", "1@1"])
SCOPES = st.sampled_from(["train.py#1", "train.py#2"])
AFTER = st.integers(1, 80).map(lambda eighths: eighths / 8)


@dataclass
class Held:
    """A timer of the model. `when` is its deadline, the next offer, or the end of its retention."""

    when: float
    sequence: int
    stream: int
    expired: bool = False
    expiry_id: int = 0


class Against(RuleBasedStateMachine):
    """Every rule does the same to the table and to `held`; after each, both must show the same."""

    subscriptions = Bundle("subscriptions")

    @initialize()
    def begin(self) -> None:
        self.now = 1000.0
        self.table = TimerTable(self.now, SETTINGS)
        self.held: dict[TimerName, Held] = {}
        self.current: dict[str, Subscription] = {}
        self.leases: Counter[str] = Counter()
        self.sequence = 0
        self.expiries: list[Expiry] = []

    def in_force(self, subscription: Subscription) -> bool:
        return (
            self.current.get(subscription.node_id) == subscription
            and subscription.lease >= self.leases[subscription.node_id]
        )

    @rule(target=subscriptions, node=NODES, newer=st.integers(0, 1))
    def subscribe(self, node: str, newer: int) -> Subscription:
        lease = self.leases[node] + newer
        subscription = self.table.subscribe("run", node, lease, self.now)
        self.current[node], self.leases[node] = subscription, lease
        for name, timer in self.held.items():
            if name.node_id == node and timer.expired:
                timer.when = self.now
        return subscription

    @rule(subscription=consumes(subscriptions))
    def unsubscribe(self, subscription: Subscription) -> None:
        self.table.unsubscribe(subscription, self.now)
        if self.current.get(subscription.node_id) == subscription:
            del self.current[subscription.node_id]
            for name, timer in self.held.items():
                if name.node_id == subscription.node_id and timer.expired:
                    timer.when = self.now + SETTINGS.retention

    @rule(
        subscription=subscriptions,
        worker=WORKERS,
        scope=SCOPES,
        after=AFTER,
        elapsed=st.integers(0, 16).map(lambda eighths: eighths / 8),
        again=st.booleans(),
    )
    def register(
        self,
        subscription: Subscription,
        *,
        worker: str,
        scope: str,
        after: float,
        elapsed: float,
        again: bool,
    ) -> None:
        name = TimerName("run", subscription.node_id, worker, scope)
        former = self.held.get(name)
        self.sequence += 1
        number = former.sequence if again and former and former.sequence else self.sequence

        def take() -> None:
            self.table.register(
                subscription, worker, scope, after, self.now, sequence=number, elapsed=elapsed
            )

        if not self.in_force(subscription):
            with pytest.raises((StreamReplaced, LeaseLost)):
                take()
            return
        take()
        if former and former.sequence == number:
            former.stream = subscription.number
        else:
            self.held[name] = Held(self.now + after - elapsed, number, subscription.number)

    @rule(subscription=subscriptions, worker=WORKERS, scope=SCOPES)
    def end(self, subscription: Subscription, worker: str, scope: str) -> None:
        if self.in_force(subscription):
            self.table.end(subscription, worker, scope)
            self.held.pop(TimerName("run", subscription.node_id, worker, scope), None)
        else:
            with pytest.raises((StreamReplaced, LeaseLost)):
                self.table.end(subscription, worker, scope)

    @rule(subscription=subscriptions, worker=WORKERS)
    def clear(self, subscription: Subscription, worker: str) -> None:
        if self.in_force(subscription):
            self.table.clear(subscription, worker)
            gone = [n for n in self.held if (n.node_id, n.worker_id) == (subscription.node_id, worker)]
            for name in gone:
                del self.held[name]

    @rule(subscription=subscriptions)
    def registered(self, subscription: Subscription) -> None:
        if self.in_force(subscription):
            self.table.registered(subscription)
            for name, timer in list(self.held.items()):
                if name.node_id == subscription.node_id and 0 < timer.stream < subscription.number:
                    del self.held[name]

    @rule(node=NODES, worker=WORKERS, scope=SCOPES, after=AFTER, newer=st.integers(-1, 1) | st.none())
    def acquire(self, node: str, worker: str, scope: str, after: float, newer: int | None) -> None:
        name = TimerName("run", node, worker, scope)
        lease = None if newer is None else max(0, self.leases[node] + newer)
        if lease is not None and lease < self.leases[node]:
            with pytest.raises(LeaseLost):
                self.table.acquire(name, after, self.now, lease=lease)
            return
        self.table.acquire(name, after, self.now, lease=lease)
        self.leases[node] = max(self.leases[node], lease or 0)
        self.held[name] = Held(self.now + after, 0, 0)

    @rule(node=NODES, worker=WORKERS, scope=SCOPES)
    def release(self, node: str, worker: str, scope: str) -> None:
        name = TimerName("run", node, worker, scope)
        assert self.table.release(name, self.now) == (self.held.pop(name, None) is not None)

    @precondition(lambda self: self.expiries)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        """Of any expiry ever told, those of timers that were replaced since included."""
        expiry = data.draw(st.sampled_from(self.expiries))
        subscription = self.current.get(expiry.name.node_id)
        if subscription and self.in_force(subscription):
            self.table.acknowledge(subscription, expiry.expiry_id)
            timer = self.held.get(expiry.name)
            if timer and timer.expiry_id == expiry.expiry_id:
                del self.held[expiry.name]

    @rule(eighths=st.integers(0, 60), late=st.integers(0, 40))
    def advance(self, eighths: int, late: int) -> None:
        due = self.now + eighths / 8
        self.now = due + late / 8
        advance = self.table.advance(self.now, due)
        lag = late / 8
        if lag <= SETTINGS.lag.tolerance:
            assert advance.forgiven == 0
        else:
            assert lag <= advance.forgiven <= lag + min(lag, SETTINGS.lag.settle)
        for timer in self.held.values():
            timer.when += advance.forgiven
        expected = []
        for name, timer in sorted(self.held.items(), key=lambda item: item[1].when):
            if timer.when > self.now + 1e-6:
                continue
            if name.node_id in self.current:
                expected.append((timer.when, name, timer.sequence))
                timer.expired, timer.when = True, self.now + SETTINGS.reoffer_interval
            elif timer.expired:
                del self.held[name]
            else:
                timer.expired, timer.when = True, self.now + SETTINGS.retention
        when = {name: when for when, name, _ in expected}
        told = [(when[expiry.name], expiry.name, expiry.sequence) for expiry in advance.expiries]
        assert sorted(told) == sorted(expected)
        assert [at for at, _, _ in told] == sorted(when.values()), "not in the order of their deadlines"
        for expiry in advance.expiries:
            assert self.held[expiry.name].expiry_id in (0, expiry.expiry_id), "told again under another id"
            self.held[expiry.name].expiry_id = expiry.expiry_id
        self.expiries.extend(advance.expiries)

    @invariant()
    def shows_the_same(self) -> None:
        shown = {view.name: view for view in self.table.timers(self.now)}
        assert list(shown) == sorted(self.held)
        assert len(self.table) == len(self.held)
        for name, timer in self.held.items():
            if not timer.expired:
                assert shown[name].state is TimerState.COUNTING
                assert shown[name].remaining == timer.when - self.now
            else:
                claimed = name.node_id in self.current
                assert shown[name].state is (TimerState.OFFERED if claimed else TimerState.UNCLAIMED)

    @invariant()
    def wakes_in_time(self) -> None:
        wake = self.table.next_wake(self.now)
        for timer in self.held.values():
            assert wake is not None
            assert self.now <= wake <= max(self.now, timer.when)
            assert wake <= self.now + SETTINGS.lag.pulse


TestAgainst = Against.TestCase
TestAgainst.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


RUN = "run"


def table(**changes: float) -> TimerTable:
    return TimerTable(0.0, TimerSettings(**{"lag": SETTINGS.lag, **changes}))  # type: ignore[arg-type]


def test_a_release_that_waited_through_a_pause_is_taken_before_anybody_is_accused() -> None:
    """Paused for 20 s with 1,000 timers due meanwhile: those released in time live, those not released don't."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 1, 0.0)
    for number in range(1000):
        timers.register(agent, "0@1", f"s{number}", 1 + number / 100, 0.0, sequence=number + 1)
    wake = timers.next_wake(0.0)
    assert wake == 0.5
    advance = timers.advance(20.0, due=wake)
    assert advance.expiries == []
    for number in range(0, 1000, 2):
        timers.end(agent, "0@1", f"s{number}")
    now, accused = 20.0, []
    while (due := timers.next_wake(now)) is not None and now < 40.0:
        now = due
        accused += [expiry.sequence for expiry in timers.advance(now, due).expiries if expiry.offers == 1]
    assert accused == list(range(2, 1001, 2))


def test_lateness_counts_from_the_deadline_that_the_worker_was_given() -> None:
    """What was forgiven delays the expiry and is not hidden in its lateness."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    timers.register(agent, "0@1", "s", 1.0, 0.0, sequence=1)
    assert timers.advance(10.0, due=0.5).forgiven == 10.5
    (expiry,) = timers.advance(11.5, due=11.5).expiries
    assert expiry.late_by == 10.5


def test_a_deadline_survives_a_restart_of_the_service() -> None:
    """Registered with a new service with the time that has passed, a timer keeps its deadline."""
    timers = TimerTable(500.0, SETTINGS)
    agent = timers.subscribe(RUN, "a", 0, 500.0)
    timers.register(agent, "0@1", "s", 10.0, 500.0, sequence=7, elapsed=6.0)
    assert timers.advance(503.875, due=503.875).expiries == []
    (expiry,) = timers.advance(504.0, due=504.0).expiries
    assert (expiry.after, expiry.late_by, expiry.sequence) == (10.0, 0.0, 7)


def test_what_a_new_stream_does_not_name_ends_with_registered() -> None:
    """Not before, and not what a single call acquired."""
    timers = table()
    earlier = timers.subscribe(RUN, "a", 0, 0.0)
    timers.register(earlier, "w", "kept", 60.0, 0.0, sequence=1)
    timers.register(earlier, "w", "gone", 60.0, 0.0, sequence=2)
    timers.acquire(TimerName(RUN, "a", "w", "call"), 60.0, 0.0)
    later = timers.subscribe(RUN, "a", 0, 10.0)
    timers.register(later, "w", "kept", 60.0, 10.0, sequence=1, elapsed=10.0)
    assert len(timers) == 3
    timers.registered(later)
    assert [(view.name.scope, view.remaining) for view in timers.timers(10.0)] == [("call", 50), ("kept", 50)]


def test_an_expiry_is_told_again_until_acknowledged() -> None:
    """Under the same id, every reoffer_interval; acknowledging ends the timer."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    timers.register(agent, "0@1", "s", 1.0, 0.0, sequence=1)
    (first,) = timers.advance(1.0, due=1.0).expiries
    assert timers.advance(5.9, due=5.9).expiries == []
    (second,) = timers.advance(6.0, due=6.0).expiries
    assert (second.expiry_id, second.offers) == (first.expiry_id, 2)
    timers.acknowledge(agent, first.expiry_id)
    assert len(timers) == 0
    assert timers.next_wake(6.0) is None


def test_an_expiry_waits_for_its_agent() -> None:
    """Run out while nobody was subscribed, it is told to whoever subscribes, within the retention."""
    timers = table()
    timers.acquire(TimerName(RUN, "a", "0@1", "s"), 1.0, 0.0)
    assert timers.advance(1.0, due=1.0).unclaimed == 1
    timers.subscribe(RUN, "a", 0, 100.0)
    (expiry,) = timers.advance(100.0, due=100.0).expiries
    assert (expiry.sequence, expiry.late_by) == (0, 99.0)


def test_a_flood_of_expiries_is_told_in_portions() -> None:
    """So that releases get in between; in order, none twice, none lost."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    for number in range(5000):
        timers.register(agent, f"w{number}", "s", 1.0, 0.0, sequence=number + 1)
    told: list[int] = []
    while timers.next_wake(1.0) == 1.0:
        expiries = timers.advance(1.0, due=1.0).expiries
        assert 0 < len(expiries) <= 2000
        told += [expiry.sequence for expiry in expiries]
    assert told == list(range(1, 5001))


def test_what_nobody_claims_is_forgotten() -> None:
    """A node that never comes back leaves nothing behind: no timer, no lease, no wake-up."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 3, 0.0)
    timers.register(agent, "0@1", "s", 1.0, 0.0, sequence=1)
    timers.unsubscribe(agent, 0.0)
    with pytest.raises(LeaseLost):
        timers.subscribe(RUN, "a", 2, 0.0)
    assert timers.advance(1.0, due=1.0).unclaimed == 1
    assert timers.advance(3601.0, due=3601.0).abandoned == 1
    timers.advance(7201.0, due=7201.0)
    assert timers.next_wake(7201.0) is None
    timers.subscribe(RUN, "a", 2, 7201.0)


@pytest.mark.parametrize("after", [0.0, -1.0, float("nan"), float("inf"), MAX_AFTER * 2])
def test_a_duration_that_makes_no_sense_is_refused(after: float) -> None:
    """And leaves nothing behind, not even the node."""
    timers = table()
    with pytest.raises(InvalidField, match="after"):
        timers.acquire(TimerName(RUN, "a", "0@1", "s"), after, 0.0)
    assert timers._nodes == {}


@pytest.mark.parametrize(
    "name",
    [
        TimerName("", "a", "w", "s"),
        TimerName("r", "", "w", "s"),
        TimerName("r", "a", "", "s"),
        TimerName("r", "a", "w", ""),
        TimerName("r" * 257, "a", "w", "s"),
        TimerName("r", "a", "w" * 257, "s"),
        TimerName("r", "a", "w", "ü" * 257),
    ],
)
def test_a_name_that_is_empty_or_too_long_is_refused(name: TimerName) -> None:
    """Bytes are counted, not characters."""
    with pytest.raises(InvalidField):
        table().acquire(name, 1.0, 0.0)


def test_bounds() -> None:
    """Per node, in all, and of nodes; replacing a timer needs no room."""
    timers = table(max_timers_per_node=2, max_timers=3, max_nodes=2)

    def acquire(node: str, scope: str) -> None:
        timers.acquire(TimerName(RUN, node, "w", scope), 1.0, 0.0)

    acquire("a", "1")
    acquire("a", "2")
    acquire("a", "2")
    refused: list[Refused] = []
    for node, scope in (("a", "3"), ("b", "1"), ("b", "2"), ("c", "1")):
        try:
            acquire(node, scope)
        except TooMany as error:
            refused.append(error)
    assert [error.limit for error in refused if isinstance(error, TooMany)] == [2, 3, 2]


def test_listing_goes_on_from_a_name() -> None:
    """Pages put together are the whole, filtered by run and node."""
    timers = table()
    names = sorted(
        TimerName(run, node, worker, scope)
        for run in "rs"
        for node in "ab"
        for worker in "vw"
        for scope in "12"
    )
    for name in reversed(names):
        timers.acquire(name, 1.0, 0.0)
    for position, name in enumerate(names):
        assert [view.name for view in timers.timers(0.0, beyond=name)] == names[position + 1 :]
    assert [view.name for view in timers.timers(0.0, run_id="s", node_id="a")] == [
        name for name in names if name[:2] == ("s", "a")
    ]
