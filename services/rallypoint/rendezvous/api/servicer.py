"""RendezvousService on gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from rallypoint.rendezvous.api.event_pages import EventServicer
from rallypoint.rendezvous.api.requests import NodesPage, RunsPage, join_command, start_report, worker_failure
from rallypoint.rendezvous.base.cooperative import LatestValue
from rallypoint.rendezvous.base.errors import Draining
from rallypoint.rendezvous.core import commands, facts
from rallypoint.rendezvous.core.commands import Actor, ActorKind
from rallypoint.rendezvous.core.state import RunState
from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.runs.run import NODES_PER_MESSAGE, Member, run_message
from rallypoint.rendezvous.shard.locator import ListReplicas, OnlyReplica, RunLocator
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.errors import invalid
from rallypoint.rpc.text import one_line
from rallypoint.serving.access import Caller, caller_of
from rallypoint.serving.flow import (
    FIRST_MESSAGE_TIMEOUT,
    Context,
    ServerDraining,
    Subscriber,
    Turns,
    UnopenedStreams,
)
from rallypoint.serving.requests import SENTENCE_BYTES, EveryField, count, name, reason, text, token

_MOST_PORT = 65_535

_Read = TypeVar("_Read", pb.GetRunResponse, pb.ListNodesResponse)

# Messages that are sent to watchers at the same time: some 5 ms of work.
_SENDS_TO_WATCHERS = 16


class RendezvousServicer(pb_grpc.RendezvousServiceServicer):
    """The calls of RendezvousService, for the runs that a locator finds."""

    def __init__(self, locator: RunLocator, list_replicas: ListReplicas | None = None) -> None:
        """Serve the runs of `locator`. `list_replicas`: None: this is the only replica."""
        self._locator = locator
        self._list_replicas = list_replicas or OnlyReplica()
        self._draining = False
        self._unopened = UnopenedStreams(FIRST_MESSAGE_TIMEOUT)
        # Watchers wait for each other, so that nodes do not wait for hundreds of them.
        self._sends = Turns(_SENDS_TO_WATCHERS)
        self._events = EventServicer(locator, self._check_not_draining, self._sends)

    async def drain(self) -> None:
        """Send every stream that the server drains, and accept no more."""
        self._draining = True
        self._unopened.end()
        for shard in self._locator.shards():
            shard.engine.drain(Draining())

    # The stubs expect a handler that yields; one that writes can limit every write by a timeout.
    async def Join(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.JoinRequest], context: Context
    ) -> None:
        """Serve one node's stream; see the contract."""
        node = Subscriber(context)
        engine, member = await self._admit(await self._first(request_iterator), caller_of(context), node)
        self._end_if_draining(member.updates)
        listener = asyncio.create_task(_listen(engine, member, request_iterator, context.peer()))
        revision = member.lease.revision
        lease: pb.Lease | None = member.lease
        try:
            while True:
                update = await member.updates.take_or_wake()
                if update is None and member.updates.ended:
                    break
                if update is None and lease is None:
                    continue  # it was woken to send the lease, which was already sent with its assignment
                await node.send(pb.JoinResponse(lease=lease, update=update))
                lease = None
                revision = update.revision if update is not None else revision
        except Draining:
            await node.send(pb.JoinResponse(lease=lease, draining=pb.Draining(revision=revision)))
            # Clients take OK for the end of the membership. A new error: the caught one ends all streams, and its
            # traceback would collect the frames of them all.
            raise Draining from None
        finally:
            listener.cancel()
            engine.disconnect(member)

    async def _first(self, requests: AsyncIterator[pb.JoinRequest]) -> pb.JoinRequest:
        try:
            return await self._unopened.first(requests)
        except ServerDraining:
            raise Draining from None
        except StopAsyncIteration:
            raise invalid("message", "expected join or resume, and the stream ended") from None

    async def _admit(
        self, first: pb.JoinRequest, caller: Caller, node: Subscriber
    ) -> tuple[RendezvousEngine, Member]:
        """Return the member for a new stream, and the engine to which it belongs for as long as it lasts."""
        self._check_not_draining()
        match first.WhichOneof("message"):
            case "join":
                return await self._join(first.join, join_command(first.join, caller), caller, node)
            case "resume":
                resume = first.resume
                with EveryField() as check:
                    check(name, "run_id", resume.run_id)
                    check(name, "node_id", resume.node_id)
                    check(token, "token", resume.token)
                engine = self._locator.shard(resume.run_id).engine
                member = await engine.resume(
                    resume.run_id,
                    resume.node_id,
                    resume.lease,
                    resume.after_revision,
                    resume.token,
                    stays=resume.stays_until_gone,
                )
                return engine, member
            case other:
                raise invalid("message", f"the first message must be join or resume, not {other or 'empty'}")

    async def _join(
        self, join: pb.JoinRun, command: commands.Join, caller: Caller, node: Subscriber
    ) -> tuple[RendezvousEngine, Member]:
        """Admit a newcomer; before it reopens a run, wait for the nodes that were in it, up to its join timeout."""
        engine, stays = self._locator.writer(join.run_id).engine, join.stays_until_gone
        ending: commands.RunIsEnding | None = None
        try:
            async with asyncio.timeout(None) as limit:
                while True:
                    try:
                        return engine, await engine.join(join.run_id, command, caller.peer, stays=stays)
                    except commands.RunIsEnding as refusal:
                        first, ending = ending is None, refusal
                    if first:
                        now = asyncio.get_running_loop().time()
                        limit.reschedule(now + command.settings.join_timeout)
                        if stays:
                            await node.send(pb.JoinResponse(waiting=pb.Waiting(detail=str(ending))))
                    await engine.until_reopenable(join.run_id, self._end_if_draining)
        except TimeoutError:
            assert ending is not None, "there is no limit before"
            raise ending from None

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        """Return a run with its first nodes."""
        name("run_id", request.run_id)
        most = NODES_PER_MESSAGE
        if request.HasField("most_nodes"):
            count("most_nodes", request.most_nodes, 0)
            most = min(most, request.most_nodes)
        return await self._read_run(
            request, lambda state, now: pb.GetRunResponse(run=run_message(state, most, now))
        )

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesResponse:
        """Return the nodes of a run, a page at a time."""
        name("run_id", request.run_id)
        page = NodesPage(request)
        return await self._read_run(request, lambda state, _: page.read(state))

    async def _read_run(
        self, request: pb.GetRunRequest | pb.ListNodesRequest, read: Callable[[RunState, float | None], _Read]
    ) -> _Read:
        """Return a response from the state of a run, with the owner of the run if that is another process.

        `read`: Returns the response; its arguments are the state and `RunsReader.now`.
        """
        run_id = request.run_id
        if request.owner_only:
            self._locator.shard(run_id)  # raises NotOwner, unless this process owns it
        runs = (await self._locator.reader(run_id)).runs
        response = await runs.read_run(run_id, lambda state: read(state, runs.now()))
        if (not_owner := runs.remote_reader(run_id)) is not None:
            if request.owner_only:
                raise not_owner  # the shard moved meanwhile
            response.durable_only, response.owner_address = True, not_owner.owner or ""
        return response

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        """Return all runs, a page at a time."""
        page = RunsPage(request)
        return await page.read([reader.runs for reader in await self._locator.readers()])

    async def WatchRun(  # type: ignore[override]
        self, request: pb.WatchRunRequest, context: Context
    ) -> None:
        """Send a run's states as they come."""
        self._check_not_draining()
        name("run_id", request.run_id)
        engine = self._locator.shard(request.run_id).engine
        states = await engine.watch(request.run_id, request.after_revision)
        self._end_if_draining(states)
        watcher = Subscriber(context)
        try:
            while (published := await states.take()) is not None:
                async with self._sends.turn():
                    await watcher.send(published.response)
        finally:
            engine.unwatch(request.run_id, states)

    async def CloseRun(self, request: pb.CloseRunRequest, context: Context) -> pb.CloseRunResponse:
        """End a run."""
        with EveryField() as check:
            check(name, "run_id", request.run_id)
            check(text, "incarnation", request.incarnation)
            check(reason, request.reason)
        engine, why = self._locator.writer(request.run_id).engine, reason(request.reason)
        run_end = await engine.close_run(request.run_id, why, _operator(context), request.incarnation)
        return pb.CloseRunResponse(run_end=run_end)

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Context) -> pb.DeleteRunResponse:
        """Forget a run that has no nodes."""
        with EveryField() as check:
            check(name, "run_id", request.run_id)
            check(text, "incarnation", request.incarnation)
        engine = self._locator.writer(request.run_id).engine
        await engine.delete_run(request.run_id, _operator(context), request.incarnation)
        return pb.DeleteRunResponse()

    async def RestartRun(self, request: pb.RestartRunRequest, context: Context) -> pb.RestartRunResponse:
        """Restart all workers of a run."""
        with EveryField() as check:
            check(name, "run_id", request.run_id)
            check(text, "on_behalf_of", request.on_behalf_of)
            check(reason, request.reason)
        command = commands.Restart(
            reason(request.reason), request.round if request.HasField("round") else None
        )
        happened = await self._operate(request.run_id, command, context, request.on_behalf_of)
        ended = [fact.end.round for fact in happened if isinstance(fact, facts.RoundEnded)]
        taken = any(isinstance(fact, facts.RestartRequested) for fact in happened)
        return pb.RestartRunResponse(ended_round=ended[0] if ended else 0, hurried=taken and not ended)

    async def EvictNode(self, request: pb.EvictNodeRequest, context: Context) -> pb.EvictNodeResponse:
        """Take a node out of a run and keep it out."""
        with EveryField() as check:
            check(name, "run_id", request.run_id)
            check(name, "node_id", request.node_id)
            check(reason, request.reason)
        lease = request.lease if request.HasField("lease") else None
        command = commands.Evict(request.node_id, reason(request.reason), lease)
        happened = await self._operate(request.run_id, command, context)
        return pb.EvictNodeResponse(
            was_in=any(isinstance(fact, facts.NodeEvicted) and fact.lease > 0 for fact in happened)
        )

    async def ReadmitNode(self, request: pb.ReadmitNodeRequest, context: Context) -> pb.ReadmitNodeResponse:
        """Let an evicted node join again."""
        with EveryField() as check:
            check(name, "run_id", request.run_id)
            check(name, "node_id", request.node_id)
            check(reason, request.reason)
        command = commands.Readmit(request.node_id, reason(request.reason))
        happened = await self._operate(request.run_id, command, context)
        return pb.ReadmitNodeResponse(was_evicted=bool(happened))

    async def _operate(
        self, run_id: str, command: commands.Command, context: Context, on_behalf_of: str = ""
    ) -> Sequence[facts.Fact]:
        """Execute the command of an operator; return its facts."""
        actor = _operator(context)
        if on_behalf_of:
            actor = replace(actor, name=f"{on_behalf_of} through {actor.name or actor.peer}")
        return await self._locator.writer(run_id).engine.execute(run_id, command, actor)

    async def ListEvents(self, request: pb.ListEventsRequest, context: Context) -> pb.ListEventsResponse:
        """Return the past events of a run, a page at a time."""
        return await self._events.list(request)

    async def WatchEvents(  # type: ignore[override]
        self, request: pb.WatchEventsRequest, context: Context
    ) -> None:
        """Send the events of a run as they come."""
        await self._events.watch(request, Subscriber(context))

    async def ListReplicas(
        self, request: pb.ListReplicasRequest, context: Context
    ) -> pb.ListReplicasResponse:
        """Return the replicas and their shards."""
        if request.run_id:
            name("run_id", request.run_id)
        return self._list_replicas(request.run_id)

    def _check_not_draining(self) -> None:
        if self._draining:
            raise Draining

    def _end_if_draining(self, slot: LatestValue[Any]) -> None:
        """End a stream that was being opened while the drain ended the others."""
        if self._draining:
            slot.end(Draining())


