"""RendezvousService on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import Message

from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.engine import RendezvousEngine
from rallypoint.rendezvous.errors import Draining
from rallypoint.rendezvous.hosted_run import Member
from rallypoint.rendezvous.requests import (
    SENTENCE_BYTES,
    count,
    join_command,
    name,
    text,
    worker_failure,
)
from rallypoint.rendezvous.slot import Slot
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.serving.errors import ServiceError, invalid

# How long a stream may take to say what it is for, seconds.
_FIRST_MESSAGE_TIMEOUT = 10.0
# How long a subscriber may take to accept one message, seconds, before its stream is ended. It loses nothing by
# that: it resumes, and is told the latest state.
_WRITE_TIMEOUT = 10.0

_MOST_PORT = 65_535
NO_REASON = "no reason given"


class RendezvousServicer(pb_grpc.RendezvousServiceServicer):
    """Answers for an engine that somebody serves."""

    def __init__(self, engine: RendezvousEngine) -> None:
        """Answer for `engine`."""
        self._engine = engine
        self._draining = False

    async def drain(self) -> None:
        """Tell every stream that the server is going away, and take no more."""
        self._draining = True
        self._engine.drain(Draining())

    # The stubs know handlers that yield; one that writes can bound every write by a timeout.
    async def Join(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.JoinRequest],
        context: grpc.aio.ServicerContext[pb.JoinRequest, pb.JoinResponse],
    ) -> None:
        """One node's stream; see the contract."""
        member = await self._admit(await _first(request_iterator))
        self._end_if_draining(member.updates)
        listener = asyncio.create_task(self._listen(member, request_iterator))
        revision = member.lease.revision
        try:
            await _write(context, pb.JoinResponse(lease=member.lease))
            while (update := await member.updates.take()) is not None:
                revision = update.revision
                await _write(context, pb.JoinResponse(update=update))
        except Draining:
            await _write(context, pb.JoinResponse(draining=pb.Draining(revision=revision)))
        finally:
            listener.cancel()
            self._engine.disconnect(member)

    async def _admit(self, first: pb.JoinRequest) -> Member:
        self._check_not_draining()
        match first.WhichOneof("message"):
            case "join":
                return await self._engine.join(first.join.run_id, join_command(first.join))
            case "resume":
                resume = first.resume
                name("run_id", resume.run_id)
                name("node_id", resume.node_id)
                return await self._engine.resume(resume.run_id, resume.node_id, resume.lease, resume.revision)
            case other:
                raise invalid("message", f"the first message must be join or resume, not {other or 'empty'}")

    async def _listen(self, member: Member, requests: AsyncIterator[pb.JoinRequest]) -> None:
        """Take what a node says until it stops; then end its updates, and with them the stream."""
        try:
            async for request in requests:
                self._engine.renew(member)
                command = _command(request, member)
                if command is not None:
                    await self._engine.execute(member.run_id, command)
        except Exception as error:
            member.updates.end(error)
        else:
            member.updates.end()

    async def GetRun(
        self,
        request: pb.GetRunRequest,
        context: grpc.aio.ServicerContext[pb.GetRunRequest, pb.GetRunResponse],
    ) -> pb.GetRunResponse:
        """A run with its nodes."""
        name("run_id", request.run_id)
        return pb.GetRunResponse(run=await self._engine.get_run(request.run_id))

    async def ListRuns(
        self,
        request: pb.ListRunsRequest,
        context: grpc.aio.ServicerContext[pb.ListRunsRequest, pb.ListRunsResponse],
    ) -> pb.ListRunsResponse:
        """All runs."""
        return pb.ListRunsResponse(runs=await self._engine.list_runs())

    async def WatchRun(  # type: ignore[override]
        self,
        request: pb.WatchRunRequest,
        context: grpc.aio.ServicerContext[pb.WatchRunRequest, pb.WatchRunResponse],
    ) -> None:
        """A run's states as they come."""
        self._check_not_draining()
        name("run_id", request.run_id)
        states = await self._engine.watch(request.run_id, request.revision)
        self._end_if_draining(states)
        try:
            while (run := await states.take()) is not None:
                await _write(context, pb.WatchRunResponse(run=run))
        finally:
            self._engine.unwatch(request.run_id, states)

    async def CloseRun(
        self,
        request: pb.CloseRunRequest,
        context: grpc.aio.ServicerContext[pb.CloseRunRequest, pb.CloseRunResponse],
    ) -> pb.CloseRunResponse:
        """End a run for good."""
        name("run_id", request.run_id)
        text("reason", request.reason, SENTENCE_BYTES)
        run_end = await self._engine.close_run(request.run_id, request.reason or NO_REASON)
        return pb.CloseRunResponse(run_end=run_end)

    def _check_not_draining(self) -> None:
        if self._draining:
            raise Draining

    def _end_if_draining(self, slot: Slot[Any]) -> None:
        """A stream that was being opened when the others were ended has no longer a life than they."""
        if self._draining:
            slot.end(Draining())


def _command(request: pb.JoinRequest, member: Member) -> commands.Command | None:
    node_id, lease = member.node_id, member.lease.lease
    match request.WhichOneof("message"):
        case "heartbeat":
            return None
        case "confirm":
            count("confirm.master_port", request.confirm.master_port, 0, _MOST_PORT)
            return commands.Confirm(node_id, lease, request.confirm.round, request.confirm.master_port)
        case "worker_failed":
            return commands.ReportFailure(node_id, lease, worker_failure(request.worker_failed, node_id))
        case "succeeded":
            return commands.ReportSuccess(node_id, lease, request.succeeded.round)
        case "depart":
            text("depart.reason", request.depart.reason, SENTENCE_BYTES)
            return commands.Depart(node_id, lease, request.depart.reason or NO_REASON)
        case "leave":
            text("leave.reason", request.leave.reason, SENTENCE_BYTES)
            return commands.Leave(node_id, lease, request.leave.reason or NO_REASON)
        case other:
            raise invalid(
                "message", f"expected a heartbeat, confirm, report, depart or leave, not {other or 'empty'}"
            )


async def _first(requests: AsyncIterator[pb.JoinRequest]) -> pb.JoinRequest:
    try:
        async with asyncio.timeout(_FIRST_MESSAGE_TIMEOUT):
            return await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        raise invalid("message", f"expected join or resume within {_FIRST_MESSAGE_TIMEOUT:g} s") from None


async def _write(context: grpc.aio.ServicerContext[Any, Any], message: Message) -> None:
    try:
        async with asyncio.timeout(_WRITE_TIMEOUT):
            await context.write(message)
    except TimeoutError:
        raise ServiceError(
            grpc.StatusCode.UNAVAILABLE,
            "SUBSCRIBER_TOO_SLOW",
            f"the subscriber took no message for {_WRITE_TIMEOUT:g} s: reconnect and resume",
        ) from None
