"""Examples for the timer table. test_core_model.py compares it with a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rallypoint.rpc.clock import LagSettings
from rallypoint.timer.core.core import TimerTable
from rallypoint.timer.core.values import (
    MAX_AFTER,
    InvalidField,
    Learned,
    LeaseSuperseded,
    NotTheAgent,
    Subscription,
    SubscriptionReplaced,
    TakeoverUnconfirmed,
    TimerName,
    TimerRefused,
    TimerSettings,
    TimerState,
    TooMany,
)

LAG = LagSettings(tolerance=0.125, pulse=0.5, settle=1.0)

RUN = "run"


def table(**changes: float) -> TimerTable:
    return TimerTable(0.0, TimerSettings(**{"lag": LAG, **changes}))  # type: ignore[arg-type]


def test_a_release_that_waited_through_a_pause_is_applied_before_any_expiry() -> None:
    """After a pause of 20 s with 1,000 timers due, only the timers not released in time expire."""
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
    """Forgiven time delays the expiry and is included in its lateness."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    timers.register(agent, "0@1", "s", 1.0, 0.0, sequence=1)
    assert timers.advance(10.0, due=0.5).forgiven == 10.5
    (expiry,) = timers.advance(11.5, due=11.5).expiries
    assert expiry.late_by == 10.5


def test_a_deadline_survives_a_restart_of_the_service() -> None:
    """A timer registered with a new service, with the time that has passed, keeps its deadline."""
    timers = TimerTable(500.0, TimerSettings(lag=LAG))
    agent = timers.subscribe(RUN, "a", 0, 500.0)
    timers.register(agent, "0@1", "s", 10.0, 500.0, sequence=7, elapsed=6.0)
    assert timers.advance(503.875, due=503.875).expiries == []
    (expiry,) = timers.advance(504.0, due=504.0).expiries
    assert (expiry.after, expiry.late_by, expiry.sequence) == (10.0, 0.0, 7)


def test_timers_that_a_new_stream_does_not_name_end_with_registered() -> None:
    """They do not end before it, and timers of single calls stay."""
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


def test_an_expiry_is_sent_again_until_acknowledged() -> None:
    """It keeps its id, every reoffer_interval; acknowledging ends the timer."""
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
    """An expiry without a subscriber is sent to the next subscriber within the retention."""
    timers = table()
    timers.acquire(TimerName(RUN, "a", "0@1", "s"), 1.0, 0.0)
    assert timers.advance(1.0, due=1.0).unclaimed == 1
    timers.subscribe(RUN, "a", 0, 100.0)
    (expiry,) = timers.advance(100.0, due=100.0).expiries
    assert (expiry.sequence, expiry.late_by) == (0, 99.0)


def test_a_flood_of_expiries_is_sent_in_portions() -> None:
    """Releases can be read in between; expiries come in order, none twice, none lost."""
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


