"""Requests of the fenced state: what is well formed, and what it asks for."""

from __future__ import annotations

from rallypoint.rendezvous.fenced_state.core import SetState, Writer
from rallypoint.rendezvous.requests import name
from rallypoint.rendezvous.store import requests as store_requests
from rallypoint.rendezvous.store.operations import Operation
from rallypoint.rendezvous.store.sizes import MAX_VALUE_BYTES
from rallypoint.rendezvous.v1 import state_service_pb2 as pb
from rallypoint.rendezvous.v1 import store_service_pb2 as store_pb
from rallypoint.serving.errors import invalid


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
        operation=_operation(request),
        writer=_writer(request),
    )


def _operation(request: pb.SetStateRequest) -> Operation | None:
    if not request.HasField("operation"):
        return None
    # Operations are named as the store's are, and checked as in a request of the store.
    return store_requests.operation_of(store_pb.SetRequest(operation=request.operation))


def _writer(request: pb.SetStateRequest) -> Writer | None:
    if not request.HasField("writer"):
        return None
    name("writer.node_id", request.writer.node_id)
    if request.writer.lease < 1:
        raise invalid(
            "writer.lease", f"is {request.writer.lease}; expected the number of a lease, at least 1"
        )
    return Writer(request.writer.node_id, request.writer.lease)
