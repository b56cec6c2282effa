"""Assembly of the timer service: alone in a process, or beside other services in one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from grpc import StatusCode

from rallypoint.rpc.errors import ServiceError, invalid
from rallypoint.server.v1 import server_service_pb2 as server_pb
from rallypoint.serving.flow import ServerDraining
from rallypoint.serving.info import limits_of
from rallypoint.serving.policy import OPERATORS, READERS, TIMERS, Rights
from rallypoint.serving.server import Registration
from rallypoint.timer.core.values import (
    InvalidField,
    LeaseSuperseded,
    NotTheAgent,
    SubscriptionReplaced,
    TakeoverUnconfirmed,
    TimerRefused,
    TimerSettings,
    TooMany,
)
from rallypoint.timer.server.servicer import MAX_ACTIONS, MAX_PAGE, TimerServicer
from rallypoint.timer.server.watchdog import Watchdog
from rallypoint.timer.v1 import timer_service_pb2_grpc

# ---- The table of refusals and their gRPC errors.


# Seconds until a retry may find free capacity, or another server.
_RETRY_AFTER = 1.0


def translate(error: Exception) -> ServiceError | None:
    """Return the gRPC error of a refusal; None if `error` is not a refusal."""
    match error:
        case InvalidField():
            return invalid(error.field, error.problem)
        case LeaseSuperseded():
            numbers = {"lease": str(error.lease), "superseded_by": str(error.current)}
            return _error(StatusCode.FAILED_PRECONDITION, error, **_node(error), **numbers)
        case NotTheAgent():
            return _error(StatusCode.PERMISSION_DENIED, error, **_node(error))
        case SubscriptionReplaced():
            return _error(StatusCode.ABORTED, error, **_node(error))
        case TakeoverUnconfirmed():
            return _error(StatusCode.UNAVAILABLE, error, **_node(error))
        case TooMany():
            return _error(StatusCode.RESOURCE_EXHAUSTED, error, _RETRY_AFTER, limit=str(error.limit))
        case ServerDraining():
            message = "the timer service is draining; reconnect"
            return ServiceError(StatusCode.UNAVAILABLE, "DRAINING", message, retry_after=_RETRY_AFTER)
    return None


def _node(
    error: LeaseSuperseded | NotTheAgent | SubscriptionReplaced | TakeoverUnconfirmed,
) -> dict[str, str]:
    return {"run_id": error.run_id, "node_id": error.node_id}


def _error(
    code: StatusCode, error: TimerRefused, retry_after: float | None = None, /, **metadata: str
) -> ServiceError:
    return ServiceError(code, error.reason, str(error), metadata=metadata, retry_after=retry_after)


SERVICE_NAME = "rallypoint.timer.v1.TimerService"


@asynccontextmanager
async def timer_service(
    settings: TimerSettings | None = None, *, learned: Path | None = None
) -> AsyncIterator[Registration]:
    """Run a timer service for the duration of the context; yield its registration for a `Server` with `translate`.

    Args:
        settings: limits and durations.
        learned: the file for learned scopes; None: keep them in memory only.

    Raises:
        SettingError: the file can't be used; one line.
    """
    watchdog = Watchdog(settings)
    if learned is None:
        yield registration_of(watchdog)
        return
    # Here and not at the top: the timer service inside an agent keeps nothing, and saves the import.
    from rallypoint.timer.server.learned import LearnedFile, keep_learned  # noqa: PLC0415

    async with keep_learned(watchdog, LearnedFile(learned)):
        yield registration_of(watchdog)


def timer_registration() -> Registration:
    """Return a timer service with the default settings that keeps everything in memory."""
    return registration_of(Watchdog())


def registration_of(watchdog: Watchdog) -> Registration:
    """Return the service of a watchdog that the caller owns."""

    servicer = TimerServicer(watchdog)
    add = partial(timer_service_pb2_grpc.add_TimerServiceServicer_to_server, servicer)
    settings = watchdog.table.settings
    limits = limits_of(
        server_pb.TimerLimits,
        settings,
        timers=settings.max_timers,
        timers_per_node=settings.max_timers_per_node,
        nodes=settings.max_nodes,
        scopes_per_run=settings.max_scopes_per_run,
        learned_runs=settings.max_learned_runs,
        actions_per_message=MAX_ACTIONS,
        entries_per_page=MAX_PAGE,
        expiry_retention=settings.retention,
    )
    return Registration(
        SERVICE_NAME, add, servicer.drain, rights=_RIGHTS, limits=server_pb.ServerLimits(timer=limits)
    )


_RIGHTS: Rights = {
    "Supervise": TIMERS,
    "BatchUpdateTimers": TIMERS,
    "AcquireTimer": TIMERS,
    "ReleaseTimer": TIMERS,
    "ClearTimers": TIMERS,
    "ListTimers": READERS,
    "ListScopes": READERS,
    "ForgetScopes": OPERATORS,
    "GetProgress": READERS,
}
