"""What the commands for operators share: one call to a service, bounded, with clear errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from rallypoint.agent.v1 import supervisor_service_pb2_grpc as supervisor_grpc
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc
from rallypoint.rpc.calls import call_any
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ClientTLS, SettingError
from rallypoint.rpc.errors import GONE, ServiceError, tls_advice
from rallypoint.rpc.loop import run
from rallypoint.rpc.replica_client import ReplicaClient
from rallypoint.timer.v1 import timer_service_pb2 as timer_pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as timer_grpc

# Seconds for a question that is better answered, before one is asked that anybody answers.
_PREFERRED = 2.0

_T = TypeVar("_T")
_Stub = TypeVar("_Stub")


@dataclass(frozen=True, slots=True)
class QueriedService(Generic[_Stub]):
    """What is asked: the service's name, the flag with its address, and its stub."""

    name: str
    flag: str
    stub: Callable[[grpc.aio.Channel], _Stub]


RENDEZVOUS: QueriedService[rendezvous_grpc.RendezvousServiceAsyncStub] = QueriedService(
    "rendezvous service", "--rdzv-endpoint", rendezvous_grpc.RendezvousServiceStub
)
TIMER: QueriedService[timer_grpc.TimerServiceAsyncStub] = QueriedService(
    "timer service", "--timer-endpoint", timer_grpc.TimerServiceStub
)
SUPERVISOR: QueriedService[supervisor_grpc.SupervisorServiceAsyncStub] = QueriedService(
    "agent", "--agent", supervisor_grpc.SupervisorServiceStub
)


def call_rendezvous(
    endpoint: str,
    tls: ClientTLS | None,
    timeout: float,
    question: Callable[[rendezvous_grpc.RendezvousServiceAsyncStub], Awaitable[_T]],
    *,
    repeatable: bool = True,
    preferred: Callable[[rendezvous_grpc.RendezvousServiceAsyncStub], Awaitable[_T]] | None = None,
) -> _T:
    """Ask a rendezvous service, within `timeout` seconds.

    Args:
        endpoint: Where it is; of several replicas, separated by commas, whichever answers.
        tls: How to speak with it.
        timeout: Seconds for it all.
        question: Makes the calls.
        repeatable: Whether what is asked may be done twice, so that another replica is asked where one was lost.
        preferred: Asked first, for a part of the time: a question that is answered better, but not always.

    Raises:
        SettingError: It could not be reached, or refused; one line.
    """
    return _call(RENDEZVOUS, endpoint, tls, timeout, question, repeatable=repeatable, preferred=preferred)


def call_timer(
    endpoint: str,
    tls: ClientTLS | None,
    timeout: float,
    question: Callable[[timer_grpc.TimerServiceAsyncStub], Awaitable[_T]],
) -> _T:
    """Ask a timer service, within `timeout` seconds.

    Raises:
        SettingError: It could not be reached, or refused; one line.
    """
    return _call(TIMER, endpoint, tls, timeout, question)


def call_agent(
    endpoint: str,
    tls: ClientTLS | None,
    timeout: float,
    question: Callable[[supervisor_grpc.SupervisorServiceAsyncStub], Awaitable[_T]],
) -> _T:
    """Ask an agent, within `timeout` seconds.

    Raises:
        SettingError: It could not be reached, or refused; one line.
    """
    return _call(SUPERVISOR, endpoint, tls, timeout, question)


def _call(
    asked: QueriedService[_Stub],
    endpoint: str,
    tls: ClientTLS | None,
    timeout: float,
    question: Callable[[_Stub], Awaitable[_T]],
    *,
    repeatable: bool = True,
    preferred: Callable[[_Stub], Awaitable[_T]] | None = None,
) -> _T:
    async def call() -> _T:
        async with AsyncExitStack() as stack:
            if asked.name == RENDEZVOUS.name:
                board = await stack.enter_async_context(ReplicaClient(endpoint, tls))
            else:
                board = ReplicaClient.over(await stack.enter_async_context(open_channel(endpoint, tls)))
            try:
                async with asyncio.timeout(timeout):
                    if preferred is not None:
                        # Whether nobody answers at all is told by the other question.
                        with suppress(TimeoutError, _NoServiceAnswered):
                            async with asyncio.timeout(min(_PREFERRED, timeout / 2)):
                                return await _call_most_complete(board, asked.stub, preferred)
                    return await call_any(board, asked.stub, question, repeatable=repeatable)
            except TimeoutError:
                raise SettingError(f"no {asked.name} answered at {endpoint} within {timeout:g} s") from None
            except ServiceError as error:
                raise refusal(endpoint, tls, error, asked) from None

    return run(call())


class _NoServiceAnswered(Exception):
    """Of those who could answer best."""


async def _call_most_complete(
    board: ReplicaClient,
    stub: Callable[[grpc.aio.Channel], _Stub],
    question: Callable[[_Stub], Awaitable[_T]],
) -> _T:
    try:
        return await call_any(board, stub, question)
    except ServiceError as error:
        if error.code in GONE:
            raise _NoServiceAnswered from None
        raise


