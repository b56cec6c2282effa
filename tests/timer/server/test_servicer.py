"""The unary calls of timer_service.proto, over a real socket."""

from __future__ import annotations

import random
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from hostile.values import message
from rallypoint.rpc.durations import to_duration
from rallypoint.rpc.errors import decode
from rallypoint.timer.core.values import TimerState
from rallypoint.timer.server.servicer import MAX_ACTIONS
from rallypoint.timer.v1 import timer_service_pb2 as pb
from support.marks import slow
from support.refusals import refusal
from support.waiting import until
from timer.conftest import Service
from timer.streams import Stream, acquire, act, subscribe

pytestmark = pytest.mark.integration


async def test_single_calls(service: Service) -> None:
    """Acquire, list, release; the agent receives the expiry with sequence 0."""
    stub = service.stub()
    timer: dict[str, Any] = {"run_id": "run", "node_id": "a", "worker_id": "0@1", "scope": "s"}
    acquired = await stub.AcquireTimer(pb.AcquireTimerRequest(**timer, after=to_duration(0.02)))
    assert not acquired.subscribed
    await until(lambda: next(service.watchdog.table.timers(0.0)).state.name == "UNCLAIMED")
    (listed,) = (await stub.ListTimers(pb.ListTimersRequest(run_id="run"))).timers
    assert (listed.scope, listed.state, listed.offers) == ("s", pb.TIMER_STATE_UNCLAIMED, 0)
    assert listed.remaining.ToNanoseconds() < 0
    stream = Stream(service)
    await stream.send(subscribe(), act(registered=pb.Registered()))
    await stream.next()
    assert (await stream.next()).sequence == 0
    (listed,) = (await stub.ListTimers(pb.ListTimersRequest(node_id="a"))).timers
    assert (listed.state, listed.offers) == (pb.TIMER_STATE_OFFERED, 1)
    request = pb.BatchUpdateTimersRequest(run_id="run", node_id="a")
    assert (await stub.BatchUpdateTimers(request)).subscribed
    assert (await stub.ReleaseTimer(pb.ReleaseTimerRequest(**timer))).released
    assert not (await stub.ReleaseTimer(pb.ReleaseTimerRequest(**timer))).released