def test_a_node_that_never_comes_back_is_forgotten() -> None:
    """A node that never comes back leaves nothing behind: no timer, no lease, no wake-up."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 3, 0.0)
    timers.register(agent, "0@1", "s", 1.0, 0.0, sequence=1)
    timers.unsubscribe(agent, 0.0)
    with pytest.raises(LeaseSuperseded):
        timers.subscribe(RUN, "a", 2, 0.0)
    assert timers.advance(1.0, due=1.0).unclaimed == 1
    assert timers.advance(3601.0, due=3601.0).abandoned == 1
    timers.advance(7201.0, due=7201.0)
    assert timers.next_wake(7201.0) is None
    timers.subscribe(RUN, "a", 2, 7201.0)


def take_over(timers: TimerTable, lease: int, now: float, incarnation: str, age: float = 0.0) -> Subscription:
    """Subscribe in place of the subscribed agent of another incarnation, which takes two calls."""
    with pytest.raises(TakeoverUnconfirmed, match="another agent is subscribed for node 'a' of run 'run'"):
        timers.subscribe(RUN, "a", lease, now, incarnation=incarnation, lease_age=age)
    return timers.subscribe(RUN, "a", lease, now, incarnation=incarnation, lease_age=age)


def test_leases_of_two_lives_of_a_run_are_not_compared() -> None:
    """The agent with the later lease is the newer one, with any numbers, and no other replaces it."""
    timers = table()
    first = timers.subscribe(RUN, "a", 50, 100.0, incarnation="first", lease_age=90.0)
    timers.register(first, "0@1", "s", 5.0, 100.0, sequence=1)
    second = take_over(timers, 2, 101.0, "second", age=1.0)
    assert len(timers) == 0  # its worker belonged to the incarnation that is over
    for _ in range(3):
        with pytest.raises(LeaseSuperseded, match="newer run") as refused:
            timers.subscribe(RUN, "a", 50, 102.0, incarnation="first", lease_age=92.0)
        assert refused.value.of_other_run
        with pytest.raises(LeaseSuperseded):
            timers.register(first, "0@1", "s", 5.0, 102.0, sequence=2)
        timers.register(second, "0@1", "s", 60.0, 102.0, sequence=1)
    # Within one incarnation, the lease numbers decide.
    with pytest.raises(LeaseSuperseded, match="lease 2 superseded"):
        timers.subscribe(RUN, "a", 1, 102.0, incarnation="second", lease_age=0.0)
    # While it is away another agent may come, and takes nothing from it: it comes back, and sends its timers again.
    timers.unsubscribe(second, 103.0)
    timers.subscribe(RUN, "a", 50, 103.0, incarnation="first", lease_age=93.0)
    timers.subscribe(RUN, "a", 2, 104.0, incarnation="second", lease_age=4.0)


def test_a_late_subscription_does_not_become_the_newer_one() -> None:
    """Several subscriptions of an agent count from the earliest time, because messages can only be late."""
    timers = table()
    timers.subscribe(RUN, "a", 50, 100.0, incarnation="first", lease_age=90.0)
    timers.subscribe(RUN, "a", 50, 112.0, incarnation="first", lease_age=90.0)  # delivered after 12 s
    take_over(timers, 2, 113.0, "second", age=5.0)
    with pytest.raises(LeaseSuperseded):  # delivered after 12 s again, all while the service was paused
        timers.subscribe(RUN, "a", 50, 120.0, incarnation="first", lease_age=11.0)


def test_a_restarted_service_is_not_deceived_by_a_late_subscription() -> None:
    """After a restart, the agent of the ended incarnation seems younger until its second request."""
    timers = table()
    second = timers.subscribe(RUN, "a", 2, 100.0, incarnation="second", lease_age=2.0)
    with pytest.raises(TakeoverUnconfirmed):  # delivered after 3 s
        timers.subscribe(RUN, "a", 9, 104.0, incarnation="first", lease_age=4.0)
    with pytest.raises(LeaseSuperseded):
        timers.subscribe(RUN, "a", 9, 104.1, incarnation="first", lease_age=7.1)
    timers.register(second, "0@1", "s", 60.0, 105.0, sequence=1)
    third = take_over(timers, 2, 105.0, "third", age=0.1)
    timers.register(third, "0@1", "s", 60.0, 105.0, sequence=1)


def test_a_client_without_incarnations_is_judged_by_lease_numbers() -> None:
    """Clients of other authors, and of older versions, have no incarnation."""
    timers = table()
    timers.subscribe(RUN, "a", 3, 0.0)
    with pytest.raises(LeaseSuperseded):
        timers.subscribe(RUN, "a", 2, 1.0)
    newer = take_over(timers, 2, 2.0, "second")
    with pytest.raises(LeaseSuperseded):
        timers.subscribe(RUN, "a", 1, 3.0)
    timers.subscribe(RUN, "a", 2, 3.0)
    with pytest.raises(SubscriptionReplaced):
        timers.register(newer, "0@1", "s", 5.0, 3.0, sequence=1)


def test_timers_that_waited_for_their_agent_wait_for_its_first_incarnation() -> None:
    """A single call may come before the agent; only another incarnation of the run ends its timers."""
    timers = table()
    timers.acquire(TimerName(RUN, "a", "0@1", "s"), 5.0, 0.0, lease=1)
    timers.subscribe(RUN, "a", 2, 1.0, incarnation="first")
    assert len(timers) == 1


@pytest.mark.parametrize("age", [-1.0, float("nan"), float("inf")])
def test_an_age_that_makes_no_sense_is_refused(age: float) -> None:
    """It could not be compared with others."""
    with pytest.raises(InvalidField, match="lease_age"):
        table().subscribe(RUN, "a", 1, 0.0, incarnation="first", lease_age=age)


@pytest.mark.parametrize("after", [0.0, -1.0, float("nan"), float("inf"), MAX_AFTER * 2])
def test_a_duration_that_makes_no_sense_is_refused(after: float) -> None:
    """It leaves nothing behind, not even the node."""
    timers = table()
    with pytest.raises(InvalidField, match="after"):
        timers.acquire(TimerName(RUN, "a", "0@1", "s"), after, 0.0)
    assert len(timers._nodes) == 0


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
    """The limit counts bytes, not characters."""
    with pytest.raises(InvalidField):
        table().acquire(name, 1.0, 0.0)


def test_bounds() -> None:
    """Timers per node, timers in all, and nodes are limited; replacing a timer needs no room."""
    timers = table(max_timers_per_node=2, max_timers=3, max_nodes=2)

    def acquire(node: str, scope: str) -> None:
        timers.acquire(TimerName(RUN, node, "w", scope), 1.0, 0.0)

    acquire("a", "1")
    acquire("a", "2")
    acquire("a", "2")
    refused: list[TimerRefused] = []
    for node, scope in (("a", "3"), ("b", "1"), ("b", "2"), ("c", "1")):
        try:
            acquire(node, scope)
        except TooMany as error:
            refused.append(error)
    assert [error.limit for error in refused if isinstance(error, TooMany)] == [2, 3, 2]


def test_listing_goes_on_from_a_name() -> None:
    """All pages together are the whole list, filtered by run and node."""
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


def test_listing_by_state() -> None:
    """Expired timers are listed apart from running ones, and unclaimed ones apart from reported ones."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    timers.register(agent, "w", "told", 1.0, 0.0, sequence=1)
    timers.register(agent, "w", "counts", 60.0, 0.0, sequence=2)
    timers.register(agent, "w", "learns", 0.0, 0.0, sequence=3, learned_as="step")
    timers.acquire(TimerName(RUN, "b", "w", "waits"), 1.0, 0.0)
    timers.advance(1.0, due=1.0)

    def scopes(*states: TimerState) -> list[str]:
        return [view.name.scope for view in timers.timers(1.0, states=frozenset(states))]

    assert scopes(TimerState.OFFERED) == ["told"]
    assert scopes(TimerState.UNCLAIMED) == ["waits"]
    assert scopes(TimerState.COUNTING) == ["counts"]
    assert scopes(TimerState.LEARNING) == ["learns"]
    assert scopes(TimerState.OFFERED, TimerState.UNCLAIMED) == ["told", "waits"]
    assert scopes() == ["counts", "learns", "told", "waits"]


