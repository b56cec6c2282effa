"""Refusals of the timer service as gRPC errors: one table."""

from __future__ import annotations

from grpc import StatusCode

from rallypoint.rpc.errors import ServiceError, invalid
from rallypoint.timer.refusals import Draining, InvalidField, LeaseLost, Refused, StreamReplaced, TooMany

# Seconds after which a caller may find room, or another server.
_RETRY_AFTER = 1.0


def translate(error: Exception) -> ServiceError | None:
    """The gRPC error of a refusal; None for what is none."""
    match error:
        case InvalidField():
            return invalid(error.field, error.problem)
        case LeaseLost():
            numbers = {"lease": str(error.lease), "current_lease": str(error.current)}
            return _error(StatusCode.FAILED_PRECONDITION, error, **_node(error), **numbers)
        case StreamReplaced():
            return _error(StatusCode.ABORTED, error, **_node(error))
        case TooMany():
            return _error(StatusCode.RESOURCE_EXHAUSTED, error, _RETRY_AFTER, limit=str(error.limit))
        case Draining():
            return _error(StatusCode.UNAVAILABLE, error, _RETRY_AFTER)
    return None


def _node(error: LeaseLost | StreamReplaced) -> dict[str, str]:
    return {"run_id": error.run_id, "node_id": error.node_id}


def _error(
    code: StatusCode, error: Refused, retry_after: float | None = None, /, **metadata: str
) -> ServiceError:
    return ServiceError(code, error.reason, str(error), metadata=metadata, retry_after=retry_after)
