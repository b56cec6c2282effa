"""Calls of operators' commands: one call to a service, with a time limit and clear errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import grpc

from rallypoint.agent.v1 import supervisor_service_pb2_grpc as supervisor_grpc
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc
from rallypoint.rpc.calls import call_any
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import CallTarget, SettingError
from rallypoint.rpc.errors import GONE, ServiceError, tls_advice
from rallypoint.rpc.loop import run
from rallypoint.rpc.replica_client import ReplicaClient
from rallypoint.server.v1 import server_service_pb2 as server_pb
from rallypoint.server.v1 import server_service_pb2_grpc as server_grpc
from rallypoint.serving.info import VERSION
from rallypoint.timer.v1 import timer_service_pb2 as timer_pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as timer_grpc

# Longest time in seconds for a preferred call, before the call that any replica can serve.
_PREFERRED = 2.0

_MOST_NAMES = 20  # of runs in one line of output

_T = TypeVar("_T")
_Stub = TypeVar("_Stub")


@dataclass(frozen=True, slots=True)
class QueriedService(Generic[_Stub]):
    """A service as commands call it: its name, the flag with its address, and its stub."""

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


def other_version(target: CallTarget) -> str:
    """Return one line about a rendezvous service that has another version than this command; empty: it has not.

    Also empty if the service does not reply within `_PREFERRED` seconds.
    """

    async def version(stub: server_grpc.ServerServiceAsyncStub) -> str:
        try:
            return f"version {(await stub.GetServerInfo(server_pb.GetServerInfoRequest())).version}"
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return "an older version"
            raise

    server = QueriedService(RENDEZVOUS.name, RENDEZVOUS.flag, server_grpc.ServerServiceStub)
    with suppress(SettingError):
        found = call(server, replace(target, timeout=_PREFERRED), version)
        if found != f"version {VERSION}":
            return f"the rendezvous service has {found}, and this command version {VERSION}"
    return ""


def call(
    service: QueriedService[_Stub],
    target: CallTarget,
    request: Callable[[_Stub], Awaitable[_T]],
    *,
    preferred: Callable[[_Stub], Awaitable[_T]] | None = None,
) -> _T:
    """Call a service, within the timeout of `target`.

    Args:
        request: Makes the calls; again at another replica after a lost connection.
        preferred: Tried first, for a part of the time: a request with a better reply that is not always available.

    Raises:
        SettingError: The service is unreachable, or refused; one line.
    """
    endpoint, security, timeout = target.endpoint, target.security, target.timeout

    async def attempt() -> _T:
        async with AsyncExitStack() as stack:
            if service.name == RENDEZVOUS.name:
                client = await stack.enter_async_context(ReplicaClient(endpoint, security))
            else:
                client = ReplicaClient.over(await stack.enter_async_context(open_channel(endpoint, security)))
            try:
                async with asyncio.timeout(timeout):
                    if preferred is not None:
                        # If no service answers at all, the other request reports it.
                        with suppress(TimeoutError, _NoServiceAnswered):
                            async with asyncio.timeout(min(_PREFERRED, timeout / 2)):
                                return await _call_most_complete(client, service.stub, preferred)
                    return await call_any(client, service.stub, request)
            except TimeoutError:
                raise SettingError(f"no {service.name} answered at {endpoint} within {timeout:g} s") from None
            except ServiceError as error:
                raise refusal(target, error, service) from None

    return run(attempt())


class _NoServiceAnswered(Exception):
    """No replica can send the preferred reply."""


async def _call_most_complete(
    client: ReplicaClient,
    stub: Callable[[grpc.aio.Channel], _Stub],
    request: Callable[[_Stub], Awaitable[_T]],
) -> _T:
    try:
        return await call_any(client, stub, request)
    except ServiceError as error:
        if error.code in GONE:
            raise _NoServiceAnswered from None
        raise


def refusal(
    target: CallTarget, error: ServiceError, service: QueriedService[Any] = RENDEZVOUS
) -> SettingError:
    """Return one line about a failed call, with advice."""
    name, flag, endpoint = service.name, service.flag, target.endpoint
    # Reasons set by gRPC or by our client, not by a service.
    if error.reason in (grpc.StatusCode.UNAVAILABLE.name, "NO_CONNECTION", "NO_ANSWER"):
        if endpoint.startswith("unix:") and "No such file" in error.message:
            return SettingError(
                f"no {name} of this user runs on this host (it would be at {endpoint}; another session may have "
                f"another folder, see RALLYPOINT_RUNTIME_DIR): start it, or give {flag}"
            )
        advice = tls_advice(error.message, target.security) or f"check {flag}"
        return SettingError(f"no {name} answers at {endpoint}: {error.message}; {advice}")
    if error.reason == grpc.StatusCode.UNIMPLEMENTED.name:
        return SettingError(f"the server at {endpoint} is not a {name} ({error.message}); check {flag}")
    return SettingError(f"{endpoint}: {error.message} ({error.reason})")


# ---- Responses that come in pages, put together.


async def all_runs(stub: pb_grpc.RendezvousServiceAsyncStub) -> pb.ListRunsResponse:
    """Return every run, without its nodes."""
    whole = await stub.ListRuns(pb.ListRunsRequest())
    while whole.next_page_token:
        page = await stub.ListRuns(pb.ListRunsRequest(page_token=whole.next_page_token))
        whole.next_page_token = ""  # MergeFrom keeps the later of two values, unless it is empty
        whole.MergeFrom(page)
    return whole


async def only_run(stub: pb_grpc.RendezvousServiceAsyncStub) -> str:
    """Return the name of the only run that is not closed, or else of the only run.

    Raises:
        SettingError: There is none, or several.
    """
    runs = (await all_runs(stub)).runs
    chosen = [run.run_id for run in runs if run.phase != pb.PHASE_CLOSED] or [run.run_id for run in runs]
    if len(chosen) != 1:
        names = ", ".join(chosen[:_MOST_NAMES]) + (", ..." if len(chosen) > _MOST_NAMES else "")
        raise SettingError(
            f"there are {len(chosen)} runs; give RUN_ID: {names}" if chosen else "there are no runs"
        )
    return chosen[0]


async def whole_run(
    run_id: str, stub: pb_grpc.RendezvousServiceAsyncStub, *, owner_only: bool = False
) -> pb.GetRunResponse:
    """Return a run with all its nodes; each node once even if the run changes meanwhile.

    Args:
        owner_only: Accept a reply only from the replica that owns the run: it knows which nodes are connected.
    """
    whole = await stub.GetRun(pb.GetRunRequest(run_id=run_id, owner_only=owner_only))
    if len(whole.run.nodes) < whole.run.node_count:
        nodes = {node.node_id: node for node in await all_nodes(run_id, stub, owner_only=owner_only)}
        del whole.run.nodes[:]
        whole.run.nodes.extend(nodes.values())
    return whole


async def all_nodes(
    run_id: str, stub: pb_grpc.RendezvousServiceAsyncStub, *, owner_only: bool = False
) -> list[pb.Node]:
    """Return the nodes of a run; a node may be in the list twice, or not at all, if the run changes meanwhile."""
    nodes: list[pb.Node] = []
    request = pb.ListNodesRequest(run_id=run_id, owner_only=owner_only)
    while True:
        page = await stub.ListNodes(request)
        nodes.extend(page.nodes)
        request.page_token = page.next_page_token
        if not request.page_token:
            return nodes


# ---- Responses of a timer service that come in pages, put together.


_PAGE = 1_000  # the largest page that the service sends

RAN_OUT = (timer_pb.TIMER_STATE_UNCLAIMED, timer_pb.TIMER_STATE_OFFERED)
_RUNNING = (timer_pb.TIMER_STATE_COUNTING, timer_pb.TIMER_STATE_LEARNING)


async def most_urgent(
    run_id: str, node_id: str, most: int, *, expired_only: bool, stub: timer_grpc.TimerServiceAsyncStub
) -> tuple[list[timer_pb.Timer], bool]:
    """Return the most urgent timers of a run and a node ("": all), and True if there are more.

    Order: expired timers, the oldest first; running timers, the soonest first; timers that are still learning. If there
    are more than `most`, some running timers are left out: those with the last names.
    """
    timers: list[timer_pb.Timer] = []
    # In this order: a timer that expires in between is in both responses rather than in neither.
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
    """Return the timers in these states; `most` + 1 of them if there are more."""
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
    """Return every scope of a run ("": of all runs)."""
    whole = page = await stub.ListScopes(timer_pb.ListScopesRequest(run_id=run_id))
    while page.next_page_token:
        page = await stub.ListScopes(
            timer_pb.ListScopesRequest(run_id=run_id, page_token=page.next_page_token)
        )
        whole.scopes.extend(page.scopes)
    whole.next_page_token = ""
    return whole
