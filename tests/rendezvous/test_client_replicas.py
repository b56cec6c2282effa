"""A node stays a member of its run when the run moves between replicas of the rendezvous."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous import client
from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.service import SERVICE_NAME, rendezvous_services
from rallypoint.rendezvous.client import Admitted, Event, Membership, RendezvousUnreachable
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.store.client import StoreClient, Writer
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc import replica_client
from rallypoint.rpc.address import Address
from rallypoint.rpc.endpoint import ServerOptions, parse_endpoint
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.replica_client import ReplicaClient, ReplicaConnection
from rallypoint.serving.server import Registration, Server
from serving.fleet import mute, not_owner, refusing
from support.log_events import log_events
from support.waiting import PATIENCE

JOIN = pb.JoinRun(
    run_id="r",
    node_id="n",
    settings=pb.RunSettings(min_nodes=1, max_nodes=2, reopen=pb.REOPEN_NEVER),
    address="a",
    local_world_size=1,
    role="d",
)


class Other:
    """A replica that owns nothing.

    Attributes:
        owner: The owner that it names; empty: none.
        silent: It accepts streams, and sends nothing on them.
        paused: It admits, and sends nothing after that, as an owner that is stopped.
    """

    def __init__(self) -> None:
        self.owner = ""
        self.silent = False
        self.paused = False
        self.asked = asyncio.Event()

    async def join(self, requests: object, context: object) -> AsyncIterator[pb.JoinResponse]:
        """Refuse with NotOwner, unless silent or paused."""
        self.asked.set()
        if self.paused:
            yield pb.JoinResponse(lease=pb.Lease(number=1, keep_alive_interval=Duration(seconds=3600)))
        if self.silent or self.paused:
            await asyncio.get_running_loop().create_future()
        raise not_owner(self.owner)


class Fleet:
    """One replica that owns the run, over a journal that outlives it, and other replicas."""

    def __init__(self, stack: AsyncExitStack, journal: Path) -> None:
        self._stack = stack
        self._journal = journal
        self._owner = AsyncExitStack()
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    async def own(self) -> str:
        """Start a replica that owns the run; return its address."""
        services = await self._owner.enter_async_context(rendezvous_services(SqliteJournal(self._journal)))
        server = Server(ServerOptions(), services=services, translate=translate)
        await server.start()
        self._owner.push_async_callback(server.stop)
        self._stack.push_async_callback(self._owner.aclose)
        return server.address

    async def kill_owner(self) -> None:
        """Stop the owner."""
        await self._owner.aclose()

    async def other(self) -> tuple[Other, str]:
        """Add a replica that owns nothing."""
        servicer = Other()
        join = grpc.stream_stream_rpc_method_handler(
            servicer.join, pb.JoinRequest.FromString, pb.JoinResponse.SerializeToString
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE_NAME, {"Join": join})
        registration = Registration(SERVICE_NAME, lambda server: server.add_generic_rpc_handlers((handlers,)))
        server = Server(ServerOptions(), services=[registration], translate=lambda error: None)
        await server.start()
        self._stack.push_async_callback(server.stop)
        return servicer, server.address

    def join(self, *places: str, connect_timeout: float = PATIENCE) -> asyncio.Task[None]:
        """Join the run."""
        board = ReplicaClient(",".join(places))
        self._stack.push_async_callback(board.close)
        self.board = board
        membership = Membership(
            board, str(board), JOIN, self.events.put_nowait, connect_timeout=connect_timeout
        )
        task = asyncio.create_task(membership.run())
        self._stack.push_async_callback(asyncio.wait, {task})
        self._stack.callback(task.cancel)
        return task

    async def admitted(self) -> Admitted:
        """Wait until the member is admitted."""
        async with asyncio.timeout(PATIENCE):
            while True:
                event = await self.events.get()
                if isinstance(event, Admitted):
                    return event


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(stack, tmp_path / "journal.db")


async def test_a_node_joins_at_the_owner_wherever_it_begins(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so without a pause; the owner need not be in its list."""
    monkeypatch.setattr(client, "_FIRST_BACKOFF", 3600.0)
    other, elsewhere = await fleet.other()
    other.owner = await fleet.own()
    fleet.join(elsewhere)
    assert not (await fleet.admitted()).resumed
    assert other.asked.is_set()