def test_clearing_a_worker_by_a_single_call() -> None:
    """It ends the worker's timers, expired or not, and no others; a caller with an old lease is refused."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 2, 0.0)
    timers.register(agent, "gone", "1", 1.0, 0.0, sequence=1)
    timers.register(agent, "gone", "2", 60.0, 0.0, sequence=2)
    timers.register(agent, "stays", "1", 60.0, 0.0, sequence=3)
    timers.advance(1.0, due=1.0)
    with pytest.raises(LeaseSuperseded):
        timers.clear_worker(RUN, "a", "gone", 1.0, lease=1)
    assert timers.clear_worker(RUN, "a", "gone", 1.0, lease=2) == 2
    assert timers.clear_worker(RUN, "a", "gone", 1.0) == 0
    assert timers.clear_worker(RUN, "nobody", "gone", 1.0) == 0
    assert [view.name.worker_id for view in timers.timers(1.0)] == ["stays"]


def test_single_calls_need_the_token_of_the_agent() -> None:
    """While the node is known, also when its agent is away; timers of others end when the agent subscribes."""
    timers, name = table(), TimerName(RUN, "a", "w", "s")
    timers.acquire(name, 1.0, 0.0)
    timers.advance(1.0, due=1.0)
    agent = timers.subscribe(RUN, "a", 1, 1.0, token=b"secret")
    assert timers.advance(2.0, due=2.0).expiries == []
    timers.register(agent, "w", "s", 60.0, 2.0, sequence=1)
    for token in (b"", b"another"):
        for call in (
            lambda token=token: timers.acquire(name, 1.0, 3.0, lease=2**63 - 1, token=token),
            lambda token=token: timers.release(name, 3.0, token=token),
            lambda token=token: timers.clear_worker(RUN, "a", "w", 3.0, token=token),
        ):
            with pytest.raises(NotTheAgent):
                call()
            timers.unsubscribe(agent, 3.0)
            with pytest.raises(NotTheAgent):
                call()
            agent = timers.subscribe(RUN, "a", 1, 3.0, token=b"secret")
    timers.acquire(TimerName(RUN, "a", "w", "own"), 60.0, 3.0, token=b"secret")
    timers.subscribe(RUN, "a", 1, 4.0, token=b"secret")
    assert [view.name.scope for view in timers.timers(4.0)] == ["own", "s"]
    timers.subscribe(RUN, "a", 2, 5.0, token=b"of the next lease")
    assert [view.name.scope for view in timers.timers(5.0)] == ["s"]


def test_an_agent_is_replaced_by_itself_or_by_one_of_its_name() -> None:
    """A stream with the same lease needs its token; where callers have names, a higher lease needs the name."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 1, 0.0, token=b"secret", identity="host-1")
    for lease, token, identity in ((1, b"", "host-1"), (2**63 - 1, b"secret", "host-2"), (2, b"", "")):
        with pytest.raises(NotTheAgent):
            timers.subscribe(RUN, "a", lease, 1.0, token=token, identity=identity)
    timers.register(agent, "w", "s", 60.0, 1.0, sequence=1)
    timers.subscribe(RUN, "a", 2, 2.0, token=b"next", identity="host-1")
    with pytest.raises(LeaseSuperseded):
        timers.register(agent, "w", "s", 60.0, 2.0, sequence=2)


