"""Refusals of rendezvous, the store and the fenced states as gRPC errors: one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import singledispatch
from typing import ClassVar, TypeAlias

from grpc import StatusCode

from rallypoint.rendezvous.core import refusals
from rallypoint.rendezvous.fenced_state import refusals as state
from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.limits import LimitReached
from rallypoint.rendezvous.store import refusals as store
from rallypoint.serving.errors import ServiceError


class StreamReplaced(Exception):
    """The node opened a newer stream with the same lease."""


@dataclass(eq=False)
class EventsCompacted(Exception):
    """Events from `revision` on are asked for, and only those from `oldest_revision` on are kept."""

    run_id: str
    revision: int
    oldest_revision: int

    def __str__(self) -> str:
        return (
            f"event {self.revision} of run {self.run_id!r} is no longer kept: "
            f"the oldest that is has revision {self.oldest_revision}"
        )


class Draining(refusals.Refused):
    """The server is going away: its streams end, and are resumed elsewhere or later, as calls are repeated."""

    retry_after: ClassVar[float] = 0.1

    def __str__(self) -> str:
        return "the server is going away: connect again, and resume or repeat what was under way"


@dataclass(eq=False)
class NotOwner(refusals.Refused):
    """The run belongs to another replica, or to nobody at the moment. Nothing was done.

    Attributes:
        run_id: The run; "" where several were asked for.
        owner: Where the replica that owns it is reached, host:port; None: nobody owns it, or it is not known yet.
        cause: Why nobody does, if it is not just that nobody has come to it yet; for people.
    """

    run_id: str
    owner: str | None = None
    cause: str = ""

    @property
    def retry_after(self) -> float | None:
        """Seconds: while nobody owns the run, that will soon change. Who owns it can be asked at once."""
        return _NO_OWNER_RETRY if self.owner is None else None

    def __str__(self) -> str:
        return f"nothing was done: {_whose(self.run_id, self.owner, self.cause)}"


class EtcdAway(refusals.Refused):
    """This replica has no etcd at the moment: which runs there are, and where, is not known here. Nothing was done."""

    retry_after: ClassVar[float] = 0.5

    def __str__(self) -> str:
        return "this replica can't reach etcd at the moment: ask another replica, or this one in a moment"


@dataclass(eq=False)
class EtcdFull(refusals.Refused):
    """etcd takes no writes until somebody makes room. Nothing was done; what is only read is answered.

    Attributes:
        cause: What etcd says, and what to do.
    """

    cause: str
    retry_after: ClassVar[float] = 5.0

    def __str__(self) -> str:
        return f"nothing was done, for etcd is full: {self.cause}"


@dataclass(eq=False)
class RunBroken(refusals.Refused):
    """An error that nobody expected stopped the run; other runs go on. Nothing of its journal was deleted.

    Attributes:
        run_id: The run.
        cause: The kind of the error; the log of the service has it whole.
    """

    run_id: str
    cause: str

    def __str__(self) -> str:
        return (
            f"run {self.run_id!r} is stopped: the service met with an unexpected {self.cause} in it, which its log "
            "has in full; start the service again, with a version where that is mended, or use another run id"
        )


@dataclass(eq=False)
class OutcomeUnknown(refusals.Refused):
    """The run went to another replica while the request was under way: it may have taken effect, or not.

    Attributes:
        run_id: The run.
        owner: As that of `NotOwner`.
    """

    run_id: str
    owner: str | None = None

    @property
    def retry_after(self) -> float | None:
        """As that of `NotOwner`."""
        return _NO_OWNER_RETRY if self.owner is None else None

    def __str__(self) -> str:
        return f"the outcome is unknown: {_whose(self.run_id, self.owner)}"


# Seconds: claiming a shard takes some milliseconds once its owner's lease is over.
_NO_OWNER_RETRY = 0.1


def _whose(run_id: str, owner: str | None, cause: str = "") -> str:
    what = f"run {run_id!r}" if run_id else "what was asked for"
    if cause:
        return f"nobody owns {what}, and it can't be had: {cause}"
    if owner is None:
        return f"{what} is being taken over by another replica; ask again in a moment"
    return f"{what} belongs to the replica at {owner}; ask there"


Refusal: TypeAlias = Callable[[str], refusals.Refused]
"""Makes the refusal of a request for the run of that name. A new one each time: one that is raised again and again
would collect every traceback."""


def going_away(run_id: str) -> refusals.Refused:
    """The refusal of whoever asks a server that is going away."""
    return Draining()


def of_unknown_outcome(refusal: refusals.Refused) -> refusals.Refused:
    """What a request that was under way ends with, where one that was not begun is told `refusal`."""
    return OutcomeUnknown(refusal.run_id, refusal.owner) if isinstance(refusal, NotOwner) else refusal


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
    """Note how errors of a kind are told; `retry_after` of those that have one becomes the RetryInfo."""
    _translate.register(
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
    return lambda error: {told: str(getattr(error, name)) for told, name in fields.items()}


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


def _owner(error: Exception) -> dict[str, str]:
    assert isinstance(error, NotOwner | OutcomeUnknown)
    cause = error.cause if isinstance(error, NotOwner) else ""
    told = {"run_id": error.run_id, "owner": error.owner or "", "cause": cause}
    return {name: value for name, value in told.items() if value}


def _missing_keys(error: Exception) -> dict[str, str]:
    assert isinstance(error, store.KeyWaitTimedOut)
    return {"missing_count": str(len(error.missing)), "missing": error.shown}


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
    refusals.NodeIsEvicted,
    StatusCode.FAILED_PRECONDITION,
    "NODE_EVICTED",
    _fields("run_id", "node_id", "by"),
)
_as(
    refusals.TooManyEvicted,
    StatusCode.RESOURCE_EXHAUSTED,
    "TOO_MANY_EVICTED",
    _fields("run_id", "limit"),
)
_as(
    refusals.RevisionAhead,
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
_translate.register(
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
_as(store.RoundOver, StatusCode.FAILED_PRECONDITION, "ROUND_OVER", _round)
_as(store.RoundNotBegun, StatusCode.FAILED_PRECONDITION, "ROUND_NOT_BEGUN", _round)
_as(store.NotAnInteger, StatusCode.FAILED_PRECONDITION, "NOT_AN_INTEGER")
_as(store.IntegerOverflow, StatusCode.FAILED_PRECONDITION, "INTEGER_OVERFLOW")
_as(store.ValueTooLarge, StatusCode.FAILED_PRECONDITION, "VALUE_TOO_LARGE", _fields("limit_bytes"))
_as(store.KeyWaitTimedOut, StatusCode.DEADLINE_EXCEEDED, "KEY_WAIT_TIMED_OUT", _missing_keys)
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
