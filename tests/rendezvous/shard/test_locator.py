"""A server of several shards on real gRPC: each request goes to its run's shard, or gets the owner's address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import pytest

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.service import registrations
from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.shard.reader import RunReader
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as state_grpc
from rallypoint.rendezvous.v1 import store_service_pb2 as store_pb
from rallypoint.rendezvous.v1 import store_service_pb2_grpc as store_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.rpc.errors import ServiceError, decode
from rallypoint.serving.server import Server
from rendezvous.shard.test_read_only import reading
from rendezvous.shard_fixtures import OWNER, Scene, ShardJournal, elsewhere, opened
from support.joining import join_request
from support.waiting import PATIENCE

SETTINGS = pb.RunSettings(min_nodes=1, max_nodes=2)
# A run whose shard another replica owns, and one without an owner.
AWAY, UNOWNED = "away", "nobody's"


class TwoShards:
    """Runs that begin with "b" are in the second shard; another replica owns `AWAY`, and it can be read here."""

    def __init__(self, first: Scene, second: Scene, away: RunReader) -> None:
        self.first = first
        self.second = second
        self._away = away

    def shard(self, run_id: str) -> Shard:
        if run_id in (AWAY, UNOWNED):
            raise NotOwner(run_id, OWNER if run_id == AWAY else None)
        return (self.second if run_id.startswith("b") else self.first).shard

    def writer(self, run_id: str) -> Shard:
        return self.shard(run_id)

    async def reader(self, run_id: str) -> RunReader:
        if run_id == UNOWNED:
            raise NotOwner(run_id)
        return self._away if run_id == AWAY else self.shard(run_id)

    async def readers(self) -> Sequence[RunReader]:
        return [self.second.shard, self._away, self.first.shard]

    def shards(self) -> Sequence[Shard]:
        return [self.first.shard, self.second.shard]


class Served:
    """The locator, its server, and a client."""

    def __init__(self, home: TwoShards, server: Server, channel: grpc.aio.Channel) -> None:
        self.home = home
        self.server = server
        self.runs: Any = pb_grpc.RendezvousServiceStub(channel)
        self.store: Any = store_grpc.StoreServiceStub(channel)
        self.states: Any = state_grpc.StateServiceStub(channel)

    async def join(self, run_id: str, node_id: str = "a") -> tuple[Any, pb.Lease]:
        """A node's stream, and its lease."""
        call = self.runs.Join(timeout=PATIENCE)
        await call.write(join_request(run_id, node_id, SETTINGS))
        response = await call.read()
        return call, response.lease


async def ended(call: Any) -> ServiceError:
    """The error that a stream ends with."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return decode(error)
    raise AssertionError("it ended in good order")


async def refused(call: Any) -> ServiceError:
    """The error that a call ends with."""
    if hasattr(call, "read"):
        return await ended(call)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return decode(error.value)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        away = await stack.enter_async_context(opened(ShardJournal()))
        await away.join("a", AWAY)
        first, second = [await stack.enter_async_context(opened(ShardJournal())) for _ in range(2)]
        home = TwoShards(first, second, reading(away))
        server = Server(ServerOptions(), services=registrations(home), translate=translate)
        await server.start()
        stack.push_async_callback(server.stop)
        channel = await stack.enter_async_context(open_channel(server.address))
        yield Served(home, server, channel)


def owner_calls(served: Served, run_id: str) -> dict[str, Any]:
    """All calls that only the owner of a run answers."""
    runs, store, states = served.runs, served.store, served.states

    async def resume() -> Any:
        call = runs.Join(timeout=PATIENCE)
        await call.write(pb.JoinRequest(resume=pb.ResumeRun(run_id=run_id, node_id="a", lease=3)))
        return await call.read()

    writing: dict[str, Any] = {"run_id": run_id, "writer": store_pb.StoreWriter(node_id="a", lease=3)}
    calls = {
        "Join": served.join(run_id),
        "resume": resume(),
        "WatchRun": runs.WatchRun(pb.WatchRunRequest(run_id=run_id)),
        "WatchEvents": runs.WatchEvents(pb.WatchEventsRequest(run_id=run_id)),
        "CloseRun": runs.CloseRun(pb.CloseRunRequest(run_id=run_id)),
        "RestartRun": runs.RestartRun(pb.RestartRunRequest(run_id=run_id)),
        "EvictNode": runs.EvictNode(pb.EvictNodeRequest(run_id=run_id, node_id="a")),
        "Set": store.Set(store_pb.SetRequest(**writing, key="k")),
        "Add": store.Add(store_pb.AddRequest(**writing, key="k")),
        "Append": store.Append(store_pb.AppendRequest(**writing, key="k")),
        "CompareSet": store.CompareSet(store_pb.CompareSetRequest(**writing, key="k")),
        "MultiSet": store.MultiSet(
            store_pb.MultiSetRequest(**writing, entries=[store_pb.StoreEntry(key="k")])
        ),
        "Delete": store.Delete(store_pb.DeleteRequest(**writing, key="k")),
        "SetState": states.SetState(state_pb.SetStateRequest(run_id=run_id)),
        "WatchState": states.WatchState(state_pb.WatchStateRequest(run_id=run_id)),
    }
    for name, call, request in (
        ("Get", store.Get, store_pb.GetRequest(run_id=run_id, key="k")),
        ("MultiGet", store.MultiGet, store_pb.MultiGetRequest(run_id=run_id, keys=["k"])),
        ("Wait", store.Wait, store_pb.WaitRequest(run_id=run_id, keys=["k"])),
    ):
        request.timeout.FromSeconds(5)
        calls[name] = call(request)
    return calls


async def test_calls_for_another_owner_are_refused_with_its_address(served: Served) -> None:
    """The error has code, reason, run and the owner's address."""
    for name, call in owner_calls(served, AWAY).items():
        error = await refused(call)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_OWNER"), name
        assert (error.metadata, error.retry_after) == ({"run_id": AWAY, "owner_address": OWNER}, None), name


