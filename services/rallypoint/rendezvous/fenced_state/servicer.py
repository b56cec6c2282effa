"""StateService on gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio

from rallypoint.rendezvous.core.refusals import Refused
from rallypoint.rendezvous.errors import translate
from rallypoint.rendezvous.fenced_state.core import FencedState
from rallypoint.rendezvous.fenced_state.errors import service_error
from rallypoint.rendezvous.fenced_state.refusals import StateRefusal
from rallypoint.rendezvous.fenced_state.requests import check_run_id, set_state
from rallypoint.rendezvous.fenced_state.service import FencedStateService
from rallypoint.rendezvous.v1 import state_service_pb2 as pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as rpc
from rallypoint.serving.errors import ServiceError
from rallypoint.serving.server import Registration

SERVICE_NAME = "rallypoint.rendezvous.v1.StateService"

# How long a watcher may take to accept one message, seconds, before its stream is ended. It loses nothing by that:
# it watches again, and is told the latest state.
WRITE_TIMEOUT = 10.0

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def fenced_registration(states: FencedStateService, *, write_timeout: float = WRITE_TIMEOUT) -> Registration:
    """Return what stands the fenced states up on a server; draining the server drains them."""
    servicer = StateServicer(states, write_timeout)
    return Registration(
        SERVICE_NAME,
        lambda server: rpc.add_StateServiceServicer_to_server(servicer, server),
        states.drain,
    )


class StateServicer(rpc.StateServiceServicer):
    """The calls of StateService; the contract stands in state_service.proto."""

    def __init__(self, states: FencedStateService, write_timeout: float) -> None:
        self._states = states
        self._write_timeout = write_timeout

    async def GetState(self, request: pb.GetStateRequest, context: _Context) -> pb.GetStateResponse:
        check_run_id(request.run_id)
        with _refusals_answered():
            return pb.GetStateResponse(current=_message(self._states.get(request.run_id)))

    async def SetState(self, request: pb.SetStateRequest, context: _Context) -> pb.SetStateResponse:
        asked = set_state(request)
        with _refusals_answered():
            outcome = await self._states.set(asked)
        return pb.SetStateResponse(current=_message(outcome.current), has_set=outcome.has_set)

    # The stubs know handlers that yield; one that writes can bound every write by a timeout.
    async def WatchState(self, request: pb.WatchStateRequest, context: _Context) -> None:  # type: ignore[override]
        check_run_id(request.run_id)
        token = request.token if request.HasField("token") else None
        with _refusals_answered():
            views = self._states.watch(request.run_id, token)
            try:
                await self._in_time(context.send_initial_metadata(()))
                while (view := await views.take()) is not None:
                    await self._in_time(context.write(pb.WatchStateResponse(current=_message(view.current))))
            finally:
                self._states.unwatch(request.run_id, views)

    async def _in_time(self, writing: Any) -> None:
        try:
            async with asyncio.timeout(self._write_timeout):
                await writing
        except TimeoutError:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "SUBSCRIBER_TOO_SLOW",
                f"the watcher took no message for {self._write_timeout:g} s: watch again",
            ) from None


def _message(state: FencedState | None) -> pb.FencedState | None:
    return None if state is None else pb.FencedState(state=state.state, token=state.token)


@contextmanager
def _refusals_answered() -> Iterator[None]:
    try:
        yield
    except StateRefusal as refusal:
        raise service_error(refusal) from refusal
    except Refused as refusal:
        error = translate(refusal)
        if error is None:
            raise
        raise error from refusal