def refusal(
    endpoint: str,
    tls: ClientTLS | None,
    error: ServiceError,
    asked: QueriedService[_Stub] | None = None,
) -> SettingError:
    """Why a call to a service, the rendezvous service unless told, failed: a line with what to do about it."""
    name, flag = (asked.name, asked.flag) if asked is not None else (RENDEZVOUS.name, RENDEZVOUS.flag)
    # gRPC's own reasons, which nobody of ours said, and that none came of it.
    if error.reason in (grpc.StatusCode.UNAVAILABLE.name, "NO_CONNECTION", "NO_ANSWER"):
        advice = tls_advice(error.message, tls) or f"check {flag}"
        return SettingError(f"no {name} answers at {endpoint}: {error.message}; {advice}")
    if error.reason == grpc.StatusCode.UNIMPLEMENTED.name:
        return SettingError(f"what answers at {endpoint} is no {name} ({error.message}); check {flag}")
    return SettingError(f"{endpoint}: {error.message} ({error.reason})")


# ---- Answers that come a page at a time, put together.


async def all_runs(stub: pb_grpc.RendezvousServiceAsyncStub) -> pb.ListRunsResponse:
    """Every run, without its nodes."""
    whole = await stub.ListRuns(pb.ListRunsRequest())
    while whole.next_page_token:
        page = await stub.ListRuns(pb.ListRunsRequest(page_token=whole.next_page_token))
        whole.next_page_token = ""  # of two values, the later one is kept, unless it is empty
        whole.MergeFrom(page)
    return whole


async def whole_run(
    run_id: str, stub: pb_grpc.RendezvousServiceAsyncStub, *, owner_only: bool = False
) -> pb.GetRunResponse:
    """A run with all its nodes. One that changes meanwhile is shown as it was first, each of its nodes once.

    Args:
        run_id: The run.
        stub: Whom to ask.
        owner_only: Have only the replica answer that owns the run, which knows who is connected.
    """
    page = whole = await stub.GetRun(pb.GetRunRequest(run_id=run_id, owner_only=owner_only))
    seen = {node.node_id for node in whole.run.nodes}
    while page.next_page_token:
        request = pb.GetRunRequest(run_id=run_id, page_token=page.next_page_token, owner_only=owner_only)
        page = await stub.GetRun(request)
        whole.run.nodes.extend(node for node in page.run.nodes if node.node_id not in seen)
        seen.update(node.node_id for node in page.run.nodes)
    whole.next_page_token = ""
    return whole


# ---- A timer service's answers that come a page at a time, put together.


_PAGE = 1_000  # the most that a page may have

RAN_OUT = (timer_pb.TIMER_STATE_UNCLAIMED, timer_pb.TIMER_STATE_OFFERED)
_RUNNING = (timer_pb.TIMER_STATE_COUNTING, timer_pb.TIMER_STATE_LEARNING)


async def most_urgent(
    run_id: str, node_id: str, most: int, *, expired_only: bool, stub: timer_grpc.TimerServiceAsyncStub
) -> tuple[list[timer_pb.Timer], bool]:
    """Timers of a run and a node ("": of all), the most urgent first, and whether there are more.

    First those that ran out, the longest ago first, then those that will, the soonest first, then those that
    can't yet. If there are more than `most`, some that will are left out: those whose names come last.
    """
    timers: list[timer_pb.Timer] = []
    # In this order: one that runs out in between is in both answers, rather than in none.
    if not expired_only:
        timers += await _listed(run_id, node_id, most, _RUNNING, stub)
    ran_out = await _listed(run_id, node_id, most, RAN_OUT, stub)
    gone = {_name(timer) for timer in ran_out}
    found = ran_out + [timer for timer in timers if _name(timer) not in gone]
    left_out = len(found) > most
    return sorted(found[:most], key=_urgency), left_out


async def _listed(
    run_id: str,
    node_id: str,
    most: int,
    states: Sequence[timer_pb.TimerState.ValueType],
    stub: timer_grpc.TimerServiceAsyncStub,
) -> list[timer_pb.Timer]:
    """Timers in those states; one more than `most` tells that there are more."""
    timers: list[timer_pb.Timer] = []
    token = ""
    while len(timers) <= most:
        request = timer_pb.ListTimersRequest(
            run_id=run_id,
            node_id=node_id,
            states=states,
            page_size=min(_PAGE, most + 1 - len(timers)),
            page_token=token,
        )
        page = await stub.ListTimers(request)
        timers += page.timers
        token = page.next_page_token
        if not token:
            break
    return timers


def _name(timer: timer_pb.Timer) -> tuple[str, str, str, str]:
    return timer.run_id, timer.node_id, timer.worker_id, timer.scope


def _urgency(timer: timer_pb.Timer) -> tuple[bool, bool, int]:
    learning = timer.state == timer_pb.TIMER_STATE_LEARNING
    return timer.state not in RAN_OUT, learning, timer.remaining.ToNanoseconds()


async def all_scopes(run_id: str, stub: timer_grpc.TimerServiceAsyncStub) -> timer_pb.ListScopesResponse:
    """Every scope of a run ("": of all)."""
    whole = page = await stub.ListScopes(timer_pb.ListScopesRequest(run_id=run_id))
    while page.next_page_token:
        page = await stub.ListScopes(
            timer_pb.ListScopesRequest(run_id=run_id, page_token=page.next_page_token)
        )
        whole.scopes.extend(page.scopes)
    whole.next_page_token = ""
    return whole