def _operator(context: Context) -> Actor:
    caller = caller_of(context)
    return Actor(ActorKind.OPERATOR, caller.name, caller.peer)


async def _listen(
    engine: RendezvousEngine, member: Member, requests: AsyncIterator[pb.JoinRequest], peer: str
) -> None:
    """Carry out the requests of a node until its stream ends; then end its updates, and with them the call."""
    actor = Actor(ActorKind.NODE, member.node_id, peer)
    try:
        async for request in requests:
            engine.renew(member, _watchdog_trouble(request))
            if request.HasField("started"):
                engine.note_start(member, start_report(request.started))
            command = _command(request, member)
            if command is not None:
                # A node that stays gets the end of the run as an update.
                expected = (commands.RunIsClosed,) if member.stays else ()
                with suppress(*expected):
                    await engine.execute(member.run_id, command, actor)
    except Exception as error:
        member.updates.end(error)
    else:
        member.updates.end()


def _watchdog_trouble(request: pb.JoinRequest) -> str | None:
    if request.WhichOneof("message") != "heartbeat":
        return None
    return one_line(request.heartbeat.watchdog_trouble, SENTENCE_BYTES)


def _command(request: pb.JoinRequest, member: Member) -> commands.Command | None:
    node_id, lease = member.node_id, member.lease.number
    match request.WhichOneof("message"):
        case "heartbeat" | "started" | None:
            return None  # None: a message of a newer agent, for a feature that this version does not have
        case "confirm":
            count("confirm.master_port", request.confirm.master_port, 0, _MOST_PORT)
            return commands.Confirm(node_id, lease, request.confirm.round, request.confirm.master_port)
        case "worker_failed":
            return commands.ReportFailure(node_id, lease, worker_failure(request.worker_failed, node_id))
        case "succeeded":
            return commands.ReportSuccess(node_id, lease, request.succeeded.round)
        case "depart":
            return commands.Depart(node_id, lease, reason(request.depart.reason, "depart.reason"))
        case "leave":
            return commands.Leave(node_id, lease, reason(request.leave.reason, "leave.reason"))
        case other:
            raise invalid("message", f"expected a heartbeat, confirm, report, depart or leave, not {other}")
