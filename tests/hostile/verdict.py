"""The fault in the end of a request, if there is one."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from hostile.attacker import Outcome
from hostile.contract import Reasons
from hostile.requests import Request
from rallypoint.rpc.channel import MAX_MESSAGE_BYTES

Code = grpc.StatusCode


def fault(request: Request, outcome: Outcome, documented: Mapping[str, Reasons]) -> str | None:
    """Return the fault of the server; None: there is none.

    Args:
        request: The request.
        outcome: Its end.
        documented: The errors of each service, by its full name.
    """
    if outcome.code in (Code.UNKNOWN, Code.INTERNAL):
        return f"{outcome.code.name}: {outcome.message}"
    if outcome.reason == "UNEXPECTED_ERROR":
        return f"a bug of the server: {outcome.message}"
    if outcome.code is Code.OK or outcome.gone:
        return None
    if request.method is None:
        return None if outcome.code is Code.UNIMPLEMENTED else f"{outcome.code.name} of a method that is none"
    if not outcome.reason:
        return _without_details(request, outcome)
    service = request.method.containing_service.full_name
    if service in documented and (outcome.code.name, outcome.reason) not in documented[service]:
        return f"{outcome.code.name} {outcome.reason} is not in the table of {service}"
    return None


def _without_details(request: Request, outcome: Outcome) -> str | None:
    """Return the fault in an error of gRPC itself; None: it is allowed here."""
    told = f"{outcome.code.name} without ErrorInfo: {outcome.message}"
    if outcome.code is Code.DEADLINE_EXCEEDED:
        return None if request.may_time_out else f"{told}: nobody answered"
    if outcome.code is Code.RESOURCE_EXHAUSTED:
        large = any(len(data) > MAX_MESSAGE_BYTES for data in request.messages)
        return None if large else told
    if outcome.code is Code.CANCELLED:
        return None if request.cancel_after is not None else told
    if request.path.startswith("/grpc."):  # health and reflection have their own errors
        allowed = (Code.NOT_FOUND, Code.UNIMPLEMENTED, Code.INVALID_ARGUMENT)
        return None if outcome.code in allowed else told
    return told
