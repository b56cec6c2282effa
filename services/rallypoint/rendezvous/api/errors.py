"""Refusals of rendezvous, the store and the fenced states as gRPC errors: one table."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import singledispatch

from grpc import StatusCode

from rallypoint.rendezvous.base import refusals as state
from rallypoint.rendezvous.base import refusals as store
from rallypoint.rendezvous.base.errors import (
    Draining,
    EtcdAway,
    EtcdFull,
    EventsCompacted,
    NotOwner,
    OutcomeUnknown,
    RunBroken,
    StreamReplaced,
)
from rallypoint.rendezvous.base.limits import LimitReached
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rpc.errors import ServiceError, json_list


@singledispatch
def translate(error: Exception) -> ServiceError | None:
    """Return the gRPC error of a refusal; None if `error` is not a refusal."""
    return None


def _as(
    kind: type[Exception],
    code: StatusCode,
    reason: str,
    metadata: Callable[[Exception], dict[str, str]] = lambda _: {},
) -> None:
    """Register the gRPC error of a kind of error; its `retry_after`, if it has one, becomes the RetryInfo."""
    translate.register(
        kind,
        lambda error: ServiceError(
            code,
            reason,
            str(error),
            metadata=metadata(error),
            retry_after=getattr(error, "retry_after", None),
        ),
    )


def _fields(*names: str, **renamed: str) -> Callable[[Exception], dict[str, str]]:
    fields = {name: name for name in names} | renamed
    return lambda error: {key: str(getattr(error, name)) for key, name in fields.items()}


def _differences(error: Exception) -> dict[str, str]:
    assert isinstance(error, commands.SettingsDiffer)
    return {
        name: ours.name if isinstance(ours, IntEnum) else str(ours)
        for name, (ours, _) in error.differences.items()
    }


def _lost_lease(error: Exception) -> dict[str, str]:
    assert isinstance(error, commands.LeaseLost)
    facts = _fields("run_id", "node_id", "lease")(error)
    return facts if error.current is None else {**facts, "superseded_by": str(error.current)}


def _end_of_run(error: Exception) -> dict[str, str]:
    assert isinstance(error, commands.RunIsClosed)
    return {"run_id": error.run_id, "outcome": error.outcome.name}


def _owner(error: Exception) -> dict[str, str]:
    assert isinstance(error, NotOwner | OutcomeUnknown)
    cause = error.cause if isinstance(error, NotOwner) else ""
    metadata = {"run_id": error.run_id, "owner_address": error.owner or "", "cause": cause}
    return {name: value for name, value in metadata.items() if value}


def _missing_keys(error: Exception) -> dict[str, str]:
    assert isinstance(error, store.KeyWaitTimedOut)
    return {"missing_count": str(len(error.missing)), "missing": json_list(error.shown)}


_as(commands.RunNotFound, StatusCode.NOT_FOUND, "RUN_NOT_FOUND", _fields("run_id"))
_as(commands.RunInUse, StatusCode.FAILED_PRECONDITION, "RUN_IN_USE", _fields("run_id", "nodes"))
_as(commands.RunIsClosed, StatusCode.FAILED_PRECONDITION, "RUN_CLOSED", _end_of_run)
_as(commands.RunIsEnding, StatusCode.FAILED_PRECONDITION, "RUN_ENDING", _fields("run_id", "nodes"))
_as(commands.SettingsDiffer, StatusCode.FAILED_PRECONDITION, "SETTINGS_DIFFER", _differences)
_as(commands.LeaseLost, StatusCode.FAILED_PRECONDITION, "LEASE_LOST", _lost_lease)
_as(commands.LeaseNotProven, StatusCode.PERMISSION_DENIED, "LEASE_NOT_PROVEN", _fields("run_id", "node_id"))
_as(commands.NodeIdTaken, StatusCode.PERMISSION_DENIED, "NODE_ID_TAKEN", _fields("run_id", "node_id"))
_as(
    commands.JoinTimedOut,
    StatusCode.FAILED_PRECONDITION,
    "JOIN_TIMED_OUT",
    _fields("run_id", "node_id", "min_nodes"),
)
_as(
    commands.NodeIsEvicted, StatusCode.FAILED_PRECONDITION, "NODE_EVICTED", _fields("run_id", "node_id", "by")
)
_as(commands.TooManyEvicted, StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_EVICTED", _fields("run_id", "limit"))
_as(
    commands.RevisionAhead,
    StatusCode.OUT_OF_RANGE,
    "REVISION_AHEAD",
    _fields("run_id", "revision", "current"),
)
_as(EventsCompacted, StatusCode.OUT_OF_RANGE, "EVENTS_COMPACTED", _fields("run_id", "oldest_revision"))
_as(StreamReplaced, StatusCode.ABORTED, "STREAM_REPLACED")
_as(JournalError, StatusCode.UNAVAILABLE, "JOURNAL_BROKEN")
_as(Draining, StatusCode.UNAVAILABLE, "DRAINING")
_as(NotOwner, StatusCode.UNAVAILABLE, "NOT_OWNER", _owner)
_as(RunBroken, StatusCode.FAILED_PRECONDITION, "RUN_BROKEN", _fields("run_id", "cause"))
_as(EtcdAway, StatusCode.UNAVAILABLE, "ETCD_UNAVAILABLE")
_as(EtcdFull, StatusCode.RESOURCE_EXHAUSTED, "ETCD_FULL")
_as(OutcomeUnknown, StatusCode.UNAVAILABLE, "OWNERSHIP_LOST", _owner)
translate.register(
    LimitReached,
    lambda error: ServiceError(
        StatusCode.RESOURCE_EXHAUSTED,
        error.reason,
        str(error),
        metadata=_fields("run_id", "limit")(error),
        retry_after=error.retry_after,
    ),
)

_round = _fields("round", "current_round")
_as(commands.RoundOver, StatusCode.FAILED_PRECONDITION, "ROUND_OVER", _round)
_as(store.RoundNotBegun, StatusCode.FAILED_PRECONDITION, "ROUND_NOT_BEGUN", _round)
_as(store.NotAnInteger, StatusCode.FAILED_PRECONDITION, "NOT_AN_INTEGER")
_as(store.IntegerOverflow, StatusCode.FAILED_PRECONDITION, "INTEGER_OVERFLOW")
_as(store.ValueTooLarge, StatusCode.FAILED_PRECONDITION, "VALUE_TOO_LARGE", _fields("limit_bytes"))
_as(store.KeyWaitTimedOut, StatusCode.DEADLINE_EXCEEDED, "KEY_WAIT_TIMED_OUT", _missing_keys)
_as(store.StoresFull, StatusCode.RESOURCE_EXHAUSTED, "STORES_FULL", _fields("limit_bytes"))
_as(store.RunStoreFull, StatusCode.RESOURCE_EXHAUSTED, "RUN_STORE_FULL", _fields("limit_bytes"))
_as(store.TooManyKeys, StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_KEYS", _fields("limit_keys"))
_as(
    store.AnswerTooLarge, StatusCode.RESOURCE_EXHAUSTED, "ANSWER_TOO_LARGE", _fields("limit_bytes", "fitting")
)
_as(store.TooManyWaiters, StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WAITERS")
_as(store.StoreBusy, StatusCode.RESOURCE_EXHAUSTED, "STORE_BUSY")
_as(
    store.OperationSuperseded,
    StatusCode.FAILED_PRECONDITION,
    "OPERATION_SUPERSEDED",
    _fields(latest_sequence="latest"),
)
_as(store.OperationReused, StatusCode.INVALID_ARGUMENT, "OPERATION_REUSED")
_as(store.JournalFailed, StatusCode.UNAVAILABLE, "JOURNAL_FAILED")

_as(state.TooManyStates, StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STATES", _fields("limit"))
_as(state.StatesFull, StatusCode.RESOURCE_EXHAUSTED, "STATES_FULL", _fields("limit_bytes"))
_as(state.StateBusy, StatusCode.RESOURCE_EXHAUSTED, "STATE_BUSY")
_as(state.TooManyWatchers, StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS", _fields("limit"))