def warm(timers: TimerTable, agent: Subscription, longest: float, count: int = 20) -> None:
    timers.observe(agent, "step", count, longest)


@pytest.mark.parametrize("account", ["observed", "brought by an agent", "kept in a file"])
def test_a_worker_that_hung_while_its_scope_was_learned_runs_out_at_once(account: str) -> None:
    """Any source can complete the warm-up; the deadline counts from the timer's start."""
    timers = table()
    hung, others = (timers.subscribe(RUN, node, 0, 0.0) for node in "ab")
    timers.register(hung, "w", "s", 0.0, 0.0, sequence=1, learned_as="step")
    warm(timers, others, 4.0, count=19)
    assert timers.advance(1000.0, due=1000.0).expiries == []
    if account == "observed":
        timers.observe(others, "step", 1, 4.0)
    elif account == "brought by an agent":
        timers.learn(others, "step", 20, 4.0)
    else:
        timers.restore(RUN, Learned("step", 20, 4.0), 1000.0)
    assert timers.next_wake(1000.0) == 1000.0
    (expiry,) = timers.advance(1000.0, due=1000.0).expiries
    assert (expiry.name.node_id, expiry.after, expiry.late_by) == ("a", 20.0, 980.0)
    assert expiry.learned == Learned("step", 20, 4.0)


