"""Completions, progress of workers, and the service's replies to both, on the agent's stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint.rpc.clock import LagSettings
from rallypoint.rpc.durations import to_duration
from rallypoint.timer.client.client import ClientSettings, ExpiredTimer, NodeTimers
from rallypoint.timer.core.values import TimerSettings
from rallypoint.timer.v1 import timer_service_pb2 as pb
from support.clock import Clock
from support.waiting import until
from timer.conftest import Service
from timer.scripted import Scripted, listen, serving

pytestmark = pytest.mark.integration

SETTINGS = ClientSettings(
    linger=0.001, back_off=0.01, back_off_most=0.05, attempt_timeout=5.0, lag=LagSettings(tolerance=1e9)
)


class Node:
    """A client, and the events that it delivered."""

    def __init__(self, channel: Any, clock: Callable[[], float], stall_after: float | None = None) -> None:
        self.client = NodeTimers(
            channel,
            run_id="run",
            node_id="a",
            stall_after=stall_after,
            settings=SETTINGS,
            clock=clock,
            jitter=lambda: 0.0,
        )
        self.expired: list[ExpiredTimer] = []
        self.forgotten: list[str] = []
        self.client.start(self.deal, self.forgotten.append)

    async def deal(self, expired: ExpiredTimer) -> None:
        """Record the expiry."""
        self.expired.append(expired)


def event(**what: Any) -> pb.SuperviseEvent:
    """Return an event of the service."""
    return pb.SuperviseEvent(**what)


def kinds(actions: list[pb.SuperviseAction]) -> list[str | None]:
    """Return the kind of each action."""
    return [action.WhichOneof("action") for action in actions]


async def test_completions_steps_and_timers_that_learn_are_sent(tmp_path: Path, clock: Clock) -> None:
    """The client sends how long scopes took, the steps of workers, and which timers learn."""

    async def stream(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        yield event(subscribed=pb.Subscribed())
        await listen(script, requests, 7)

    script = Scripted(stream)
    async with serving(script, tmp_path) as channel:
        node = Node(channel, clock, stall_after=90.0)
        node.client.acquire("0@1", "s~2", 0.0, clock.now - 3, "s")
        node.client.acquire("0@1", "t", 0.0, clock.now - 2, "t")
        node.client.complete("0@1", "t")
        node.client.observe("s", 4, 1.5)
        node.client.observe("s", 1, 2.5)
        node.client.progress("0@1", 6, 1000, clock.now - 1)
        await until(lambda: len(script.seen) == 1 and len(script.seen[0]) >= 6)
        assert script.seen[0][:6] == [
            pb.SuperviseAction(
                subscribe=pb.Subscribe(run_id="run", node_id="a", stall_after=to_duration(90.0))
            ),
            pb.SuperviseAction(
                acquire=pb.Acquire(
                    worker_id="0@1", scope="s~2", elapsed=to_duration(3.0), sequence=1, learned_as="s"
                )
            ),
            pb.SuperviseAction(
                progress=pb.Progress(worker_id="0@1", rank=6, step=1000, elapsed=to_duration(1.0))
            ),
            pb.SuperviseAction(observe=pb.Observe(scope="t", count=1, longest=to_duration(2.0))),
            pb.SuperviseAction(observe=pb.Observe(scope="s", count=5, longest=to_duration(2.5))),
            pb.SuperviseAction(registered=pb.Registered()),
        ]
        await node.client.close(grace=0)


async def test_learned_data_is_brought_to_the_next_service(tmp_path: Path, clock: Clock) -> None:
    """It is sent before the timers and `registered`, without scopes that the service has forgotten."""

    async def first(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        await listen(script, requests, 2)
        yield event(subscribed=pb.Subscribed())
        for scope in ("s", "t"):
            yield event(learned=pb.Learned(scope=scope, count=40, longest=to_duration(2.5)))
        yield event(learned=pb.Learned(scope="t"))

    async def second(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        await listen(script, requests, 4)
        yield event(subscribed=pb.Subscribed())
        await listen(script, requests, 5)

    script = Scripted(first, second)
    async with serving(script, tmp_path) as channel:
        node = Node(channel, clock)
        node.client.progress("0@1", 6, 1, clock.now)
        await until(lambda: len(script.seen) == 2 and len(script.seen[1]) == 4)
        assert kinds(script.seen[1]) == ["subscribe", "learned", "progress", "registered"]
        assert script.seen[1][1].learned == pb.Learned(scope="s", count=40, longest=to_duration(2.5))
        assert node.forgotten == ["t"]
        await node.client.close(grace=0)


async def test_a_learned_expiry_has_its_timeout_and_its_count(tmp_path: Path, clock: Clock) -> None:
    """The agent uses the timeout that the service reports, because it knows none."""

    async def stream(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        await listen(script, requests, 3)
        yield event(subscribed=pb.Subscribed())
        acquire = script.seen[-1][1].acquire
        for after in (9.5, 7.5):
            yield event(
                expired=pb.Expired(
                    expiry_id=int(after),
                    worker_id="0@1",
                    scope="s",
                    after=to_duration(after),
                    sequence=acquire.sequence,
                    learned=pb.Learned(scope="s", count=30, longest=to_duration(2.5)),
                )
            )
            if after == 9.5:
                await listen(script, requests, 5)
                acquire = script.seen[-1][4].acquire
        await listen(script, requests, 6)

    script = Scripted(stream)
    async with serving(script, tmp_path) as channel:
        node = Node(channel, clock)
        node.client.acquire("0@1", "s", 0.0, clock.now - 8, "s")
        await until(lambda: bool(node.expired))
        (expired,) = node.expired
        assert (expired.after, expired.learned_from) == (7.5, 30)
        # The longer timeout had not expired by this agent's own clock.
        assert kinds(script.seen[0][3:5]) == ["acknowledge", "acquire"]
        assert script.seen[0][4].acquire.learned_as == "s"
        await node.client.close(grace=0)


async def test_a_run_that_stalls_is_in_the_agents_log(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the first worker that stopped, where and when; and the end of the stall."""

    async def stream(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        yield event(subscribed=pb.Subscribed())
        first = pb.WorkerProgress(
            node_id="node7", worker_id="3@1", rank=59, step=120, idle=to_duration(61.25)
        )
        stalled = pb.Stalled(idle=to_duration(60.0), first=first, workers=64, at_same_step=2)
        yield event(stalled=stalled)
        yield event(stalled=pb.Stalled(over=True, idle=to_duration(75.0)))
        await listen(script, requests, 100)

    script = Scripted(stream)
    with caplog.at_level("INFO"):
        async with serving(script, tmp_path) as channel:
            node = Node(channel, clock)
            await until(lambda: "advance again" in caplog.text)
            await node.client.close(grace=0)
    (told,) = [record for record in caplog.records if "no worker of the run advances" in record.getMessage()]
    assert told.levelname == "WARNING"
    for what in ("node7", "59", "120", "61.2", "60.0", "64"):
        assert what in told.getMessage()


async def test_refused_timers_are_logged_once_for_each_worker_and_reason(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A full service refuses thousands of timers of a busy worker a second. A new stream is logged again."""

    async def stream(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        yield event(subscribed=pb.Subscribed())
        for number in range(100):
            for reason in ("TOO_MANY_TIMERS", "INVALID_ARGUMENT"):
                for worker in ("0@1", "1@1"):
                    yield event(refused=pb.Refused(worker_id=worker, scope=f"s{number}", reason=reason))
        if len(script.seen) > 1:
            await listen(script, requests, 100)

    script = Scripted(stream)
    async with serving(script, tmp_path) as channel:
        node = Node(channel, clock)
        await until(lambda: caplog.text.count("the service refused timers of a worker") == 8)
        await node.client.close(grace=0)
    assert "s0" in caplog.text
    assert "s1" not in caplog.text


async def scopes(service: Service) -> dict[str, int]:
    """Return the scopes that the service has learned, with their numbers of completions."""
    answer: pb.ListScopesResponse = await service.stub().ListScopes(pb.ListScopesRequest())
    return {scope.scope: scope.count for scope in answer.scopes if scope.count}


async def test_a_hang_is_found_by_a_learned_timeout(service: Service) -> None:
    """It is not found before enough completions; a restarted service gets its data from the agents."""
    settings = TimerSettings(learn_warm_up=3, learn_factor=2.0, learn_least=0.05)
    await service.server.stop()
    await service.start(settings)
    node = Node(service.channel(), time.monotonic)
    node.client.acquire("0@1", "s", 0.0, learned_as="s")
    node.client.observe("s", 2, 0.01)
    await until(lambda: len(service.watchdog.table) == 1)
    assert node.expired == []
    node.client.observe("s", 1, 0.1)
    await until(lambda: len(node.expired) == 1)
    (expired,) = node.expired
    assert (expired.scope, expired.learned_from) == ("s", 3)
    assert expired.after == pytest.approx(0.2)
    await until(lambda: len(service.watchdog.table) == 0)
    await until(lambda: bool(node.client._mirror._learned))

    await service.server.stop()
    await service.start(settings)
    node.client.acquire("0@1", "again", 0.0, learned_as="s")
    await until(lambda: len(node.expired) == 2)
    assert await scopes(service) == {"s": 3}

    await service.stub().ForgetScopes(pb.ForgetScopesRequest(run_id="run", scope="s"))
    await until(lambda: node.forgotten == ["s"])
    await service.server.stop()
    await service.start(settings)
    await until(lambda: node.client._subscribed)
    assert await scopes(service) == {}
    await node.client.close()


async def test_progress_is_brought_to_the_next_service(service: Service) -> None:
    """The client sends it with the time at which it was reached, under the worker's rank."""
    node = Node(service.channel(), time.monotonic)
    node.client.progress("0@1", 6, 1000, time.monotonic() - 100)
    for _ in range(2):
        await until(lambda: node.client._subscribed)
        answer = pb.GetProgressResponse()
        while not answer.slowest:
            answer = await service.stub().GetProgress(pb.GetProgressRequest(run_id="run"))
        (worker,) = answer.slowest
        assert (worker.node_id, worker.worker_id, worker.rank, worker.step) == ("a", "0@1", 6, 1000)
        assert 100 <= worker.idle.seconds < 160
        await service.server.stop()
        await until(lambda: not node.client._subscribed)
        await service.start()
    await node.client.close()
