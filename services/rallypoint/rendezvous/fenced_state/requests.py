"""Requests of the fenced state: what is well formed, and what it asks for."""

from __future__ import annotations

from rallypoint.rendezvous.base.limits import MAX_VALUE_BYTES
from rallypoint.rendezvous.fenced_state.core import SetState
from rallypoint.rendezvous.store.requests import operation_of, writer_of
from rallypoint.rendezvous.v1 import state_service_pb2 as pb
from rallypoint.rpc.errors import invalid
from rallypoint.serving.requests import name


def check_run_id(run_id: str) -> None:
    """Check the name of a run.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    name("run_id", run_id)


def check_state(state: bytes) -> None:
    """Check the size of a state.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if len(state) > MAX_VALUE_BYTES:
        raise invalid(
            "state", f"has {len(state):,} bytes; at most {MAX_VALUE_BYTES:,} fit, keep large data elsewhere"
        )


def set_state(request: pb.SetStateRequest) -> SetState:
    """Return what is asked for.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    check_run_id(request.run_id)
    check_state(request.state)
    return SetState(
        run_id=request.run_id,
        state=request.state,
        token=request.token if request.HasField("token") else None,
        operation=operation_of(request),
        writer=writer_of(request),
    )
