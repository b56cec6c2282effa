"""The agent's client keeps the service up to date with the workers' timers, across all failures between them."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.clock import LagSettings
from rallypoint.rpc.durations import to_duration
from rallypoint.timer.client.client import ClientSettings, ExpiredTimer, NodeTimers
from rallypoint.timer.core.values import TimerSettings
from rallypoint.timer.v1 import timer_service_pb2 as pb
from support.clock import Clock
from support.waiting import PATIENCE, until
from timer.conftest import Service
from timer.scripted import Scripted, listen, serving

pytestmark = pytest.mark.integration

# A test's own clock jumps; that does not count as a pause of the agent, unless the test sets another tolerance.
SETTINGS = ClientSettings(
    linger=0.001, back_off=0.01, back_off_most=0.05, attempt_timeout=0.1, lag=LagSettings(tolerance=1e9)
)


class Node:
    """A client, and the events that it delivered."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        lease: int = 0,
        clock: Callable[[], float] = time.monotonic,
        incarnation: str = "",
        settings: ClientSettings = SETTINGS,
    ) -> None:
        self.client = NodeTimers(
            channel,
            run_id="run",
            node_id="a",
            lease=lease,
            incarnation=incarnation,
            settings=settings,
            clock=clock,
            jitter=lambda: 0.5,
        )
        self.expired: list[ExpiredTimer] = []
        self.answer: bool | Exception | None = None
        self.troubles: list[str] = []
        self.client.on_trouble = self.troubles.append
        self.client.start(self.deal)

    async def deal(self, expired: ExpiredTimer) -> bool | None:
        self.expired.append(expired)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def remaining(service: Service, clock: Callable[[], float]) -> dict[str, float]:
    views = service.watchdog.table.timers(clock())
    return {view.name.scope: view.remaining for view in views if view.remaining is not None}


@pytest.fixture
async def node(service: Service) -> AsyncIterator[Node]:
    node = Node(service.channel())
    yield node
    await node.client.close(grace=0)


async def test_an_expired_timer_is_reported_once_and_removed(service: Service, node: Node) -> None:
    """A timer is acquired, expires, is handled, and is acknowledged."""
    node.client.acquire("0@1", "s", 0.05)
    await until(lambda: len(node.expired) == 1)
    (expired,) = node.expired
    assert (expired.worker_id, expired.scope, expired.after) == ("0@1", "s", 0.05)
    assert expired.late_by >= 0
    await until(lambda: len(service.watchdog.table) == 0)
    assert not node.client.holds(expired)


async def test_a_released_timer_is_not_reported(service: Service, clock: Clock) -> None:
    """Neither a released timer, nor a cleared one, nor one that was renewed in time is reported."""
    await service.server.stop()
    await service.start(TimerSettings(lag=LagSettings(tolerance=1e9)), clock)
    node = Node(service.channel(), clock=clock)
    for scope in ("released", "again"):
        node.client.acquire("0@1", scope, 10)
    node.client.acquire("1@1", "cleared", 10)
    await until(lambda: len(service.watchdog.table) == 3)
    node.client.release("0@1", "released")
    node.client.acquire("0@1", "again", 60)
    node.client.clear("1@1")
    node.client.acquire("2@1", "late", 15)
    await until(lambda: remaining(service, clock) == {"again": 60, "late": 15})
    clock.now += 20
    service.watchdog.ring()
    await until(lambda: len(node.expired) == 1)
    assert node.expired[0].scope == "late"
    await until(lambda: list(remaining(service, clock)) == ["again"])
    await node.client.close()


async def test_a_restarted_service_receives_all_timers_with_their_elapsed_time(
    service: Service, clock: Clock
) -> None:
    """Exact, because both clocks stand still during the checks."""
    await service.server.stop()
    await service.start(clock=clock)
    node = Node(service.channel(), clock=clock)
    node.client.acquire("0@1", "long", 60.0)
    clock.now += 10
    node.client.acquire("0@1", "short", 20.0)
    await until(lambda: len(service.watchdog.table) == 2)
    assert remaining(service, clock) == {"long": pytest.approx(50), "short": pytest.approx(20)}
    await service.server.stop()
    clock.now += 5
    node.client.release("0@1", "short")
    node.client.acquire("0@1", "meanwhile", 3.0)
    clock.now += 5
    await service.start(clock=clock)
    await until(lambda: len(node.expired) == 1)
    assert node.expired[0].scope == "meanwhile"
    assert node.expired[0].late_by == pytest.approx(2)
    await until(lambda: len(service.watchdog.table) == 1)
    assert remaining(service, clock) == {"long": pytest.approx(40)}
    await node.client.close()