async def test_calls_for_a_run_without_an_owner_get_a_retry_delay(served: Served) -> None:
    """Reads are refused too, where no replica can read it either."""
    calls = owner_calls(served, UNOWNED)
    calls["GetRun"] = served.runs.GetRun(pb.GetRunRequest(run_id=UNOWNED))
    calls["ListEvents"] = served.runs.ListEvents(pb.ListEventsRequest(run_id=UNOWNED))
    calls["GetState"] = served.states.GetState(state_pb.GetStateRequest(run_id=UNOWNED))
    calls["Check"] = served.store.Check(store_pb.CheckRequest(run_id=UNOWNED, keys=["k"]))
    calls["ListKeys"] = served.store.ListKeys(store_pb.ListKeysRequest(run_id=UNOWNED))
    for name, call in calls.items():
        error = await refused(call)
        assert (error.reason, error.metadata, error.retry_after) == ("NOT_OWNER", {"run_id": UNOWNED}, 0.1), (
            name
        )


async def test_reads_are_answered_wherever_the_run_is(served: Served) -> None:
    """The answers come from durable data."""
    runs, store, states = served.runs, served.store, served.states
    run = (await runs.GetRun(pb.GetRunRequest(run_id=AWAY))).run
    assert [node.node_id for node in run.nodes] == ["a"]
    events = (await runs.ListEvents(pb.ListEventsRequest(run_id=AWAY))).events
    assert [event.kind for event in events][:2] == [pb.EVENT_KIND_RUN_CREATED, pb.EVENT_KIND_NODE_JOINED]
    assert not (await store.Check(store_pb.CheckRequest(run_id=AWAY, keys=["k"]))).present
    assert not (await store.ListKeys(store_pb.ListKeysRequest(run_id=AWAY))).keys
    assert not (await states.GetState(state_pb.GetStateRequest(run_id=AWAY))).HasField("current")


async def test_runs_of_all_shards_are_listed_by_name(served: Served) -> None:
    """Runs of other replicas are listed too."""
    for run_id in ("b1", "a2", "b3", "c4"):
        await served.join(run_id)
    listed = await served.runs.ListRuns(pb.ListRunsRequest())
    assert [run.run_id for run in listed.runs] == ["a2", AWAY, "b1", "b3", "c4"]
    assert set(served.home.first.shard.engine._runs) == {"a2", "c4"}
    assert set(served.home.second.shard.engine._runs) == {"b1", "b3"}


async def test_a_handed_over_run_sends_its_nodes_and_watchers_away(served: Served) -> None:
    """Their streams stay open until the new owner is known; those of another shard are not affected."""
    (gone, _), (stays, _) = await served.join("b1"), await served.join("a2")
    watching = served.runs.WatchRun(pb.WatchRunRequest(run_id="b1"))
    events = served.runs.WatchEvents(pb.WatchEventsRequest(run_id="b1"))
    state = served.states.WatchState(state_pb.WatchStateRequest(run_id="b1"))
    for stream in (watching, events, state):
        await stream.read()
    await served.home.second.shard.retire(NotOwner)
    served.home.second.shard.end_streams(elsewhere)
    for stream in (gone, watching, events, state):
        error = await ended(stream)
        assert (error.reason, error.metadata) == ("NOT_OWNER", {"run_id": "b1", "owner_address": OWNER})
    await stays.write(pb.JoinRequest(leave=pb.LeaveRun(reason="told to stop")))
    while await stays.read() is not grpc.aio.EOF:
        pass
    assert await stays.code() is grpc.StatusCode.OK


async def test_a_member_belongs_to_the_shard_that_admitted_it(served: Served) -> None:
    """Its messages go there, and are refused there, though another one has its run by now."""
    call, lease = await served.join("b1")
    old = served.home.second
    await old.shard.retire(NotOwner)
    async with opened(ShardJournal(old.journal.durable)) as again:
        served.home.second = again
        await call.write(pb.JoinRequest(leave=pb.LeaveRun(reason="told to stop")))
        error = await ended(call)
        assert (error.reason, error.metadata) == ("NOT_OWNER", {"run_id": "b1"})
        assert [node.lease for node in (await again.shard.engine.get_run("b1")).nodes] == [lease.number]


async def test_a_server_that_drains_ends_the_streams_of_all_its_shards(served: Served) -> None:
    """Waits for keys end with the same reason."""
    streams = [(await served.join(run_id))[0] for run_id in ("b1", "a2")]
    watch = served.states.WatchState(state_pb.WatchStateRequest(run_id="b1"))
    await watch.read()
    waits = []
    for run_id in ("b1", "a2"):
        request = store_pb.GetRequest(run_id=run_id, key="nowhere")
        request.timeout.FromSeconds(60)
        waits.append(served.store.Get(request))
    async with asyncio.timeout(PATIENCE):
        for scene in (served.home.first, served.home.second):
            while not any(run.waits.waiters for run in scene.shard.store._runs.values()):
                await served.runs.ListRuns(pb.ListRunsRequest())
    await served.server.drain(grace=PATIENCE)
    for stream in streams:
        while not (await stream.read()).HasField("draining"):
            pass
        assert (await ended(stream)).reason == "DRAINING"
    assert (await ended(watch)).reason == "DRAINING"
    for wait in waits:
        assert (await refused(wait)).reason == "DRAINING"
