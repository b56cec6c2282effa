"""Refusals of the core as gRPC errors: one table."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import singledispatch

from grpc import StatusCode

from rallypoint.rendezvous.core import refusals
from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.serving.errors import ServiceError


class StreamReplaced(Exception):
    """The node opened a newer stream with the same lease."""


class Draining(Exception):
    """The server is going away: its streams end, and are resumed elsewhere or later."""

    def __str__(self) -> str:
        return "the server is going away: reconnect and resume"


def translate(error: Exception) -> ServiceError | None:
    """The gRPC error of a refusal; None for what is none."""
    return _translate(error)


@singledispatch
def _translate(error: Exception) -> ServiceError | None:
    return None


def _as(
    kind: type[Exception],
    code: StatusCode,
    reason: str,
    metadata: Callable[[Exception], dict[str, str]] = lambda _: {},
) -> None:
    _translate.register(kind, lambda error: ServiceError(code, reason, str(error), metadata=metadata(error)))


def _fields(*names: str) -> Callable[[Exception], dict[str, str]]:
    return lambda error: {name: str(getattr(error, name)) for name in names}


def _differences(error: Exception) -> dict[str, str]:
    assert isinstance(error, refusals.SettingsDiffer)
    return {
        name: ours.name if isinstance(ours, IntEnum) else str(ours)
        for name, (ours, _) in error.differences.items()
    }


def _lost_lease(error: Exception) -> dict[str, str]:
    assert isinstance(error, refusals.LeaseLost)
    facts = _fields("run_id", "node_id", "lease")(error)
    return facts if error.current is None else {**facts, "superseded_by": str(error.current)}


def _end_of_run(error: Exception) -> dict[str, str]:
    assert isinstance(error, refusals.RunIsClosed)
    return {"run_id": error.run_id, "outcome": error.outcome.name}


_as(refusals.RunNotFound, StatusCode.NOT_FOUND, "RUN_NOT_FOUND", _fields("run_id"))
_as(refusals.RunIsClosed, StatusCode.FAILED_PRECONDITION, "RUN_CLOSED", _end_of_run)
_as(refusals.SettingsDiffer, StatusCode.FAILED_PRECONDITION, "SETTINGS_DIFFER", _differences)
_as(refusals.LeaseLost, StatusCode.FAILED_PRECONDITION, "LEASE_LOST", _lost_lease)
_as(
    refusals.JoinTimedOut,
    StatusCode.FAILED_PRECONDITION,
    "JOIN_TIMED_OUT",
    _fields("run_id", "node_id", "min_nodes"),
)
_as(
    refusals.RevisionAhead,
    StatusCode.OUT_OF_RANGE,
    "REVISION_AHEAD",
    _fields("run_id", "revision", "current"),
)
_as(StreamReplaced, StatusCode.ABORTED, "STREAM_REPLACED")
_as(JournalError, StatusCode.UNAVAILABLE, "JOURNAL_BROKEN")
_translate.register(
    Draining, lambda error: ServiceError(StatusCode.UNAVAILABLE, "DRAINING", str(error), retry_after=0.1)
)