async def test_a_node_is_resumed_by_the_next_owner(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its lease. While there is no owner, it asks the replicas of its list. It does not wait for an owner
    that is gone, however long the timeout for silent replicas is."""
    monkeypatch.setattr(replica_client, "REPLY_TIMEOUT", 3600.0)
    other, elsewhere = await fleet.other()
    first = await fleet.own()
    other.owner = first
    fleet.join(elsewhere, first)
    before = await fleet.admitted()
    for _ in range(2):
        other.asked.clear()
        await fleet.kill_owner()
        async with asyncio.timeout(PATIENCE):
            await other.asked.wait()
        other.owner = await fleet.own()
        after = await fleet.admitted()
        assert (after.lease, after.resumed) == (before.lease, True)


async def test_a_silent_replica_does_not_block_a_node(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica accepts streams, the other one, stopped, only connections."""
    monkeypatch.setattr(replica_client, "REPLY_TIMEOUT", 0.3)
    monkeypatch.setattr(replica_client, "CONNECT_TIMEOUT", 0.3)
    other, silent = await fleet.other()
    other.silent = True
    keeper, stopped = mute()
    with keeper:
        fleet.join(stopped, silent, await fleet.own())
        assert not (await fleet.admitted()).resumed


async def test_stores_and_nodes_of_a_job_share_the_known_owner(fleet: Fleet) -> None:
    """The store client asks the owner that the node has found."""
    other, elsewhere = await fleet.other()
    other.owner = await fleet.own()
    fleet.join(elsewhere)
    held = (await fleet.admitted()).held
    writer = Writer(JOIN.node_id, held.number, held.token)
    store = StoreClient(fleet.board, "r", writer=lambda: writer)
    async with asyncio.timeout(PATIENCE):
        await store.set("k", b"v")
        assert await store.get("k") == b"v"


async def test_an_unreachable_service_is_reported_with_all_addresses(fleet: Fleet) -> None:
    (one, first), (two, second) = refusing(), refusing()
    told = f"no rendezvous service answered at {first},{second} within 0.5 s: .*Connection refused"
    with one, two, pytest.raises(RendezvousUnreachable, match=told):
        await asyncio.wait_for(fleet.join(first, second, connect_timeout=0.5), PATIENCE)


async def test_the_owner_s_refusal_is_final(fleet: Fleet) -> None:
    """This holds also if the node found the owner by a redirect."""
    other, elsewhere = await fleet.other()
    owner = await fleet.own()
    async with ReplicaClient(owner) as board, asyncio.timeout(PATIENCE):
        task = fleet.join(owner)
        await fleet.admitted()
        line = await board.connect(board.search())
        await line.stub(pb_grpc.RendezvousServiceStub).CloseRun(pb.CloseRunRequest(run_id="r"))
        line.hang_up()
        await task
        other.owner = owner
        with pytest.raises(ServiceError) as caught:
            await fleet.join(elsewhere)
        assert caught.value.reason == "RUN_CLOSED"
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_result_of_another_call_ends_the_wait_for_a_paused_owner(fleet: Fleet) -> None:
    """Its stream would end only at gRPC's timeout; another replica has answered for the run meanwhile."""
    paused, before = await fleet.other()
    paused.paused = True
    fleet.join(before, before)
    assert (await fleet.admitted()).at == before
    other, elsewhere = await fleet.other()
    other.owner = owner = await fleet.own()
    search = fleet.board.search()
    for place, error in ((elsewhere, not_owner(owner)), (owner, None)):
        at = Address.of(parse_endpoint(place))
        if error is None:
            search.answered(at)
        else:
            fleet.board.learn(search, at, error)
    paused.paused = False
    async with asyncio.timeout(PATIENCE):
        while (event := await fleet.events.get()) is not None:
            if isinstance(event, Admitted) and event.at == owner:
                break


async def test_an_outage_is_logged_once_with_the_lost_replica(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """The log line leaves out the replies of the others, which still name it as the owner."""
    caplog.set_level(logging.INFO, "rallypoint")
    other, elsewhere = await fleet.other()
    other.owner = first = await fleet.own()
    fleet.join(elsewhere, first)
    assert (await fleet.admitted()).at == first
    await fleet.kill_owner()
    for _ in range(3):
        other.asked.clear()
        async with asyncio.timeout(PATIENCE):
            await other.asked.wait()
    other.owner = second = await fleet.own()
    assert (await fleet.admitted()).at == second
    told = log_events(each for each in caplog.records if each.name == "rallypoint.rendezvous.client")
    assert len(told) == 1
    (line,) = told
    if line.name == "rendezvous replica lost, looking for the next owner of the run":
        assert (line.fields["replica"], line.fields["among"]) == (first, f"{elsewhere},{first}")
        assert "belongs to" not in line.fields["error"]
    else:  # it could still report that it is draining
        assert line.name == "the run moves to another replica"
        assert (line.fields["before"], line.fields["among"]) == (first, f"{elsewhere},{first}")


async def test_a_node_that_is_cancelled_while_a_call_fails_stops(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC treats a cancellation as its own while it begins a call, and may report the call's failure instead."""
    begun = asyncio.Event()

    async def line(*arguments: object) -> ReplicaConnection:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        raise ServiceError(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", "connection refused")

    monkeypatch.setattr(ReplicaClient, "connect", line)
    task = fleet.join("127.0.0.1:1,127.0.0.1:2")
    async with asyncio.timeout(PATIENCE):
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled()
