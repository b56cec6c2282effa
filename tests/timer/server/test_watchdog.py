"""The watchdog wakes in time after any failure, and reports to the right agents."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rallypoint.timer.core.progress import Stall
from rallypoint.timer.core.values import Learned, Subscription, SubscriptionReplaced, TimerName, TimerSettings
from rallypoint.timer.server.outbox import MOST_LEARNED, Outbox, OutboxBatch
from rallypoint.timer.server.watchdog import Watchdog
from support.clock import Clock
from support.replacing import instead_of
from support.waiting import until

NAME = TimerName("run", "a", "0@1", "s")


async def batch_of(mailbox: Outbox) -> OutboxBatch:
    batch = await mailbox.take()
    assert batch is not None
    return batch


def pass_time(watchdog: Watchdog, clock: Clock, seconds: float) -> None:
    """Let time pass, and wake the watchdog whenever it is due."""
    end = clock.now + seconds
    while watchdog._due <= end:
        clock.now = max(clock.now, watchdog._due)
        watchdog.ring()
    clock.now = end


async def test_it_wakes_by_itself_at_the_deadline_and_not_before() -> None:
    """It uses the event loop's clock."""
    watchdog = Watchdog()
    _, mailbox = watchdog.subscribe("run", "a", 0)
    began = watchdog.now()
    watchdog.table.acquire(NAME, 0.05, began)
    watchdog.arm()
    assert (await batch_of(mailbox)).expiries[0].name == NAME
    assert watchdog.now() - began >= 0.05 - 1e-6
    watchdog.drain()


async def test_an_earlier_deadline_moves_the_alarm() -> None:
    """A timer of a minute does not delay a timer of a moment, which expires before the pulse."""
    watchdog = Watchdog()
    _, mailbox = watchdog.subscribe("run", "a", 0)
    watchdog.table.acquire(NAME, 60, watchdog.now())
    watchdog.arm()
    late = watchdog._due
    watchdog.table.acquire(NAME._replace(scope="soon"), 0.001, watchdog.now())
    watchdog.arm()
    assert watchdog._due < late
    assert (await batch_of(mailbox)).expiries[0].name.scope == "soon"
    watchdog.drain()


async def test_a_pause_is_logged_and_kills_no_worker(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The alarm rings 20 s late, with a release in the socket: all deadlines move, and this is logged."""
    watchdog = Watchdog(clock=clock)
    subscription, mailbox = watchdog.subscribe("run", "a", 0)
    watchdog.table.register(subscription, "0@1", "s", 5.0, clock(), sequence=1)
    watchdog.arm()
    clock.now += 20
    watchdog.ring()
    watchdog.table.end(subscription, "0@1", "s")
    assert "deadlines moved" in caplog.text
    clock.now += 0.25
    watchdog.ring()
    assert not mailbox._expiries
    watchdog.drain()


async def test_a_failure_does_not_stop_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that occurs once costs one wake-up, not the watchdog."""
    watchdog = Watchdog()
    _, mailbox = watchdog.subscribe("run", "a", 0)
    failed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))

    @instead_of(monkeypatch, watchdog.table, "advance")
    def fail_once(advance: Any, now: float, due: float) -> object:
        if not failed:
            raise RuntimeError("bug")
        return advance(now, due)

    watchdog.table.acquire(NAME, 0.001, watchdog.now())
    watchdog.arm()
    assert await mailbox.take() is not None
    assert len(failed) == 1
    watchdog.drain()


async def test_a_watchdog_without_timers_sleeps() -> None:
    """It has no alarm and no pulse."""
    watchdog = Watchdog()
    subscription, _ = watchdog.subscribe("run", "a", 0)
    watchdog.arm()
    assert watchdog._alarm is None
    watchdog.table.register(subscription, "0@1", "s", 60, watchdog.now(), sequence=1)
    watchdog.arm()
    assert watchdog._alarm is not None
    watchdog.table.end(subscription, "0@1", "s")
    await until(lambda: watchdog._alarm is None)


