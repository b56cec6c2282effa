"""Client of the fenced states: calls that survive a restart of the service, and sets that take effect once."""

from __future__ import annotations

import secrets

from rallypoint.rendezvous.base.entries import Writer
from rallypoint.rendezvous.base.limits import MAX_VALUE_BYTES
from rallypoint.rendezvous.state.core import FencedState, SetOutcome, SetState
from rallypoint.rendezvous.store.client import OperationSlots
from rallypoint.rendezvous.store.requests import named_writer, operation_of
from rallypoint.rendezvous.v1 import state_service_pb2 as pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as rpc
from rallypoint.rpc.calls import RetryingCalls
from rallypoint.rpc.errors import invalid
from rallypoint.rpc.pace import Pace
from rallypoint.rpc.replica_client import Where, replica_client
from rallypoint.serving.requests import EveryField, name

# ---- Requests of the fenced state: check them and extract their fields.


def check_state(state: bytes) -> None:
    """Check the size of a state. Raises ServiceError (INVALID_ARGUMENT)."""
    if len(state) > MAX_VALUE_BYTES:
        raise invalid(
            "state",
            f"has {len(state):,} bytes; at most {MAX_VALUE_BYTES:,} fit, keep large data in other storage",
        )


def set_state(request: pb.SetStateRequest, client: str = "") -> SetState:
    """Return the decoded request of a client. Raises ServiceError (INVALID_ARGUMENT)."""
    with EveryField() as check:
        check(name, "run_id", request.run_id)
        check(check_state, request.state)
        operation, writer = check(operation_of, request), check(named_writer, request)
    token = request.token if request.HasField("token") else None
    return SetState(
        run_id=request.run_id,
        state=request.state,
        token=token,
        operation=operation,
        writer=writer,
        client=client,
    )


# Seconds; long enough to restart a service by hand.
DEFAULT_TIMEOUT = 300.0


class FencedStateClient:
    """The fenced state of one run.

    Every call is repeated while the service can't be reached, until its timeout. A set takes effect at most once
    however often it is repeated, also across restarts of the service, and `has_set` of its result shows if it did. A
    set that is cancelled or times out leaves its outcome unknown.

    All methods raise ServiceError with a reason of the contract (state_service.proto), or with STATE_UNAVAILABLE if the
    service could not be reached in time. Times are in seconds.
    """

    def __init__(
        self, where: Where, run_id: str, *, client_id: str | None = None, pace: Pace | None = None
    ) -> None:
        """Make a client.

        Args:
            where: A ReplicaClient, or a channel, to the service; the caller closes it.
            client_id: A name that no other client, also none of an earlier process, has; by default random.

        Raises:
            ServiceError: INVALID_ARGUMENT: the run can't have that name.
        """
        name("run_id", run_id)
        self._run_id = run_id
        self._slots = OperationSlots(client_id or secrets.token_hex(16))
        self._calls: RetryingCalls[rpc.StateServiceAsyncStub] = RetryingCalls(
            replica_client(where), rpc.StateServiceStub, "state", pace or Pace()
        )

    async def get(self, *, after_turns: bool = False, timeout: float = DEFAULT_TIMEOUT) -> FencedState | None:
        """Return the current state; None: there is none. `after_turns`: see GetStateRequest."""
        request = pb.GetStateRequest(run_id=self._run_id, after_turns=after_turns)
        return _current(await self._calls.call(lambda stub: stub.GetState, request, timeout))

    async def set(
        self,
        state: bytes,
        token: bytes | None = None,
        *,
        writer: Writer | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> SetOutcome:
        """Replace the state with this token; None: set the first state. A set that loses is no error.

        With a `writer`, its lease must be held when the state is set.
        """
        check_state(state)
        request = pb.SetStateRequest(run_id=self._run_id, state=state, token=token)
        if writer is not None:
            request.writer.node_id, request.writer.lease = writer.node_id, writer.lease
            request.writer.token = writer.token
        with self._slots.operation() as operation:
            request.operation.CopyFrom(operation)
            response = await self._calls.call(lambda stub: stub.SetState, request, timeout)
        return SetOutcome(_current(response), response.has_set)


def _current(response: pb.GetStateResponse | pb.SetStateResponse) -> FencedState | None:
    if not response.HasField("current"):
        return None
    return FencedState(response.current.state, response.current.token)
