"""What each refusal of the fenced state is on the wire."""

from __future__ import annotations

from collections.abc import Mapping

from grpc import StatusCode

from rallypoint.rendezvous.fenced_state import refusals
from rallypoint.serving.errors import ServiceError

_CODES: Mapping[type[refusals.StateRefusal], tuple[StatusCode, str]] = {
    refusals.OperationSuperseded: (StatusCode.FAILED_PRECONDITION, "OPERATION_SUPERSEDED"),
    refusals.OperationReused: (StatusCode.INVALID_ARGUMENT, "OPERATION_REUSED"),
    refusals.TooManyStates: (StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STATES"),
    refusals.StatesFull: (StatusCode.RESOURCE_EXHAUSTED, "STATES_FULL"),
    refusals.StateBusy: (StatusCode.RESOURCE_EXHAUSTED, "STATE_BUSY"),
    refusals.TooManyWatchers: (StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS"),
    refusals.Draining: (StatusCode.UNAVAILABLE, "DRAINING"),
    refusals.JournalFailed: (StatusCode.UNAVAILABLE, "JOURNAL_FAILED"),
}

# When to come back, seconds: after a few commits on a slow disk, or when something may have expired or ended.
_RETRY_AFTER: Mapping[type[refusals.StateRefusal], float] = {
    refusals.TooManyStates: 5.0,
    refusals.StatesFull: 5.0,
    refusals.StateBusy: 0.1,
    refusals.TooManyWatchers: 5.0,
    refusals.Draining: 0.1,
}


def service_error(refusal: refusals.StateRefusal) -> ServiceError:
    """Return the refusal as its caller is to see it."""
    code, reason = _CODES[type(refusal)]
    retry_after = _RETRY_AFTER.get(type(refusal))
    return ServiceError(code, reason, str(refusal), metadata=_metadata(refusal), retry_after=retry_after)


def _metadata(refusal: refusals.StateRefusal) -> dict[str, str]:
    match refusal:
        case refusals.TooManyStates() | refusals.TooManyWatchers():
            return {"limit": str(refusal.limit)}
        case refusals.StatesFull():
            return {"limit_bytes": str(refusal.limit_bytes)}
        case refusals.OperationSuperseded():
            return {"latest_sequence": str(refusal.latest)}
        case _:
            return {}
