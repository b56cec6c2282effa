"""The contract of timer_service.proto, over a real socket."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from rallypoint.serving.errors import ServiceError, decode
from rallypoint.timer.durations import to_duration
from rallypoint.timer.servicer import MAX_ACTIONS
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.values import TimerSettings

from .conftest import Service, eventually

pytestmark = pytest.mark.integration


def act(**action: Any) -> pb.SuperviseAction:
    return pb.SuperviseAction(**action)


def subscribe(node_id: str = "a", lease: int = 0) -> pb.SuperviseAction:
    return act(subscribe=pb.Subscribe(run_id="run", node_id=node_id, lease=lease))


def acquire(scope: str, after: float, sequence: int, elapsed: float = 0.0) -> pb.SuperviseAction:
    return act(
        acquire=pb.Acquire(
            worker_id="0@1",
            scope=scope,
            after=to_duration(after),
            elapsed=to_duration(elapsed),
            sequence=sequence,
        )
    )


class Stream:
    """One Supervise call, an event at a time."""

    def __init__(self, service: Service) -> None:
        self.call = service.stub().Supervise()
        self.waiting: list[pb.SuperviseEvent] = []

    async def send(self, *actions: pb.SuperviseAction) -> None:
        await self.call.write(pb.SuperviseRequest(actions=actions))

    async def next(self) -> Any:
        while not self.waiting:
            response = await self.call.read()
            if response is grpc.aio.EOF:
                return None
            assert isinstance(response, pb.SuperviseResponse)
            self.waiting.extend(response.events)
        event = self.waiting.pop(0)
        kind = event.WhichOneof("event")
        assert kind is not None
        return getattr(event, kind)


async def error_of(awaited: Any) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaited
    return decode(caught.value)


@pytest.fixture
async def quick(service: Service) -> Service:
    """Tells expiries again soon."""
    await service.server.stop()
    await service.start(TimerSettings(reoffer_interval=0.05, max_timers_per_node=3))
    return service


async def test_an_expiry_is_pushed_and_pushed_again_until_acknowledged(quick: Service) -> None:
    """Under one id; once acknowledged, what comes next is the next timer."""
    stream = Stream(quick)
    await stream.send(subscribe(), acquire("s", 0.02, 7), act(registered=pb.Registered()))
    assert isinstance(await stream.next(), pb.Subscribed)
    first, again = await stream.next(), await stream.next()
    assert (first.worker_id, first.scope, first.sequence) == ("0@1", "s", 7)
    assert first.after == to_duration(0.02)
    assert 0 <= first.late_by.ToNanoseconds() < again.late_by.ToNanoseconds()
    assert again.expiry_id == first.expiry_id
    await stream.send(
        act(acknowledge=pb.Acknowledge(expiry_id=first.expiry_id)),
        acquire("next", 0.3, 8),
    )
    while (expired := await stream.next()).scope == "s":
        assert expired.expiry_id == first.expiry_id
    await stream.send(act(acknowledge=pb.Acknowledge(expiry_id=expired.expiry_id)))
    await eventually(lambda: len(quick.watchdog.table) == 0)


async def test_what_is_released_or_cleared_does_not_run_out(quick: Service) -> None:
    """The one that is left does."""
    stream = Stream(quick)
    await stream.send(
        subscribe(),
        acquire("released", 0.2, 1),
        act(release=pb.Release(worker_id="0@1", scope="released")),
        acquire("cleared", 0.2, 2),
        act(clear=pb.Clear(worker_id="0@1")),
        act(release=pb.Release(worker_id="0@1", scope="unknown")),
        act(clear=pb.Clear(worker_id="unknown")),
        act(acknowledge=pb.Acknowledge(expiry_id=99)),
        acquire("left", 0.3, 3),
    )
    assert isinstance(await stream.next(), pb.Subscribed)
    assert (await stream.next()).scope == "left"


async def test_registered_drops_what_the_stream_did_not_name(quick: Service) -> None:
    """What an earlier stream acquired and this one has not is gone; what a single call acquired stays."""
    earlier, stub = Stream(quick), quick.stub()
    await earlier.send(subscribe(), acquire("kept", 60, 1), acquire("gone", 60, 2))
    await eventually(lambda: len(quick.watchdog.table) == 2)
    await stub.AcquireTimer(
        pb.AcquireTimerRequest(
            run_id="run", node_id="a", worker_id="0@1", scope="call", after=to_duration(60)
        )
    )
    later = Stream(quick)
    await later.send(subscribe(), acquire("kept", 60, 1), act(registered=pb.Registered()))
    await later.next()
    await eventually(lambda: len(quick.watchdog.table) == 2)
    listed = await stub.ListTimers(pb.ListTimersRequest())
    assert [timer.scope for timer in listed.timers] == ["call", "kept"]


async def test_a_newer_stream_ends_the_older_one(service: Service) -> None:
    """STREAM_REPLACED with the same lease, LEASE_LOST with a newer one, and the older can't come back."""
    first, second, third, fourth = (Stream(service) for _ in range(4))
    await first.send(subscribe(lease=1))
    await first.next()
    await second.send(subscribe(lease=1))
    await second.next()
    replaced = await error_of(first.next())
    assert (replaced.code, replaced.reason) == (grpc.StatusCode.ABORTED, "STREAM_REPLACED")
    await third.send(subscribe(lease=2))
    await third.next()
    lost = await error_of(second.next())
    assert (lost.code, lost.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LEASE_LOST")
    assert lost.metadata["current_lease"] == "2"
    await fourth.send(subscribe(lease=1))
    assert (await error_of(fourth.next())).reason == "LEASE_LOST"


async def test_an_acquire_that_is_refused_is_told_and_the_stream_goes_on(quick: Service) -> None:
    """Each with its reason."""
    stream = Stream(quick)
    await stream.send(
        subscribe(),
        acquire("", 1, 1),
        acquire("s", -1, 2),
        acquire("s", 1, 0),
        acquire("s", 1, 3, elapsed=-1),
        act(acquire=pb.Acquire(worker_id="w", scope="s", after=Duration(seconds=1, nanos=-1), sequence=4)),
        *(acquire(f"s{number}", 0.3, 10 + number) for number in range(4)),
    )
    assert isinstance(await stream.next(), pb.Subscribed)
    refused = [await stream.next() for _ in range(6)]
    assert [each.reason for each in refused] == ["INVALID_ARGUMENT"] * 5 + ["TOO_MANY_TIMERS"]
    assert refused[1].message == "after: must be more than zero and at most ten years"
    assert (await stream.next()).scope == "s0"


@pytest.mark.parametrize(
    "requests",
    [
        [[]],
        [[acquire("s", 1, 1)]],
        [[subscribe(node_id="")]],
        [[subscribe(lease=-1)]],
        [[subscribe(), subscribe()]],
        [[subscribe()], [subscribe()]],
        [[subscribe()], [act(registered=pb.Registered())] * (MAX_ACTIONS + 1)],
    ],
)
async def test_a_stream_that_breaks_the_protocol_ends(
    service: Service, requests: list[list[pb.SuperviseAction]]
) -> None:
    """INVALID_ARGUMENT, with the field."""
    stream = Stream(service)
    for actions in requests:
        await stream.send(*actions)

    async def read_on() -> None:
        while await stream.next() is not None:
            pass

    error = await error_of(read_on())
    assert error.reason == "INVALID_ARGUMENT"
    assert error.field_violations


async def test_an_action_of_a_newer_client_is_ignored(service: Service) -> None:
    """Unknown to this service: field 99 of SuperviseAction."""
    stream = Stream(service)
    await stream.send(subscribe(), pb.SuperviseAction.FromString(b"\x9a\x06\x00"), acquire("s", 0.01, 1))
    await stream.next()
    assert (await stream.next()).scope == "s"


async def test_draining_is_told_and_ends_the_stream(service: Service) -> None:
    """With status OK: it is no error."""
    stream = Stream(service)
    await stream.send(subscribe(), acquire("s", 60, 1))
    await stream.next()
    await service.server.drain(5.0)
    assert isinstance(await stream.next(), pb.Draining)
    assert await stream.next() is None


async def test_a_client_that_closes_its_half_ends_the_stream(service: Service) -> None:
    """Its timers stay: it may come back."""
    stream = Stream(service)
    await stream.send(subscribe(), acquire("s", 60, 1))
    await stream.next()
    await stream.call.done_writing()
    assert await stream.next() is None
    assert len(service.watchdog.table) == 1


async def test_single_calls(service: Service) -> None:
    """Acquire, list, release; the agent is told with sequence 0."""
    stub = service.stub()
    timer: dict[str, Any] = {"run_id": "run", "node_id": "a", "worker_id": "0@1", "scope": "s"}
    await stub.AcquireTimer(pb.AcquireTimerRequest(**timer, after=to_duration(0.02)))
    await eventually(lambda: next(service.watchdog.table.timers(0.0)).state.name == "UNCLAIMED")
    (listed,) = (await stub.ListTimers(pb.ListTimersRequest(run_id="run"))).timers
    assert (listed.scope, listed.state, listed.offers) == ("s", pb.TIMER_STATE_UNCLAIMED, 0)
    assert listed.remaining.ToNanoseconds() < 0
    stream = Stream(service)
    await stream.send(subscribe(), act(registered=pb.Registered()))
    await stream.next()
    assert (await stream.next()).sequence == 0
    (listed,) = (await stub.ListTimers(pb.ListTimersRequest(node_id="a"))).timers
    assert (listed.state, listed.offers) == (pb.TIMER_STATE_OFFERED, 1)
    assert (await stub.ReleaseTimer(pb.ReleaseTimerRequest(**timer))).released
    assert not (await stub.ReleaseTimer(pb.ReleaseTimerRequest(**timer))).released


async def test_single_calls_are_refused_with_reasons(quick: Service) -> None:
    """Every one with a code that tells a program what to do."""
    stub = quick.stub()
    timer: dict[str, Any] = {"run_id": "run", "node_id": "a", "worker_id": "0@1", "scope": "s"}
    after = to_duration(60)

    def acquired(**changes: Any) -> Any:
        return error_of(stub.AcquireTimer(pb.AcquireTimerRequest(**{**timer, "after": after, **changes})))

    assert (await acquired(scope="")).field_violations[0][0] == "scope"
    assert (await acquired(after=None)).field_violations[0][0] == "after"
    assert (await acquired(after=Duration(seconds=10**18))).field_violations[0][0] == "after"
    await stub.AcquireTimer(pb.AcquireTimerRequest(**timer, after=after, lease=5))
    lost = await acquired(lease=4)
    assert (lost.code, lost.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LEASE_LOST")
    lost = await error_of(stub.ReleaseTimer(pb.ReleaseTimerRequest(**timer, lease=4)))
    assert lost.reason == "LEASE_LOST"
    for scope in "tu":
        await stub.AcquireTimer(pb.AcquireTimerRequest(**{**timer, "scope": scope}, after=after))
    full = await acquired(scope="v")
    assert (full.code, full.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_TIMERS")
    assert full.retry_after
    for request in (pb.ListTimersRequest(page_size=-1), pb.ListTimersRequest(page_token="x")):  # noqa: S106
        assert (await error_of(stub.ListTimers(request))).reason == "INVALID_ARGUMENT"


async def test_pages_put_together_are_the_whole(service: Service) -> None:
    """In order, none twice."""
    stub = service.stub()
    for number in range(25):
        await stub.AcquireTimer(
            pb.AcquireTimerRequest(
                run_id="run", node_id="a", worker_id="w", scope=f"s{number:02}", after=to_duration(60)
            )
        )
    scopes: list[str] = []
    token = ""
    while True:
        page = await stub.ListTimers(pb.ListTimersRequest(page_size=10, page_token=token))
        scopes += [timer.scope for timer in page.timers]
        token = page.next_page_token
        if not token:
            break
    assert scopes == [f"s{number:02}" for number in range(25)]


async def test_random_requests_are_answered_in_kind(service: Service) -> None:
    """Whatever the fields hold, the answer is a result or a refusal, never UNKNOWN, INTERNAL or a failure."""
    dice = random.Random(7)
    texts = ["", "a", "run", "ü" * 200, "x" * 600, "\0", "../"]
    numbers = [0, 1, -1, 2**31 - 1, 2**62, -(2**63)]

    def duration() -> Duration:
        return Duration(seconds=dice.choice(numbers), nanos=dice.choice([0, 1, -1, 10**9, -(2**31)]))

    def request(kind: type[Any]) -> Any:
        made = kind()
        for field in kind.DESCRIPTOR.fields:
            if dice.random() < 0.3:
                continue
            if field.message_type is not None:
                getattr(made, field.name).CopyFrom(duration())
            elif field.type == field.TYPE_STRING:
                setattr(made, field.name, dice.choice(texts))
            else:
                number = dice.choice(numbers)
                setattr(made, field.name, number if field.type == field.TYPE_INT64 else number % 2**31)
        return made

    stub = service.stub()
    answers = set()
    for _ in range(300):
        for method, kind in (
            (stub.AcquireTimer, pb.AcquireTimerRequest),
            (stub.ReleaseTimer, pb.ReleaseTimerRequest),
            (stub.ListTimers, pb.ListTimersRequest),
        ):
            try:
                await method(request(kind))
                answers.add("OK")
            except grpc.aio.AioRpcError as error:
                answers.add(decode(error).reason)
    assert answers <= {"OK", "INVALID_ARGUMENT", "LEASE_LOST"}


async def test_a_subscriber_that_does_not_read_delays_nobody(quick: Service) -> None:
    """Its expiries wait in one slot each, however often they are told again; its neighbour gets its own at once."""
    deaf, other = Stream(quick), Stream(quick)
    await deaf.send(subscribe("deaf"), acquire("s", 0.01, 1))
    await other.send(subscribe("other"), acquire("s", 0.3, 1))
    await other.next()
    assert (await asyncio.wait_for(other.next(), 30)).scope == "s"
    _, mailbox = quick.watchdog._mailboxes["run", "deaf"]
    assert len(mailbox._expiries) <= 1