def test_a_timer_released_just_as_the_warm_up_ends_does_not_expire() -> None:
    """Its release comes between the last completion that was needed and the watchdog's next wake-up."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    timers.register(agent, "w", "s", 0.0, 0.0, sequence=1, learned_as="step")
    timers.register(agent, "v", "s", 0.0, 0.0, sequence=2, learned_as="step")
    timers.observe(agent, "step", 20, 4.0)
    timers.end(agent, "w", "s")
    timers.register(agent, "v", "s", 0.0, 1000.0, sequence=3, learned_as="step")
    assert timers.advance(1000.0, due=1000.0).expiries == []
    assert [expiry.sequence for expiry in timers.advance(1020.0, due=1020.0).expiries] == [3]


def test_a_longer_completion_moves_the_deadlines_of_all_that_run() -> None:
    """A running timer follows the new timeout, not the one that it began with."""
    timers = table()
    slow, others = (timers.subscribe(RUN, node, 0, 0.0) for node in "ab")
    warm(timers, others, 4.0)
    timers.register(slow, "w", "s", 0.0, 0.0, sequence=1, learned_as="step")
    assert timers.advance(19.0, due=19.0).expiries == []
    timers.observe(others, "step", 1, 10.0)
    assert timers.advance(49.875, due=49.875).expiries == []
    assert [view.remaining for view in timers.timers(49.875, node_id="a")] == [0.125]
    (expiry,) = timers.advance(50.0, due=50.0).expiries
    assert (expiry.after, expiry.late_by) == (50.0, 0.0)


def test_a_repeated_expiry_keeps_its_timeout_and_learned_data() -> None:
    """Later completions and forgetting don't change it: the report must not contradict itself."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    warm(timers, agent, 4.0)
    timers.register(agent, "w", "s", 0.0, 0.0, sequence=1, learned_as="step")
    (first,) = timers.advance(20.0, due=20.0).expiries
    warm(timers, agent, 100.0)
    timers.forget_scopes(RUN, "")
    warm(timers, agent, 1.0)
    assert timers.advance(24.875, due=24.875).expiries == [], "told again before its time"
    (again,) = timers.advance(25.0, due=25.0).expiries
    assert (again.after, again.learned) == (first.after, first.learned) == (20.0, Learned("step", 20, 4.0))


def test_running_timers_learn_again_after_forgetting() -> None:
    """Neither the forgotten completions nor the former deadline count, be they longer or shorter."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    warm(timers, agent, 100.0)
    timers.register(agent, "w", "s", 0.0, 0.0, sequence=1, learned_as="step")
    assert timers.forget_scopes(RUN, "step") == 1
    assert [view.state for view in timers.timers(0.0)] == [TimerState.LEARNING]
    assert timers.advance(600.0, due=600.0).expiries == []
    timers.register(agent, "w", "s", 0.0, 600.0, sequence=2, learned_as="step")
    warm(timers, agent, 4.0)
    assert timers.advance(619.875, due=619.875).expiries == []
    (expiry,) = timers.advance(620.0, due=620.0).expiries
    assert expiry.after == 20.0


def test_runs_learn_apart() -> None:
    """A scope of the same name in another run is another scope."""
    timers = table()
    agent, other = timers.subscribe(RUN, "a", 0, 0.0), timers.subscribe("other", "a", 0, 0.0)
    warm(timers, agent, 4.0)
    timers.register(other, "w", "s", 0.0, 0.0, sequence=1, learned_as="step")
    assert [view.state for view in timers.timers(0.0)] == [TimerState.LEARNING]


def test_a_flood_that_is_learned_at_once_is_given_its_deadlines_in_portions() -> None:
    """The event loop is not blocked; each expires once."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    for number in range(5000):
        timers.register(agent, f"w{number}", "s", 0.0, 0.0, sequence=number + 1, learned_as="step")
    warm(timers, agent, 1.0)
    told: list[int] = []
    while timers.next_wake(100.0) == 100.0:
        expiries = timers.advance(100.0, due=100.0).expiries
        assert len(expiries) <= 2000
        told += [expiry.sequence for expiry in expiries]
    assert sorted(told) == list(range(1, 5001))


