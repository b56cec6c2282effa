"""What each refusal of the store is on the wire."""

from __future__ import annotations

from collections.abc import Mapping

from grpc import StatusCode

from rallypoint.rendezvous.store import refusals
from rallypoint.serving.errors import ServiceError

_CODES: Mapping[type[refusals.StoreRefusal], tuple[StatusCode, str]] = {
    refusals.RunNotFound: (StatusCode.NOT_FOUND, "RUN_NOT_FOUND"),
    refusals.RoundOver: (StatusCode.FAILED_PRECONDITION, "ROUND_OVER"),
    refusals.RoundNotBegun: (StatusCode.FAILED_PRECONDITION, "ROUND_NOT_BEGUN"),
    refusals.LeaseLost: (StatusCode.FAILED_PRECONDITION, "LEASE_LOST"),
    refusals.RunClosed: (StatusCode.FAILED_PRECONDITION, "RUN_CLOSED"),
    refusals.NotAnInteger: (StatusCode.FAILED_PRECONDITION, "NOT_AN_INTEGER"),
    refusals.IntegerOverflow: (StatusCode.FAILED_PRECONDITION, "INTEGER_OVERFLOW"),
    refusals.ValueTooLarge: (StatusCode.FAILED_PRECONDITION, "VALUE_TOO_LARGE"),
    refusals.OperationSuperseded: (StatusCode.FAILED_PRECONDITION, "OPERATION_SUPERSEDED"),
    refusals.OperationReused: (StatusCode.INVALID_ARGUMENT, "OPERATION_REUSED"),
    refusals.KeyWaitTimedOut: (StatusCode.DEADLINE_EXCEEDED, "KEY_WAIT_TIMED_OUT"),
    refusals.RunStoreFull: (StatusCode.RESOURCE_EXHAUSTED, "RUN_STORE_FULL"),
    refusals.TooManyKeys: (StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_KEYS"),
    refusals.AnswerTooLarge: (StatusCode.RESOURCE_EXHAUSTED, "ANSWER_TOO_LARGE"),
    refusals.TooManyWaiters: (StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WAITERS"),
    refusals.StoreBusy: (StatusCode.RESOURCE_EXHAUSTED, "STORE_BUSY"),
    refusals.Draining: (StatusCode.UNAVAILABLE, "DRAINING"),
    refusals.JournalFailed: (StatusCode.UNAVAILABLE, "JOURNAL_FAILED"),
}

# Full now, and perhaps not in a moment: these carry a RetryInfo. The other limits hold until keys are deleted.
RETRYABLE = (refusals.StoreBusy, refusals.TooManyWaiters)


def service_error(refusal: refusals.StoreRefusal) -> ServiceError:
    """Return the refusal as its caller is to see it."""
    code, reason = _CODES[type(refusal)]
    retry_after = refusal.retry_after if isinstance(refusal, RETRYABLE) else None
    return ServiceError(code, reason, str(refusal), metadata=_metadata(refusal), retry_after=retry_after)


def _metadata(refusal: refusals.StoreRefusal) -> dict[str, str]:
    match refusal:
        case refusals.RoundOver() | refusals.RoundNotBegun():
            return {"round": str(refusal.round), "current_round": str(refusal.current_round)}
        case refusals.KeyWaitTimedOut():
            return {"missing_count": str(len(refusal.missing)), "missing": refusal.shown}
        case refusals.LeaseLost(run_id=run_id, node_id=node_id, lease=lease, superseded_by=newer):
            facts = {"run_id": run_id, "node_id": node_id, "lease": str(lease)}
            return facts if newer is None else {**facts, "superseded_by": str(newer)}
        case refusals.RunClosed():
            return {"run_id": refusal.run_id, "outcome": refusal.outcome}
        case refusals.TooManyKeys():
            return {"limit_keys": str(refusal.limit_keys)}
        case refusals.AnswerTooLarge():
            return {"limit_bytes": str(refusal.limit_bytes), "fitting": str(refusal.fitting)}
        case refusals.RunStoreFull() | refusals.ValueTooLarge():
            return {"limit_bytes": str(refusal.limit_bytes)}
        case refusals.OperationSuperseded():
            return {"latest_sequence": str(refusal.latest)}
        case _:
            return {}
