"""A journal with entries of every kind, and the content of a journal as its service returns it."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.service import registrations
from rallypoint.rendezvous.base.entries import Operation
from rallypoint.rendezvous.base.errors import draining_error
from rallypoint.rendezvous.base.limits import Limits, RendezvousLimits
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.starts import StartReport
from rallypoint.rendezvous.core.state import FailureKind, RecoveryParts, ReportedFailure, RunSettings
from rallypoint.rendezvous.journal.journal import Journal
from rallypoint.rendezvous.runs.run import Member
from rallypoint.rendezvous.shard.locator import SingleShardLocator
from rallypoint.rendezvous.shard.shard import Shard, open_shard
from rallypoint.rendezvous.state.core import SetState
from rallypoint.rendezvous.store.writes import Add, Append, CompareSet, DeleteKey, MultiSet, Set
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as state_grpc
from rallypoint.rendezvous.v1 import store_service_pb2 as store_pb
from rallypoint.rendezvous.v1 import store_service_pb2_grpc as store_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.serving.server import Server
from rendezvous.engine_fixtures import NO_PAUSES, writer_of
from support.waiting import PATIENCE

RUN, ENDED, DELETED = "training", "ended", "deleted"
# Times that a node is evicted and readmitted 50 times. After a thousand records the service writes a checkpoint, and
# drops old events.
_EXERCISES = 10
_KEPT_EVENTS = 40
_ROUND = 4  # the last one of RUN


class _Clock:
    now = 1000.0


@asynccontextmanager
async def _shard(
    journal: Journal, clock: _Clock, seed: int, limits: Limits | None = None
) -> AsyncIterator[Shard]:
    shard = await open_shard(
        journal,
        clock=lambda: clock.now,
        wall_clock=lambda: 1.7e9 + clock.now,
        draw=Random(seed).randbytes,
        limits=limits,
        lag=NO_PAUSES,
    )
    try:
        yield shard
    finally:
        await shard.retire(draining_error)
        shard.end_streams(draining_error)


async def write(journal: Journal) -> dict[str, Any]:
    """Write a journal, the same at each call; return the lease of a node that is in the run `RUN`, for `continue_`."""
    clock = _Clock()
    limits = Limits(rendezvous=RendezvousLimits(events_per_run=_KEPT_EVENTS))
    async with _shard(journal, clock, 7, limits) as shard:
        engine = shard.engine

        async def join(node: str, run: str = RUN, most: int = 3) -> Member:
            settings = RunSettings(
                min_nodes=2,
                max_nodes=most,
                max_restarts=3,
                last_call_timeout=1.0,
                restart_window=600.0,
                restart_backoff=0.0,
            )
            command = commands.Join(
                node, settings, f"{node}.cluster", 2, "trainer", "hall1/rack2", "agent:1", client="alice"
            )
            return await engine.join(run, command)

        async def act(member: Member, kind: type[Any], *rest: Any, run: str = RUN) -> None:
            await engine.execute(run, kind(member.node_id, member.lease.number, *rest))

        async def confirm(*members: Member, run: str = RUN) -> int:
            round_ = (await engine.get_run(run)).round
            for member in members:
                await act(member, commands.Confirm, round_, 29500, run=run)
            return round_

        async def fail(member: Member, round_: int) -> None:
            worker = (
                round_,
                3,
                1,
                "trainer",
                member.node_id,
                "host",
                77,
                1,
                1.7e9,
                "it broke",
                "Traceback",
                "log",
            )
            failure = ReportedFailure(*worker, kind=FailureKind.EXCEPTION)
            await act(member, commands.ReportFailure, failure)
            for each in (a, b, c):
                engine.renew(each)

        a, b, c = [await join(node) for node in "abc"]
        await fail(b, await confirm(a, b, c))
        await engine.execute(RUN, commands.Evict("y", "its disk fails"))
        second = await confirm(a, b, c)
        for _ in range(_EXERCISES):
            exercise: list[commands.Command] = [commands.Evict("z", ""), commands.Readmit("z", "")] * 50
            await asyncio.gather(*(engine.execute(RUN, each) for each in exercise))
        await fail(c, second)
        await act(c, commands.Depart, "maintenance")
        await act(c, commands.Leave, "maintenance")
        clock.now += 1.5  # the last call is over; the leases are not
        assert await confirm(a, b) == _ROUND
        parts = RecoveryParts(detected=0.25, told=0.5, stopped=1.0, reformed=2.0, started=4.0)
        for member in (a, b):
            engine.note_start(member, StartReport(_ROUND, parts))
        await engine.settled()

        writer, store = writer_of(a), shard.store
        operation = Operation("client", 1, 1)
        for space in (0, _ROUND):
            await store.write(
                RUN,
                Set(
                    round=space,
                    writer=writer,
                    operation=operation if space else None,
                    key="key",
                    value=b"v\0",
                ),
            )
            await store.write(RUN, Add(round=space, writer=writer, key="sum", amount=-(2**40)))
            await store.write(RUN, Append(round=space, writer=writer, key="log", value=b"line\n"))
            await store.write(
                RUN, MultiSet(round=space, writer=writer, entries={"é/1": b"", "é/2": bytes(300)})
            )
            await store.write(
                RUN, CompareSet(round=space, writer=writer, key="key", expected=b"v\0", desired=b"swapped")
            )
            await store.write(RUN, DeleteKey(round=space, writer=writer, key="é/1"))
        state = (await shard.states.set(SetState(run_id=RUN, state=b"first"))).current
        assert state is not None
        await shard.states.set(SetState(run_id=RUN, state=b"second", token=state.token, operation=operation))
        await shard.states.set(SetState(run_id="a state alone", state=b"\xff"))

        for run in (ENDED, DELETED):
            nodes = [await join(node, run, 2) for node in "ab"]
            round_ = await confirm(*nodes, run=run)
            for member in nodes:
                await act(member, commands.ReportSuccess, round_, run=run)
        await engine.delete_run(DELETED)
        return {"node_id": "a", "lease": a.lease.number, "token": b64encode(a.lease.token).decode()}


class Served:
    """A service over a journal, as seen by clients."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.runs: Any = pb_grpc.RendezvousServiceStub(channel)
        self.store: Any = store_grpc.StoreServiceStub(channel)
        self.states: Any = state_grpc.StateServiceStub(channel)

    async def contents(self) -> dict[str, Any]:
        """Return all that can be read of a journal that `write` wrote, as JSON."""
        listed = (await self.runs.ListRuns(pb.ListRunsRequest(), timeout=PATIENCE)).runs
        found: dict[str, Any] = {"runs": {}, "events": {}, "store": {}, "states": {}}
        for run in sorted(each.run_id for each in listed):
            got = await self.runs.GetRun(pb.GetRunRequest(run_id=run), timeout=PATIENCE)
            found["runs"][run] = _json(got.run)
            found["events"][run] = await self.events(run)
            for space in sorted({0, got.run.round}):
                found["store"][f"{run} {space}"] = await self._keys(run, space)
        for run in (RUN, "a state alone"):
            got = await self.states.GetState(state_pb.GetStateRequest(run_id=run), timeout=PATIENCE)
            found["states"][run] = _json(got.current)
        return found

    async def events(self, run: str) -> list[dict[str, Any]]:
        """Return the events, without their sentences for people: these may be improved."""
        page = await self.runs.ListEvents(pb.ListEventsRequest(run_id=run), timeout=PATIENCE)
        assert not page.next_page_token
        for event in page.events:
            event.ClearField("detail")
        return [_json(event) for event in page.events]

    async def _keys(self, run: str, space: int) -> dict[str, str]:
        try:
            listed = await self.store.ListKeys(
                store_pb.ListKeysRequest(run_id=run, round=space), timeout=PATIENCE
            )
        except grpc.aio.AioRpcError as error:
            return {"refused": error.code().name}
        keys = list(listed.keys)
        request = store_pb.MultiGetRequest(run_id=run, round=space, keys=keys)
        values = (await self.store.MultiGet(request, timeout=PATIENCE)).values if keys else []
        return {key: b64encode(value).decode() for key, value in zip(keys, values, strict=True)}

    async def continue_(self, lease: dict[str, Any], token: bytes) -> None:
        """Resume a lease that `write` returned, and write to its run, as a node and as an operator."""
        stream = self.runs.Join(timeout=PATIENCE)
        holder = {"node_id": lease["node_id"], "lease": lease["lease"], "token": token}
        await stream.write(pb.JoinRequest(resume=pb.ResumeRun(run_id=RUN, **holder)))
        assert (await stream.read()).lease.number == lease["lease"]
        for space in (0, _ROUND):
            writer = store_pb.StoreWriter(**holder)
            add = store_pb.AddRequest(run_id=RUN, round=space, key="sum", amount=1, writer=writer)
            assert (await self.store.Add(add, timeout=PATIENCE)).value == 1 - 2**40
        evict = pb.EvictNodeRequest(run_id=RUN, node_id="b", reason="the test")
        assert (await self.runs.EvictNode(evict, timeout=PATIENCE)).was_in
        stream.cancel()


@asynccontextmanager
async def served(journal: Journal, endpoint: str) -> AsyncIterator[Served]:
    """Serve a journal on a socket, two minutes after it was written."""
    clock = _Clock()
    clock.now += 120.0
    async with _shard(journal, clock, 8) as shard:
        server = Server(
            ServerOptions(host=endpoint),
            services=registrations(SingleShardLocator(shard)),
            translate=translate,
        )
        await server.start()
        channel = open_channel(server.address)
        try:
            yield Served(channel)
        finally:
            await channel.close()
            await server.stop()


def _json(message: Message) -> Any:
    return MessageToDict(message, always_print_fields_with_no_presence=True)


def differences(now: Any, then: Any, path: str = "") -> list[str]:
    """Return the differences of JSON from that of an older version; new fields are no difference."""
    if isinstance(then, dict) and isinstance(now, dict):
        return [each for key in then for each in differences(now.get(key), then[key], f"{path}/{key}")]
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = enumerate(zip(now, then, strict=True))
        return [each for at, (new, old) in pairs for each in differences(new, old, f"{path}[{at}]")]
    return [] if now == then else [f"{path}: {now!r}, was {then!r}"]