async def test_single_calls_are_refused_with_reasons(quick: Service) -> None:
    """Each error has a code that shows a program how to react."""
    stub = quick.stub()
    timer: dict[str, Any] = {"run_id": "run", "node_id": "a", "worker_id": "0@1", "scope": "s"}
    after = to_duration(60)

    def acquired(**changes: Any) -> Any:
        return refusal(stub.AcquireTimer(pb.AcquireTimerRequest(**{**timer, "after": after, **changes})))

    assert (await acquired(scope="")).field_violations[0][0] == "scope"
    for worker_id in ("", "rank0", "0@", "x" * 300):
        assert (await acquired(worker_id=worker_id)).field_violations[0][0] == "worker_id"
    assert (await acquired(after=None)).field_violations[0][0] == "after"
    assert (await acquired(after=Duration(seconds=10**18))).field_violations[0][0] == "after"
    bad: dict[str, Any] = {"token": bytes(65)}
    acquire_ = pb.AcquireTimerRequest(after=Duration(seconds=10**18), **bad)
    for call, fields in (
        (stub.AcquireTimer(acquire_), "run_id node_id worker_id scope token after"),
        (stub.ReleaseTimer(pb.ReleaseTimerRequest(**bad)), "run_id node_id worker_id scope token"),
        (stub.ClearTimers(pb.ClearTimersRequest(**bad)), "run_id node_id worker_id token"),
        (stub.BatchUpdateTimers(pb.BatchUpdateTimersRequest(lease=-1, **bad)), "run_id node_id token lease"),
        (stub.ForgetScopes(pb.ForgetScopesRequest(scope="x" * 513)), "run_id scope"),
    ):
        assert " ".join(field for field, _ in (await refusal(call)).field_violations) == fields
    await stub.AcquireTimer(pb.AcquireTimerRequest(**timer, after=after, lease=5))
    lost = await acquired(lease=4)
    assert (lost.code, lost.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LEASE_LOST")
    lost = await refusal(stub.ReleaseTimer(pb.ReleaseTimerRequest(**timer, lease=4)))
    assert lost.reason == "LEASE_LOST"
    for scope in "tu":
        await stub.AcquireTimer(pb.AcquireTimerRequest(**{**timer, "scope": scope}, after=after))
    full = await acquired(scope="v")
    assert (full.code, full.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_TIMERS")
    assert full.retry_after
    for request in (pb.ListTimersRequest(page_size=-1), pb.ListTimersRequest(page_token="x")):  # noqa: S106
        assert (await refusal(stub.ListTimers(request))).reason == "INVALID_ARGUMENT"


async def test_pages_put_together_are_the_whole(service: Service) -> None:
    """They are in order, none twice."""
    stub = service.stub()
    for number in range(25):
        await stub.AcquireTimer(
            pb.AcquireTimerRequest(
                run_id="run", node_id="a", worker_id="0@1", scope=f"s{number:02}", after=to_duration(60)
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


@pytest.mark.parametrize("rounds", [300, slow(900)])
async def test_random_requests_are_answered_in_kind(service: Service, rounds: int) -> None:
    """For any fields, the response is a result or a refusal, never UNKNOWN, INTERNAL or a failure."""
    dice = random.Random(1)
    stub = service.stub()
    answers = set()
    for _ in range(rounds):
        for method, kind in (
            (stub.BatchUpdateTimers, pb.BatchUpdateTimersRequest),
            (stub.AcquireTimer, pb.AcquireTimerRequest),
            (stub.ReleaseTimer, pb.ReleaseTimerRequest),
            (stub.ClearTimers, pb.ClearTimersRequest),
            (stub.ListTimers, pb.ListTimersRequest),
            (stub.ListScopes, pb.ListScopesRequest),
            (stub.ForgetScopes, pb.ForgetScopesRequest),
            (stub.GetProgress, pb.GetProgressRequest),
        ):
            request: Any = message(kind.DESCRIPTOR, dice, wild=0.5)
            try:
                await method(request)
                answers.add("OK")
            except grpc.aio.AioRpcError as error:
                answers.add(decode(error).reason)
    assert answers == {"OK", "INVALID_ARGUMENT", "LEASE_LOST"}


async def test_many_actions_in_one_call(quick: Service) -> None:
    """They are applied in order; refused ones are reported and don't stop the others."""
    stub = quick.stub()

    def timer(scope: str, after: float = 60, **more: Any) -> pb.TimerAction:
        return pb.TimerAction(
            acquire=pb.Acquire(worker_id="0@1", scope=scope, after=to_duration(after), **more)
        )

    answer = await stub.BatchUpdateTimers(
        pb.BatchUpdateTimersRequest(
            run_id="run",
            node_id="a",
            lease=3,
            actions=[
                timer("s0"),
                timer("s1", after=0),
                timer("s2", sequence=5),
                timer("s3", learned_as="step"),
                timer("s4", elapsed=to_duration(-1)),
                pb.TimerAction(release=pb.Release(worker_id="0@1", scope="s0")),
                pb.TimerAction(release=pb.Release(worker_id="", scope="s0")),
                pb.TimerAction(release=pb.Release(worker_id="0@1", scope="unknown")),
                pb.TimerAction(clear=pb.ClearWorker(worker_id="x" * 300)),
                timer("s5", elapsed=to_duration(20)),
                timer("s6"),
                timer("s7"),
                timer("s8"),
            ],
        )
    )
    assert [(each.scope, each.reason, each.message.partition(":")[0]) for each in answer.refused] == [
        ("s1", "INVALID_ARGUMENT", "after"),
        ("s2", "INVALID_ARGUMENT", "sequence"),
        ("s3", "INVALID_ARGUMENT", "learned_as"),
        ("s4", "INVALID_ARGUMENT", "elapsed"),
        ("s0", "INVALID_ARGUMENT", "worker_id"),
        ("", "INVALID_ARGUMENT", "worker_id"),
        ("s8", "TOO_MANY_TIMERS", "too many timers on node 'a'"),
    ]
    listed = {timer.scope: timer for timer in (await stub.ListTimers(pb.ListTimersRequest())).timers}
    assert sorted(listed) == ["s5", "s6", "s7"]
    assert listed["s5"].remaining.seconds < 40
    cleared = pb.TimerAction(clear=pb.ClearWorker(worker_id="0@1"))
    request = pb.BatchUpdateTimersRequest(run_id="run", node_id="a", actions=[cleared])
    assert not (await stub.BatchUpdateTimers(request)).refused
    assert len(quick.watchdog.table) == 0


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("run_id", {"run_id": ""}),
        ("node_id", {"node_id": "x" * 257}),
        ("lease", {"lease": -1}),
        ("actions", {"actions": [pb.TimerAction(clear=pb.ClearWorker(worker_id="0@1"))] * (MAX_ACTIONS + 1)}),
        (
            "actions[1]",
            {"actions": [pb.TimerAction(clear=pb.ClearWorker(worker_id="0@1")), pb.TimerAction()]},
        ),
    ],
)
async def test_a_malformed_call_takes_none_of_its_actions(
    service: Service, field: str, changes: dict[str, Any]
) -> None:
    """The error names the field."""
    first = pb.TimerAction(acquire=pb.Acquire(worker_id="0@1", scope="s", after=to_duration(60)))
    actions = [first, *changes.pop("actions", [])]
    field = field.replace("1", "2")
    request = pb.BatchUpdateTimersRequest(**{"run_id": "run", "node_id": "a", "actions": actions, **changes})
    error = await refusal(service.stub().BatchUpdateTimers(request))
    assert (error.reason, error.field_violations[0][0]) == ("INVALID_ARGUMENT", field)
    assert len(service.watchdog.table) == 0


async def test_a_superseded_caller_registers_and_clears_nothing(service: Service) -> None:
    """It gets LEASE_LOST, as for single timers."""
    stub = service.stub()
    actions = [pb.TimerAction(acquire=pb.Acquire(worker_id="0@1", scope="s", after=to_duration(60)))]
    await stub.BatchUpdateTimers(
        pb.BatchUpdateTimersRequest(run_id="run", node_id="a", lease=5, actions=actions)
    )
    older: dict[str, Any] = {"run_id": "run", "node_id": "a", "lease": 4}
    for call in (
        stub.BatchUpdateTimers(pb.BatchUpdateTimersRequest(**older, actions=actions)),
        stub.ClearTimers(pb.ClearTimersRequest(**older, worker_id="0@1")),
    ):
        assert (await refusal(call)).reason == "LEASE_LOST"
    newer = pb.ClearTimersRequest(run_id="run", node_id="a", lease=5, worker_id="0@1")
    assert (await stub.ClearTimers(newer)).cleared == 1
    assert (await stub.ClearTimers(newer)).cleared == 0


async def test_timers_are_listed_by_state(service: Service) -> None:
    """The filter takes one state, several, or none for all; a timer that learns shows no end."""
    stub, stream = service.stub(), Stream(service)
    await stream.send(
        subscribe(),
        acquire("counting", 60, 1),
        acquire("learning", 0, 2, learned_as="step"),
        acquire("offered", 0.01, 3),
        act(registered=pb.Registered()),
    )
    await stream.next()
    assert (await stream.next()).scope == "offered"
    await stub.AcquireTimer(
        pb.AcquireTimerRequest(
            run_id="run", node_id="b", worker_id="0@1", scope="unclaimed", after=to_duration(0.01)
        )
    )

    async def scopes(*states: pb.TimerState.ValueType) -> list[str]:
        answer = await stub.ListTimers(pb.ListTimersRequest(states=states))
        return [timer.scope for timer in answer.timers]

    unclaimed = frozenset({TimerState.UNCLAIMED})
    await until(lambda: any(service.watchdog.table.timers(0.0, states=unclaimed)))
    assert await scopes(pb.TIMER_STATE_UNCLAIMED) == ["unclaimed"]
    assert await scopes(pb.TIMER_STATE_COUNTING) == ["counting"]
    assert await scopes(pb.TIMER_STATE_OFFERED, pb.TIMER_STATE_UNCLAIMED) == ["offered", "unclaimed"]
    assert len(await scopes()) == 4
    (learning,) = (await stub.ListTimers(pb.ListTimersRequest(states=[pb.TIMER_STATE_LEARNING]))).timers
    assert (learning.scope, learning.learned_as) == ("learning", "step")
    assert not learning.HasField("after")
    assert not learning.HasField("remaining")
    for wrong in ([pb.TIMER_STATE_UNSPECIFIED], [17], [pb.TIMER_STATE_COUNTING] * 5):
        refused = await refusal(stub.ListTimers(pb.ListTimersRequest(states=wrong)))  # type: ignore[arg-type]
        assert refused.field_violations[0][0] == "states"


async def test_scopes_are_listed_and_forgotten(service: Service) -> None:
    """They are listed in pages, with the sources of the durations; a forgotten scope has no duration."""
    stub, stream = service.stub(), Stream(service)
    observed = [
        act(observe=pb.Observe(scope=f"s{n}", count=n + 18, longest=to_duration(n))) for n in range(1, 6)
    ]
    await stream.send(
        subscribe(), acquire("t", 0, 1, learned_as="s5"), *observed, act(registered=pb.Registered())
    )
    await stream.next()
    pages, token = [], ""
    while True:
        page = await stub.ListScopes(pb.ListScopesRequest(run_id="run", page_size=2, page_token=token))
        assert (page.warm_up, page.factor, page.least) == (20, 5.0, to_duration(10))
        pages.append([(scope.scope, scope.count, scope.after.seconds, scope.timers) for scope in page.scopes])
        token = page.next_page_token
        if not token:
            break
    assert pages == [
        [("s1", 19, 0, 0), ("s2", 20, 10, 0)],
        [("s3", 21, 15, 0), ("s4", 22, 20, 0)],
        [("s5", 23, 25, 1)],
    ]
    assert (await stub.ForgetScopes(pb.ForgetScopesRequest(run_id="run", scope="s5"))).forgotten == 1
    assert (await stub.ForgetScopes(pb.ForgetScopesRequest(run_id="other"))).forgotten == 0
    while (told := await stream.next()).scope != "s5" or told.count:
        pass
    assert (await stub.ForgetScopes(pb.ForgetScopesRequest(run_id="run"))).forgotten == 4
    (left,) = (await stub.ListScopes(pb.ListScopesRequest())).scopes
    assert (left.scope, left.count, left.HasField("after"), left.timers) == ("s5", 0, False, 1)


async def test_progress_of_a_run(service: Service) -> None:
    """The slowest come first, as many as requested; a run without progress is no error."""
    stub, stream = service.stub(), Stream(service)
    told = [act(progress=pb.Progress(worker_id=f"{n}@1", rank=n, step=n % 7 + 3)) for n in range(20)]
    await stream.send(subscribe(), *told, act(registered=pb.Registered()))
    await stream.next()
    progress = await stub.GetProgress(pb.GetProgressRequest(run_id="run"))
    assert (progress.workers, progress.lowest_step, progress.highest_step) == (20, 3, 9)
    assert [worker.rank for worker in progress.slowest] == [0, 7, 14, 1, 8, 15, 2, 9, 16, 3]
    assert progress.slowest[0].node_id == "a"
    assert progress.stall_after == to_duration(600)
    assert not progress.HasField("stalled")
    assert len((await stub.GetProgress(pb.GetProgressRequest(run_id="run", page_size=3))).slowest) == 3
    whole = await stub.GetProgress(pb.GetProgressRequest(run_id="run", page_size=10**6))
    assert (len(whole.slowest), whole.next_page_token) == (20, "")
    slowest: list[pb.WorkerProgress] = []
    request_ = pb.GetProgressRequest(run_id="run", page_size=7)
    while True:
        page = await stub.GetProgress(request_)
        assert page.lowest_step == whole.lowest_step
        slowest += page.slowest
        request_.page_token = page.next_page_token
        if not request_.page_token:
            break
    assert [each.worker_id for each in slowest] == [each.worker_id for each in whole.slowest]
    assert (await stub.GetProgress(pb.GetProgressRequest(run_id="none"))).workers == 0


@pytest.mark.parametrize(
    ("field", "method", "request_"),
    [
        ("run_id", "GetProgress", pb.GetProgressRequest()),
        ("page_size", "GetProgress", pb.GetProgressRequest(run_id="run", page_size=-1)),
        ("run_id", "ForgetScopes", pb.ForgetScopesRequest(scope="s")),
        ("scope", "ForgetScopes", pb.ForgetScopesRequest(run_id="run", scope="x" * 513)),
        ("page_size", "ListScopes", pb.ListScopesRequest(page_size=-1)),
        ("page_token", "ListScopes", pb.ListScopesRequest(page_token="WyJhIl0=")),  # noqa: S106 - ["a"]
        ("run_id", "ClearTimers", pb.ClearTimersRequest(node_id="a", worker_id="0@1")),
        ("node_id", "ClearTimers", pb.ClearTimersRequest(run_id="run", worker_id="0@1")),
        ("worker_id", "ClearTimers", pb.ClearTimersRequest(run_id="run", node_id="a")),
    ],
)
async def test_a_malformed_field_is_named(service: Service, field: str, method: str, request_: Any) -> None:
    """It gets INVALID_ARGUMENT, in any state."""
    error = await refusal(getattr(service.stub(), method)(request_))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert [violation[0] for violation in error.field_violations] == [field]
