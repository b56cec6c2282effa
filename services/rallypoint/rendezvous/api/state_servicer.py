"""StateService on gRPC."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from weakref import WeakValueDictionary

from rallypoint.rendezvous.base.limits import MAX_VALUE_BYTES, Limits
from rallypoint.rendezvous.shard.locator import RunLocator
from rallypoint.rendezvous.state.client import set_state
from rallypoint.rendezvous.state.core import FencedState
from rallypoint.rendezvous.v1 import state_service_pb2 as pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as rpc
from rallypoint.server.v1 import server_service_pb2 as server_pb
from rallypoint.serving.access import caller_of
from rallypoint.serving.flow import Context, Subscriber, Turns
from rallypoint.serving.info import limits_of
from rallypoint.serving.policy import NODES
from rallypoint.serving.requests import name
from rallypoint.serving.server import Registration

SERVICE_NAME = "rallypoint.rendezvous.v1.StateService"

# Seconds in which a client whose set lost can set again before the next one; and the longest wait for that.
_TURN, _LONGEST_WAIT = 0.05, 1.0


def fenced_registration(locator: RunLocator, limits: Limits | None = None) -> Registration:
    """Return the registration of the fenced states of all runs; draining it drains those of this process.

    The server must use `rallypoint.rendezvous.api.errors.translate`. `limits`: those of the service.
    """
    servicer = StateServicer(locator)
    limits = limits or Limits()
    enforced = limits_of(
        server_pb.StateLimits, limits.state, value_bytes=MAX_VALUE_BYTES, state_ttl=limits.state_ttl
    )

    async def drain() -> None:
        await asyncio.gather(*(shard.states.drain() for shard in locator.shards()))

    return Registration(
        SERVICE_NAME,
        lambda server: rpc.add_StateServiceServicer_to_server(servicer, server),
        drain,
        rights=dict.fromkeys(("GetState", "SetState", "WatchState"), NODES),
        limits=server_pb.ServerLimits(state=enforced),
    )


class StateServicer(rpc.StateServiceServicer):
    """The calls of StateService; see state_service.proto."""

    def __init__(self, locator: RunLocator) -> None:
        self._locator = locator
        # For each run in which sets lost of late, the turns of their clients, and the end of the present one.
        self._turns: WeakValueDictionary[str, Turns] = WeakValueDictionary()
        self._in_turn: dict[str, tuple[Turns, asyncio.TimerHandle]] = {}

    async def GetState(self, request: pb.GetStateRequest, context: Context) -> pb.GetStateResponse:
        name("run_id", request.run_id)
        if request.after_turns:
            await self._all_turns(request.run_id)
        states = (await self._locator.reader(request.run_id)).states
        return pb.GetStateResponse(current=_message(states.get(request.run_id)))

    async def SetState(self, request: pb.SetStateRequest, context: Context) -> pb.SetStateResponse:
        change = set_state(request, caller_of(context).client)
        states = self._locator.writer(request.run_id).states
        outcome = await states.set(change)
        if outcome.has_set:
            self._end_turn(request.run_id)
            return pb.SetStateResponse(current=_message(outcome.current), has_set=True)
        await self._begin_turn(request.run_id)
        return pb.SetStateResponse(current=_message(states.get(request.run_id)))

    async def _all_turns(self, run_id: str) -> None:
        """Return when no client has or awaits a turn, or after a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_WAIT):
                while (turn := self._in_turn.get(run_id)) is not None:
                    async with turn[0].turn():  # behind the clients that wait now
                        pass
                    await asyncio.sleep(_TURN)  # the client that set last may set again

    async def _begin_turn(self, run_id: str) -> None:
        """Return when it is the turn of a client whose set lost, or when it has waited for long.

        Otherwise, of many that set at once, each makes the others lose, and most of their work is in vain.
        """
        self._turns[run_id] = turns = self._turns.get(run_id) or Turns(1)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_WAIT):
                await turns.take()
            end = asyncio.get_running_loop().call_later(_TURN, self._end_turn, run_id)
            self._in_turn[run_id] = turns, end

    def _end_turn(self, run_id: str) -> None:
        """Let the next client set: a set has succeeded, or the time is over."""
        if (turn := self._in_turn.pop(run_id, None)) is not None:
            turn[1].cancel()
            turn[0].give_back()

    # The stubs expect a handler that yields; one that writes can limit every write by a timeout.
    async def WatchState(self, request: pb.WatchStateRequest, context: Context) -> None:  # type: ignore[override]
        name("run_id", request.run_id)
        token = request.token if request.HasField("token") else None
        states = self._locator.shard(request.run_id).states
        views = states.watch(request.run_id, token)
        watcher = Subscriber(context)
        try:
            await watcher.greet()
            while (view := await views.take()) is not None:
                await watcher.send(pb.WatchStateResponse(current=_message(view.current)))
        finally:
            states.unwatch(request.run_id, views)


def _message(state: FencedState | None) -> pb.FencedState | None:
    return None if state is None else pb.FencedState(state=state.state, token=state.token)