async def test_a_deadline_survives_the_kill_of_the_service(tmp_path: Path) -> None:
    """A real process is SIGKILLed and started again: a timer registered before expires at its deadline."""
    address = f"unix:{tmp_path / 'timer'}"

    async def serve() -> asyncio.subprocess.Process:
        script = (
            "from rallypoint.rpc import loop; from rallypoint.serving.server import Server, ServerOptions\n"
            "from rallypoint.timer.server.service import timer_registration, translate\n"
            "async def main():\n"
            f"    server = Server(ServerOptions(host={address!r}), services=[timer_registration()],"
            " translate=translate)\n"
            "    await server.start()\n"
            "    print('ready', flush=True)\n"
            "    await server.serve_until_signal()\n"
            "loop.run(main())\n"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        return process

    async with open_channel(address) as channel:
        process = await serve()
        node = Node(channel)
        began = time.monotonic()
        node.client.acquire("0@1", "s", 3.0)
        await until(lambda: node.client._subscribed)
        process.kill()
        await process.communicate()
        process = await serve()
        await until(lambda: bool(node.expired))
        assert time.monotonic() - began >= 3.0
        (expired,) = node.expired
        assert expired.after == 3.0
        await node.client.close()
        process.send_signal(signal.SIGTERM)
        await process.communicate()


async def test_an_unhandled_expiry_is_reported_again(service: Service) -> None:
    """It is reported until the handler has dealt with it."""
    await service.server.stop()
    await service.start(TimerSettings(reoffer_interval=0.05))
    node = Node(service.channel())
    node.answer = False
    node.client.acquire("0@1", "s", 0.01)
    await until(lambda: len(node.expired) >= 2)
    assert len(service.watchdog.table) == 1
    node.answer = None
    await until(lambda: len(service.watchdog.table) == 0)
    await node.client.close()


async def test_an_expiry_whose_handler_raises_counts_as_handled(service: Service, node: Node) -> None:
    """The expiry is acknowledged, as in torch; the log has the traceback."""
    node.answer = ValueError("reaping failed")
    node.client.acquire("0@1", "s", 0.01)
    await until(lambda: len(node.expired) == 1 and len(service.watchdog.table) == 0)


async def test_an_expiry_is_handled_once_at_a_time(service: Service) -> None:
    """It is handled once for all reports, also on a new stream; then it is acknowledged on the new stream."""
    await service.server.stop()
    await service.start(TimerSettings(reoffer_interval=0.02))
    calls, go = [], asyncio.Event()

    async def deal(expired: ExpiredTimer) -> None:
        calls.append(expired)
        await go.wait()

    client = NodeTimers(service.channel(), run_id="run", node_id="a", settings=SETTINGS)
    client.start(deal)
    client.acquire("0@1", "s", 0.01)

    def offers() -> int:
        return sum(view.offers for view in service.watchdog.table.timers(time.monotonic()))

    await until(lambda: offers() >= 3)
    client.renew(1)
    await until(lambda: [each.lease for each, _ in service.watchdog._outboxes.values()] == [1])
    before = offers()
    await until(lambda: offers() >= before + 3)
    assert len(calls) == 1
    go.set()
    await until(lambda: len(service.watchdog.table) == 0)
    await client.close()


async def test_a_new_lease_is_no_trouble(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    """The client subscribes again under it at once, and the log does not point at the network."""
    node = Node(service.channel(), settings=replace(SETTINGS, attempt_timeout=PATIENCE))
    node.client.acquire("0@1", "s", 60.0)
    await until(lambda: node.client._subscribed and len(service.watchdog.table) == 1)
    node.client.renew(7)
    await until(lambda: [each.lease for each, _ in service.watchdog._outboxes.values()] == [7])
    await until(lambda: node.client._subscribed and len(service.watchdog.table) == 1)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    await node.client.close(grace=0)


async def test_closing_removes_all_timers_from_the_service(service: Service, node: Node) -> None:
    """No timer is left there to expire."""
    node.client.acquire("0@1", "s", 60.0)
    # The table alone is not enough: a client that is not subscribed yet does not wait for the service when it closes.
    await until(lambda: node.client._subscribed and len(service.watchdog.table) == 1)
    node.client.acquire("1@1", "s", 60.0)
    await node.client.close(grace=30)
    assert len(service.watchdog.table) == 0
    assert service.watchdog._outboxes == {}


@pytest.mark.parametrize(
    ("said", "logged"),
    [('Failed "execute_batch": (...)', []), ("Failed grpc_call_start_batch: 8", ["ERROR"])],
    ids=["the stream has ended", "a misuse of the call"],
)
async def test_a_stream_that_ends_while_it_is_closed_is_no_error(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: str,
    logged: list[str],
) -> None:
    """The half-close then fails with an internal error of gRPC, which is not the error of the call."""
    failed = type("ExecuteBatchError", (grpc.aio.InternalError,), {})(said)

    async def fail(call: Any) -> None:
        raise failed

    await until(lambda: node.client._subscribed)
    caplog.clear()  # on a busy machine the first connection may have been late
    monkeypatch.setattr(type(node.client._call), "done_writing", fail)
    await node.client.close(grace=0.2)
    assert [record.levelname for record in caplog.records if record.levelno >= logging.ERROR] == logged


async def test_closing_does_not_wait_for_a_service_that_is_gone(service: Service, node: Node) -> None:
    """It does not wait, with any grace."""
    await until(lambda: node.client._subscribed)
    await service.server.stop()
    await until(lambda: not node.client._subscribed)
    await asyncio.wait_for(node.client.close(grace=600), PATIENCE)


async def test_a_superseded_agent_reports_it_and_goes_on_trying(service: Service) -> None:
    """The older of two agents of one node takes nothing from the newer one; a newer lease gives it the node at once."""
    older = Node(service.channel(), lease=1)
    older.client.acquire("0@1", "s", 60.0)
    await until(lambda: len(service.watchdog.table) == 1)
    newer = Node(service.channel(), lease=2)
    await until(lambda: "no longer holds lease 1: lease 2" in older.client.trouble)
    await until(lambda: len(service.watchdog.table) == 0)
    assert newer.client.trouble == ""
    # On a busy machine the first response may be late: that is a trouble of its own, before these.
    assert older.troubles[-2:] == ["", older.client.trouble]
    reported = len(older.troubles)
    older.client.renew(3)
    await until(lambda: older.client.trouble == "" and len(service.watchdog.table) == 1)
    assert older.troubles[reported:] == [""]
    await older.client.close()
    await newer.client.close()


@pytest.mark.parametrize("code", [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED])
async def test_two_agents_of_one_node_take_turns_at_a_bounded_rate(
    tmp_path: Path, code: grpc.StatusCode
) -> None:
    """A replaced agent waits longer each time, though it was accepted in between; the server's reason is reported."""
    began: list[float] = []

    async def pushed_out(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        began.append(time.monotonic())
        await listen(script, requests, 2)
        yield pb.SuperviseEvent(subscribed=pb.Subscribed())
        await context.abort(code, "another agent came")

    script = Scripted(pushed_out)
    async with serving(script, tmp_path) as channel:
        node = Node(channel)
        await until(lambda: len(script.seen) >= 6)
        # The bounds are 0.01, 0.02, 0.04 and then 0.05 s; the jitter of the test takes half of each.
        assert all(later - former > 0.018 for former, later in pairwise(began[3:6]))
        assert f"{code.name}: another agent came" in node.troubles
        await node.client.close(grace=0)


async def test_a_second_life_of_a_run_is_guarded_with_any_lease_number(service: Service) -> None:
    """Static, c10d and memory rendezvous restart with low numbers, and the service remembers high ones."""
    first = Node(service.channel(), lease=50, incarnation="first")
    first.client.acquire("0@1", "s", 60.0)
    await until(lambda: len(service.watchdog.table) == 1)
    second = Node(service.channel(), lease=2, incarnation="second")
    second.client.acquire("0@1", "hangs", 0.05)
    await until(lambda: [each.scope for each in second.expired] == ["hangs"])
    assert second.client.trouble == ""
    # The first agent is still running, and must not take the node back.
    await until(lambda: "has joined a newer run" in first.client.trouble)
    second.client.acquire("0@1", "s", 60.0)
    await until(lambda: len(service.watchdog.table) == 1)
    assert [each.incarnation for each, _ in service.watchdog._outboxes.values()] == ["second"]
    await first.client.close()
    await second.client.close()


async def test_a_service_that_does_not_answer_is_reported_after_a_while(tmp_path: Path) -> None:
    """The log gets that no service guards the workers, and later that one does; a short break is not reported."""
    service = Service(tmp_path / "timer")
    node = Node(service.channel())
    await until(lambda: node.troubles == ["the timer service does not answer"])
    await service.start()
    await until(lambda: node.troubles[1:] == [""])
    await service.server.stop()
    await service.start()
    await until(lambda: bool(service.watchdog._outboxes))
    assert node.client.trouble == ""
    await node.client.close()
    await service.close()


async def test_an_expiry_that_crossed_a_release_is_only_acknowledged(tmp_path: Path) -> None:
    """The sequence number shows that the worker holds another timer of that name by now, or none."""

    async def crossed(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        await listen(script, requests, 3)
        sequence = script.seen[-1][1].acquire.sequence
        yield pb.SuperviseEvent(subscribed=pb.Subscribed())
        for number, scope in ((sequence - 1, "s"), (sequence, "other")):
            expired = pb.Expired(
                expiry_id=7, worker_id="0@1", scope=scope, after=to_duration(1), sequence=number
            )
            yield pb.SuperviseEvent(expired=expired)
        await listen(script, requests, 5)

    script = Scripted(crossed)
    async with serving(script, tmp_path) as channel:
        node = Node(channel)
        node.client.acquire("0@1", "s", 60.0)
        await until(lambda: bool(script.seen) and len(script.seen[0]) == 5)
        assert [action.acknowledge.expiry_id for action in script.seen[0][3:]] == [7, 7]
        assert node.expired == []
        await node.client.close(grace=0)


async def test_an_id_of_an_earlier_stream_is_not_acknowledged(tmp_path: Path) -> None:
    """A restarted service starts to count again, and may have given the number to another expiry."""
    go = asyncio.Event()

    async def first(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        await listen(script, requests, 3)
        yield pb.SuperviseEvent(subscribed=pb.Subscribed())
        sequence = script.seen[-1][1].acquire.sequence
        yield pb.SuperviseEvent(
            expired=pb.Expired(
                expiry_id=7, worker_id="0@1", scope="s", after=to_duration(1), sequence=sequence
            )
        )

    async def second(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        await listen(script, requests, 3)
        yield pb.SuperviseEvent(subscribed=pb.Subscribed())
        go.set()
        await listen(script, requests, 4)

    async def deal(expired: ExpiredTimer) -> None:
        await go.wait()

    script = Scripted(first, second)
    async with serving(script, tmp_path) as channel:
        client = NodeTimers(channel, run_id="run", node_id="a", settings=SETTINGS)
        client.start(deal)
        client.acquire("0@1", "s", 60.0, time.monotonic() - 60)
        await until(lambda: len(script.seen) > 1 and len(script.seen[1]) == 4)
        assert script.seen[1][3] == pb.SuperviseAction(release=pb.Release(worker_id="0@1", scope="s"))
        await client.close(grace=0)


async def test_any_other_end_of_the_stream_is_retried(tmp_path: Path) -> None:
    """Each new stream starts with everything: subscribe, the timers, registered."""

    async def broken(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        await listen(script, requests, 3)
        codes = [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT]
        if len(script.seen) <= len(codes):
            await context.abort(codes[len(script.seen) - 1], "go away")
        yield pb.SuperviseEvent(subscribed=pb.Subscribed())
        yield pb.SuperviseEvent(draining=pb.Draining())

    script = Scripted(broken)
    async with serving(script, tmp_path) as channel:
        node = Node(channel)
        node.client.acquire("0@1", "s", 60.0)
        await until(lambda: len(script.seen) >= 6)
        for seen in script.seen[:5]:
            assert [action.WhichOneof("action") for action in seen] == ["subscribe", "acquire", "registered"]
        await node.client.close(grace=0)


async def test_a_client_recovers_from_an_invalid_event_or_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After an invalid event of the service, or a bug of its own, it logs the error and subscribes again."""

    async def nonsense(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        broken = to_duration(1.0)
        broken.nanos = -1
        yield pb.SuperviseEvent(expired=pb.Expired(worker_id="0@1", scope="s", sequence=1, after=broken))
        await listen(script, requests, 1000)

    async def sense(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        yield pb.SuperviseEvent(subscribed=pb.Subscribed())
        await listen(script, requests, 1000)

    def fail(*_: object) -> list[pb.SuperviseAction]:
        raise OverflowError("a bug")

    script = Scripted(nonsense, sense)
    async with serving(script, tmp_path) as channel:
        node = Node(channel)
        await until(lambda: node.client._subscribed)
        assert "is not a valid duration" in caplog.text
        with monkeypatch.context() as buggy:
            buggy.setattr("rallypoint.timer.client.client.TimerMirror.take", fail)
            node.client.acquire("0@1", "s", 60.0)
            await until(lambda: "a bug" in caplog.text)
        await until(lambda: any(seen[1:2] and seen[1].HasField("acquire") for seen in script.seen))
        await node.client.close(grace=0)


async def test_a_client_waits_for_a_service_that_is_not_there_yet(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It accepts timers meanwhile, keeps their deadlines however long it waits, and logs once that it waits."""
    service = Service(tmp_path / "timer")
    node = Node(service.channel(), clock=clock)
    node.client.acquire("0@1", "s", 60.0)
    await until(lambda: "the timer service does not answer" in caplog.text)
    clock.now += 45
    await service.start(clock=clock)
    await until(lambda: len(service.watchdog.table) == 1)
    assert remaining(service, clock) == {"s": pytest.approx(15)}
    await node.client.close()
    await service.close()
    assert caplog.text.count("no connection to the timer service") == 1
