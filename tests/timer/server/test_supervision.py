"""The contract of Supervise, over a real socket."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from hostile.values import message
from rallypoint.rpc.durations import to_duration
from rallypoint.rpc.errors import decode
from rallypoint.timer.core.values import TimerSettings
from rallypoint.timer.server.servicer import MAX_ACTIONS
from rallypoint.timer.v1 import timer_service_pb2 as pb
from support.marks import slow
from support.refusals import refusal
from support.waiting import PATIENCE, until
from timer.conftest import Service
from timer.streams import Stream, acquire, act, subscribe

pytestmark = pytest.mark.integration

ALL_BAD = pb.Subscribe(lease=-1, incarnation="x" * 257, lease_age=Duration(seconds=-1), token=bytes(65))
ALL_BAD.stall_after.CopyFrom(Duration(seconds=1, nanos=-1))


async def test_an_expiry_is_pushed_and_pushed_again_until_acknowledged(quick: Service) -> None:
    """It keeps its id; after the acknowledgement comes the next timer."""
    stream = Stream(quick)
    await stream.send(subscribe(), acquire("s", 0.02, 7), act(registered=pb.Registered()))
    assert isinstance(await stream.next(), pb.Subscribed)
    first, again = await stream.next(), await stream.next()
    assert (first.worker_id, first.scope, first.sequence) == ("0@1", "s", 7)
    assert first.after == to_duration(0.02)
    assert 0 <= first.late_by.ToNanoseconds() < again.late_by.ToNanoseconds()
    assert again.expiry_id == first.expiry_id
    await stream.send(act(acknowledge=pb.Acknowledge(expiry_id=first.expiry_id)), acquire("next", 0.3, 8))
    while (expired := await stream.next()).scope == "s":
        assert expired.expiry_id == first.expiry_id
    await stream.send(act(acknowledge=pb.Acknowledge(expiry_id=expired.expiry_id)))
    await until(lambda: len(quick.watchdog.table) == 0)


async def test_a_released_or_cleared_timer_does_not_expire(quick: Service) -> None:
    """Only the remaining one expires."""
    stream = Stream(quick)
    await stream.send(
        subscribe(),
        acquire("released", 0.2, 1),
        act(release=pb.Release(worker_id="0@1", scope="released")),
        acquire("cleared", 0.2, 2),
        act(clear=pb.ClearWorker(worker_id="0@1")),
        act(release=pb.Release(worker_id="0@1", scope="unknown")),
        act(clear=pb.ClearWorker(worker_id="unknown")),
        act(acknowledge=pb.Acknowledge(expiry_id=99)),
        acquire("left", 0.3, 3),
    )
    assert isinstance(await stream.next(), pb.Subscribed)
    assert (await stream.next()).scope == "left"


async def test_registered_drops_timers_that_the_stream_did_not_name(quick: Service) -> None:
    """Timers that only an earlier stream acquired are gone; timers of single calls stay."""
    earlier, stub = Stream(quick), quick.stub()
    await earlier.send(subscribe(), acquire("kept", 60, 1), acquire("gone", 60, 2))
    await until(lambda: len(quick.watchdog.table) == 2)
    await stub.AcquireTimer(
        pb.AcquireTimerRequest(
            run_id="run", node_id="a", worker_id="0@1", scope="call", after=to_duration(60)
        )
    )
    later = Stream(quick)
    await later.send(subscribe(), acquire("kept", 60, 1), act(registered=pb.Registered()))
    await later.next()
    await until(lambda: len(quick.watchdog.table) == 2)
    listed = await stub.ListTimers(pb.ListTimersRequest())
    assert [timer.scope for timer in listed.timers] == ["call", "kept"]


async def test_a_newer_stream_ends_the_older_one(service: Service) -> None:
    """It gets STREAM_REPLACED for the same lease, LEASE_LOST for a newer one, and can't come back."""
    first, second, third, fourth = (Stream(service) for _ in range(4))
    await first.send(subscribe(lease=1))
    await first.next()
    await second.send(subscribe(lease=1))
    await second.next()
    replaced = await refusal(first.next())
    assert (replaced.code, replaced.reason) == (grpc.StatusCode.ABORTED, "STREAM_REPLACED")
    await third.send(subscribe(lease=2))
    await third.next()
    lost = await refusal(second.next())
    assert (lost.code, lost.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LEASE_LOST")
    assert lost.metadata["superseded_by"] == "2"
    await fourth.send(subscribe(lease=1))
    assert (await refusal(fourth.next())).reason == "LEASE_LOST"


async def test_a_refused_action_is_reported_and_the_stream_goes_on(quick: Service) -> None:
    """Each is reported with its reason."""
    stream = Stream(quick)
    await stream.send(
        subscribe(),
        acquire("", 1, 1),
        acquire("s", -1, 2),
        acquire("s", 1, 0),
        acquire("s", 1, 3, elapsed=-1),
        act(acquire=pb.Acquire(worker_id="w", scope="s", after=Duration(seconds=1, nanos=-1), sequence=4)),
        act(release=pb.Release(worker_id="", scope="s")),
        act(release=pb.Release(worker_id="w", scope="x" * 513)),
        act(clear=pb.ClearWorker(worker_id="x" * 257)),
        *(acquire(f"s{number}", 0.3, 10 + number) for number in range(4)),
    )
    assert isinstance(await stream.next(), pb.Subscribed)
    refused = [await stream.next() for _ in range(9)]
    assert [each.reason for each in refused] == ["INVALID_ARGUMENT"] * 8 + ["TOO_MANY_TIMERS"]
    fields = [(each.sequence, each.message.partition(":")[0]) for each in refused[5:8]]
    assert fields == [(0, "worker_id"), (0, "scope"), (0, "worker_id")]
    assert refused[1].message == "after: must be more than zero and at most ten years"
    assert (await stream.next()).scope == "s0"


@pytest.mark.parametrize(
    ("field", "requests"),
    [
        ("actions", [[]]),
        ("actions", [[acquire("s", 1, 1)]]),
        ("stall_after", [[subscribe(stall_after=4e8)]]),
        ("run_id node_id token incarnation lease stall_after lease_age", [[act(subscribe=ALL_BAD)]]),
        ("actions", [[subscribe(), subscribe()]]),
        ("actions", [[subscribe()], [subscribe()]]),
        ("actions", [[subscribe(), *[act(registered=pb.Registered())] * MAX_ACTIONS]]),
        ("actions", [[subscribe()], [act(registered=pb.Registered())] * (MAX_ACTIONS + 1)]),
        ("scope", [[subscribe(), act(observe=pb.Observe(count=1))]]),
        ("count", [[subscribe(), act(observe=pb.Observe(scope="s"))]]),
        (
            "longest",
            [[subscribe(), act(observe=pb.Observe(scope="s", count=1, longest=Duration(nanos=2**30)))]],
        ),
        ("scope", [[subscribe(), act(learned=pb.Learned(count=1))]]),
        ("scope", [[subscribe(), act(registered=pb.Registered()), act(learned=pb.Learned())]]),
        ("longest", [[subscribe(), act(learned=pb.Learned(scope="s", count=1, longest=to_duration(-1)))]]),
        (
            "actions",
            [[subscribe(), act(registered=pb.Registered()), act(learned=pb.Learned(scope="s", count=1))]],
        ),
        ("worker_id", [[subscribe(), act(progress=pb.Progress(rank=1))]]),
        ("rank", [[subscribe(), act(progress=pb.Progress(worker_id="w", rank=-1))]]),
        (
            "elapsed",
            [[subscribe(), act(progress=pb.Progress(worker_id="w", elapsed=Duration(seconds=2**62)))]],
        ),
    ],
)
async def test_a_stream_that_breaks_the_protocol_ends(
    service: Service, field: str, requests: list[list[pb.SuperviseAction]]
) -> None:
    """It ends with INVALID_ARGUMENT and the name of the field."""
    stream = Stream(service)
    for actions in requests:
        await stream.send(*actions)
    error = await refusal(stream.rest())
    assert error.reason == "INVALID_ARGUMENT"
    assert [violation[0] for violation in error.field_violations] == field.split()


async def test_an_action_of_a_newer_client_is_ignored(service: Service) -> None:
    """It is unknown to this service: field 99 of SuperviseAction."""
    stream = Stream(service)
    await stream.send(subscribe(), pb.SuperviseAction.FromString(b"\x9a\x06\x00"), acquire("s", 0.01, 1))
    await stream.next()
    assert (await stream.next()).scope == "s"


async def test_draining_is_sent_and_ends_the_stream(service: Service) -> None:
    """The error is one to retry: clients treat OK as the end of the subscription."""
    stream = Stream(service)
    await stream.send(subscribe(), acquire("s", 60, 1))
    await stream.next()
    await service.server.drain(5.0)
    assert isinstance(await stream.next(), pb.Draining)
    error = await refusal(stream.next())
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_a_client_that_closes_its_half_ends_the_stream(service: Service) -> None:
    """Its timers stay: it may come back."""
    stream = Stream(service)
    await stream.send(subscribe(), acquire("s", 60, 1))
    await stream.next()
    await stream.call.done_writing()
    assert await stream.next() is None
    assert len(service.watchdog.table) == 1


async def test_a_subscriber_that_does_not_read_delays_no_other(quick: Service) -> None:
    """Its expiries wait in one slot each, however often they are sent again; another node gets its own at once."""
    deaf, other = Stream(quick), Stream(quick)
    await deaf.send(subscribe("deaf"), acquire("s", 0.01, 1))
    await other.send(subscribe("other"), acquire("s", 0.3, 1))
    await other.next()
    assert (await asyncio.wait_for(other.next(), PATIENCE)).scope == "s"
    _, mailbox = quick.watchdog._outboxes["run", "deaf"]
    assert len(mailbox._expiries) <= 1


async def test_timers_that_learn_expire_by_observed_durations_and_report_them(service: Service) -> None:
    """None expires before enough completions; then the longest counts, which is sent with the expiry."""
    await service.server.stop()
    await service.start(TimerSettings(learn_warm_up=3, learn_factor=2, learn_least=0.01))
    stream = Stream(service)
    await stream.send(
        subscribe(), act(registered=pb.Registered()), acquire("step#1", 0, 1, learned_as="step", elapsed=5)
    )
    assert isinstance(await stream.next(), pb.Subscribed)
    await stream.send(act(observe=pb.Observe(scope="step", count=2, longest=to_duration(0.5))))
    await stream.send(act(observe=pb.Observe(scope="step", count=1, longest=to_duration(0.75))))
    learned = []
    while isinstance(told := await stream.next(), pb.Learned):
        learned.append((told.scope, told.count, told.longest))
    assert learned[-1] == ("step", 3, to_duration(0.75))
    assert isinstance(told, pb.Expired)
    assert (told.scope, told.after, told.sequence) == ("step#1", to_duration(1.5), 1)
    assert told.learned == pb.Learned(scope="step", count=3, longest=to_duration(0.75))
    assert told.late_by.seconds >= 3


async def test_an_expiry_of_a_given_duration_has_nothing_learned(service: Service) -> None:
    """Readers can distinguish the two."""
    stream = Stream(service)
    await stream.send(subscribe(), acquire("s", 0.01, 1))
    await stream.next()
    assert not (await stream.next()).HasField("learned")


async def test_learned_data_is_restored_from_the_agents(service: Service) -> None:
    """A new service without data gets it from them, takes the higher of two counts, and sends it to the others."""
    one, two = Stream(service), Stream(service)
    await one.send(
        subscribe("a"),
        act(learned=pb.Learned(scope="step", count=40, longest=to_duration(2))),
        act(registered=pb.Registered()),
    )
    await one.next()
    assert await one.next() == pb.Learned(scope="step", count=40, longest=to_duration(2))
    await two.send(subscribe("b"), act(learned=pb.Learned(scope="step", count=30, longest=to_duration(3))))
    await two.next()
    assert await one.next() == pb.Learned(scope="step", count=40, longest=to_duration(3))
    (scope,) = (await service.stub().ListScopes(pb.ListScopesRequest())).scopes
    assert (scope.count, scope.longest, scope.after) == (40, to_duration(3), to_duration(15))


async def test_a_stalled_run_is_reported_to_its_agents_and_shown(service: Service) -> None:
    """It is sent once, with the worker that stopped first, and its end too. The subscriber sets the time."""
    stream, stub = Stream(service), service.stub()
    await stream.send(
        subscribe(stall_after=0.05),
        act(progress=pb.Progress(worker_id="0@1", rank=0, step=8)),
        act(progress=pb.Progress(worker_id="1@1", rank=1, step=7, elapsed=to_duration(3))),
        act(registered=pb.Registered()),
    )
    assert isinstance(await stream.next(), pb.Subscribed)
    stalled = await stream.next()
    assert isinstance(stalled, pb.Stalled)
    assert (stalled.over, stalled.workers, stalled.at_same_step) == (False, 2, 1)
    assert (stalled.first.node_id, stalled.first.worker_id, stalled.first.rank, stalled.first.step) == (
        "a",
        "1@1",
        1,
        7,
    )
    assert stalled.idle.ToNanoseconds() >= 49_000_000
    assert stalled.first.idle.seconds >= 3
    progress = await stub.GetProgress(pb.GetProgressRequest(run_id="run"))
    assert progress.stalled.first.worker_id == "1@1"
    assert progress.stall_after == to_duration(0.05)
    await stream.send(act(progress=pb.Progress(worker_id="1@1", rank=1, step=8)))
    over = await stream.next()
    assert (over.over, over.first.worker_id) == (True, "1@1")
    assert over.idle.ToNanoseconds() >= stalled.idle.ToNanoseconds()


@pytest.mark.parametrize("streams", [100, slow(300)])
async def test_random_streams_are_answered_in_kind(service: Service, streams: int) -> None:
    """For any actions, the stream goes on or ends with a refusal, never UNKNOWN or INTERNAL."""
    dice = random.Random(11)
    answers = set()
    for number in range(streams):
        stream = Stream(service)
        first = subscribe(f"node-{number % 3}", stall_after=dice.choice([None, 0, 0.01]))
        actions: list[Any] = [
            message(pb.SuperviseAction.DESCRIPTOR, dice, wild=0.5) for _ in range(dice.randrange(6))
        ]
        await stream.send(*([first] if dice.random() < 0.9 else []), *actions)
        await stream.call.done_writing()
        try:
            await stream.rest()
            answers.add("OK")
        except grpc.aio.AioRpcError as error:
            answers.add(decode(error).reason)
    assert answers == {"OK", "INVALID_ARGUMENT"}