@pytest.mark.parametrize(
    ("after", "learned_as", "field"),
    [(1.0, "step", "after"), (0.0, "", "after"), (0.0, "s" * 513, "learned_as"), (-1.0, "step", "after")],
)
def test_a_timer_has_a_duration_or_learns_it(after: float, learned_as: str, field: str) -> None:
    """Both and neither are refused; a refused request leaves the timer of that name unchanged."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    timers.register(agent, "w", "s", 60.0, 0.0, sequence=1)
    with pytest.raises(InvalidField) as refusal:
        timers.register(agent, "w", "s", after, 0.0, sequence=2, learned_as=learned_as)
    assert refusal.value.field == field
    assert [view.after for view in timers.timers(0.0)] == [60.0]
    assert list(timers.scopes()) == []


@pytest.mark.parametrize(
    ("scope", "count", "longest", "field"),
    [
        ("", 1, 1.0, "scope"),
        ("s" * 513, 1, 1.0, "scope"),
        ("s", 0, 1.0, "count"),
        ("s", 1, -1.0, "longest"),
        ("s", 1, float("nan"), "longest"),
        ("s", 1, float("inf"), "longest"),
        ("s", 1, MAX_AFTER * 2, "longest"),
    ],
)
def test_an_impossible_observation_is_refused(scope: str, count: int, longest: float, field: str) -> None:
    """They are refused from an agent's observation, from its memory, and from a file."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    brought: list[Callable[[], None]] = [
        lambda: timers.observe(agent, scope, count, longest),
        lambda: timers.learn(agent, scope, count, longest),
        lambda: timers.restore(RUN, Learned(scope, count, longest), 0.0),
    ]
    for bring in brought:
        with pytest.raises(InvalidField) as refusal:
            bring()
        assert refusal.value.field == field
    assert list(timers.scopes()) == []


@pytest.mark.parametrize("elapsed", [-1.0, float("nan"), float("inf")])
def test_time_that_can_not_have_passed_is_refused(elapsed: float) -> None:
    """It is refused on a stream and in a single call."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    with pytest.raises(InvalidField, match="elapsed"):
        timers.register(agent, "w", "s", 1.0, 0.0, sequence=1, elapsed=elapsed)
    with pytest.raises(InvalidField, match="elapsed"):
        timers.acquire(TimerName(RUN, "a", "w", "s"), 1.0, 0.0, elapsed=elapsed)


def test_one_scope_too_many_is_refused_and_the_timer_of_that_name_goes_on() -> None:
    """Numbered scope names fill only the data of their own run."""
    timers = table(max_scopes_per_run=2)
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    for number in range(2):
        timers.register(agent, "w", f"{number}", 0.0, 0.0, sequence=number + 1, learned_as=f"step {number}")
    with pytest.raises(TooMany):
        timers.register(agent, "w", "1", 0.0, 0.0, sequence=3, learned_as="step 2")
    assert [view.learned_as for view in timers.timers(0.0)] == ["step 0", "step 1"]
    timers.end(agent, "w", "0")
    timers.register(agent, "w", "1", 0.0, 0.0, sequence=4, learned_as="step 2")
    assert [view.learned_as for view in timers.timers(0.0)] == ["step 2"]


def test_a_single_call_with_a_newer_lease_supersedes_the_stream() -> None:
    """The holder of that lease acts for the node now, by a stream or by single calls."""
    timers = table()
    agent = timers.subscribe(RUN, "a", 1, 0.0)
    timers.acquire(TimerName(RUN, "a", "w", "s"), 60.0, 0.0, lease=2)
    with pytest.raises(LeaseSuperseded) as refusal:
        timers.end(agent, "w", "s")
    assert refusal.value.current == 2
    assert len(timers) == 1


def test_completions_on_a_replaced_stream_are_refused() -> None:
    """Completions sent on a replaced stream may be counted on the newer one."""
    timers = table()
    stale = timers.subscribe(RUN, "a", 0, 0.0)
    timers.subscribe(RUN, "a", 0, 0.0)
    with pytest.raises(SubscriptionReplaced):
        timers.observe(stale, "step", 1, 1.0)
    with pytest.raises(SubscriptionReplaced):
        timers.learn(stale, "step", 1, 1.0)
    assert timers.learned_of(RUN) == []


def test_learned_data_outlives_the_nodes_of_its_run_for_a_while() -> None:
    """A restarted job need not learn again; after that time the watchdog has nothing to wake for."""
    timers = table(learned_retention=1000.0)
    agent = timers.subscribe(RUN, "a", 0, 0.0)
    warm(timers, agent, 4.0)
    timers.unsubscribe(agent, 100.0)
    assert timers.next_wake(100.0) == 1100.0
    timers.advance(1099.0, due=1099.0)
    assert timers.learned_of(RUN) == [Learned("step", 20, 4.0)]
    timers.advance(1100.0, due=1100.0)
    assert timers.learned_of(RUN) == []
    assert timers.next_wake(1100.0) is None