def standing(watchdog: Watchdog, node_id: str = "a", step: int = 7) -> tuple[Subscription, Outbox]:
    """Subscribe a node with one worker, which has just reached a step."""
    subscription, mailbox = watchdog.subscribe("run", node_id, 0)
    watchdog.report_progress(subscription, "0@1", rank=0, step=step, elapsed=0)
    watchdog.registered(subscription)
    watchdog.arm()
    return subscription, mailbox


async def test_a_stall_is_sent_to_all_agents_of_the_run_and_logged_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the worker that stopped first; no other run gets it. The same holds for its end."""
    caplog.set_level("INFO")
    watchdog = Watchdog(TimerSettings(stall_after=60), clock)
    (a, first), (_, second) = standing(watchdog, "a"), standing(watchdog, "b", step=8)
    _, foreign = watchdog.subscribe("other", "a", 0)
    pass_time(watchdog, clock, 200)
    assert caplog.text.count("the run is stalled") == 1
    assert "node_id='a' worker_id='0@1' rank=0 step=7 idle=60" in caplog.text
    for mailbox in (first, second):
        stall = (await batch_of(mailbox)).stall
        assert stall is not None
        assert (stall.over, stall.first.node_id, stall.workers, stall.at_same_step) == (False, "a", 2, 1)
    watchdog.report_progress(a, "0@1", rank=0, step=8, elapsed=0)
    watchdog.arm()
    assert caplog.text.count("the run is no longer stalled") == 1
    for mailbox in (first, second):
        stall = (await batch_of(mailbox)).stall
        assert stall is not None
        assert (stall.over, round(stall.idle)) == (True, 200)
    assert not foreign._changed.is_set()
    watchdog.drain()


async def test_a_subscriber_during_a_stall_receives_it(clock: Clock) -> None:
    """The stream that received it first may have broken before."""
    watchdog = Watchdog(TimerSettings(stall_after=60), clock)
    standing(watchdog)
    pass_time(watchdog, clock, 70)
    _, later = watchdog.subscribe("run", "b", 0)
    stall = (await batch_of(later)).stall
    assert isinstance(stall, Stall)
    assert round(stall.idle) == 70
    watchdog.drain()


async def test_a_pause_of_the_watchdog_is_not_reported_as_a_stall(clock: Clock) -> None:
    """The time in which it did not watch doesn't count, also if only progress is watched."""
    watchdog = Watchdog(TimerSettings(stall_after=60), clock)
    _, mailbox = standing(watchdog)
    pass_time(watchdog, clock, 30)
    clock.now += 3600
    watchdog.ring()
    pass_time(watchdog, clock, 25)
    assert not mailbox._changed.is_set()
    pass_time(watchdog, clock, 15)
    assert mailbox._changed.is_set()
    watchdog.drain()


async def test_a_stall_is_noticed_by_itself() -> None:
    """It uses the event loop's clock; no timer would wake it."""
    watchdog = Watchdog(TimerSettings(stall_after=0.05))
    _, mailbox = standing(watchdog)
    assert (await batch_of(mailbox)).stall is not None
    watchdog.drain()


async def test_progress_on_an_older_stream_is_refused(clock: Clock) -> None:
    """Its reports are outdated."""
    watchdog = Watchdog(clock=clock)
    older, _ = standing(watchdog)
    standing(watchdog, step=9)
    with pytest.raises(SubscriptionReplaced):
        watchdog.report_progress(older, "0@1", rank=0, step=8, elapsed=0)
    watchdog.unsubscribe(older)
    assert watchdog.progress_of("run", 1).lowest_step == 9
    watchdog.drain()


async def test_workers_that_are_gone_have_no_progress(clock: Clock) -> None:
    """An agent or a single call clears them, or the agent's next stream does not name them."""
    watchdog = Watchdog(clock=clock)
    subscription, _ = standing(watchdog)
    for worker in ("1@1", "2@1"):
        watchdog.report_progress(subscription, worker, rank=1, step=8, elapsed=0)
    watchdog.clear(subscription, "0@1")
    watchdog.clear_worker("run", "a", "1@1", None, b"")
    assert watchdog.progress_of("run", 1).workers == 1
    again, _ = watchdog.subscribe("run", "a", 0)
    watchdog.registered(again)
    assert watchdog.progress_of("run", 1).workers == 0
    watchdog.drain()


async def test_learned_data_is_sent_to_all_agents_of_the_run(clock: Clock) -> None:
    """Present and later agents get it when there are enough completions, and on forgetting; no other run does."""
    watchdog = Watchdog(TimerSettings(learn_warm_up=3), clock)
    heard: list[bool] = []
    watchdog.on_learned = heard.append
    subscription, one = watchdog.subscribe("run", "a", 0)
    _, two = watchdog.subscribe("run", "b", 0)
    _, foreign = watchdog.subscribe("other", "a", 0)
    watchdog.observe(subscription, "step", 5, 2.0)
    watchdog.arm()
    _, late = watchdog.subscribe("run", "c", 0)
    for mailbox in (one, two, late):
        assert (await batch_of(mailbox)).learned == [Learned("step", 5, 2.0)]
    assert watchdog.forget_scopes("run", "step") == 1
    watchdog.arm()
    for mailbox in (one, two, late):
        assert (await batch_of(mailbox)).learned == [Learned("step", 0, 0.0)]
    assert not foreign._changed.is_set()
    assert heard == [False, True]
    watchdog.drain()


async def test_completions_sent_before_the_agent_forgot_are_not_counted(clock: Clock) -> None:
    """It contains the old longest, and was on the way when the agent was notified to forget."""
    watchdog = Watchdog(TimerSettings(learn_warm_up=3), clock)
    slow, _ = watchdog.subscribe("run", "slow", 0)
    quick, _ = watchdog.subscribe("run", "quick", 0)
    watchdog.observe(slow, "step", 5, 60.0)
    watchdog.forget_scopes("run", "step")
    watchdog.has_forgotten(quick, "step")
    watchdog.observe(slow, "step", 5, 60.0)
    watchdog.learn(slow, "step", 5, 60.0)
    watchdog.observe(slow, "save", 1, 7.0)
    watchdog.observe(quick, "step", 1, 2.0)
    assert watchdog.table.learned_of("run") == [Learned("save", 1, 7.0), Learned("step", 1, 2.0)]
    watchdog.has_forgotten(slow, "step")
    watchdog.observe(slow, "step", 1, 3.0)
    assert watchdog.table.learned_of("run")[-1] == Learned("step", 2, 3.0)
    watchdog.forget_scopes("run", "step")
    again, _ = watchdog.subscribe("run", "slow", 0)
    watchdog.observe(again, "step", 1, 4.0)
    assert watchdog.table.learned_of("run")[-1] == Learned("step", 1, 4.0), (
        "nobody is waited for on another stream"
    )
    watchdog.drain()


async def test_an_agent_that_never_forgets_is_waited_for_in_bounded_memory(clock: Clock) -> None:
    """A client that learns and forgets scopes of other names for ever must not fill the memory of the service."""
    watchdog = Watchdog(TimerSettings(learn_warm_up=3), clock)
    subscription, _ = watchdog.subscribe("run", "a", 0)

    def learn_and_forget(scope: str) -> None:
        watchdog.observe(subscription, scope, 1, 1.0)
        watchdog.forget_scopes("run", scope)

    for number in range(MOST_LEARNED):
        learn_and_forget(f"s{number}")
    watchdog.observe(subscription, "s0", 1, 1.0)
    assert watchdog.table.learned_of("run") == [], (
        "its observations of what it was asked to forget may be old"
    )
    learn_and_forget("one more")
    watchdog.observe(subscription, "s0", 1, 1.0)
    watchdog.observe(subscription, "s1", 1, 1.0)
    assert watchdog.table.learned_of("run") == [Learned("s0", 1, 1.0)], "only the oldest is not waited for"
    watchdog.drain()


async def test_scopes_beyond_the_limit_are_dropped_and_logged_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that numbers its scopes creates any number of them."""
    watchdog = Watchdog(TimerSettings(max_scopes_per_run=2), clock)
    subscription, _ = watchdog.subscribe("run", "a", 0)
    for number in range(100):
        watchdog.observe(subscription, f"s{number}", 1, 1.0)
        watchdog.learn(subscription, f"t{number}", 1, 1.0)
    assert caplog.text.count("a limit is reached") == 1
    assert len(watchdog.table.learned_of("run")) == 2
    watchdog.drain()
