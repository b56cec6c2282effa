"""The contract of rendezvous_service.proto over real gRPC: streams that break and resume; every refusal."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.servicer import RendezvousServicer
from rallypoint.rendezvous.runs.run import Member
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.rpc.errors import ServiceError, decode
from rallypoint.serving import flow
from rallypoint.serving.server import Registration, Server
from rendezvous.engine_fixtures import RUN, Stage, staged
from rendezvous.locators import locator_of
from support.refusals import refusal
from support.waiting import PATIENCE, until

Code = grpc.StatusCode
SERVICE = "rallypoint.rendezvous.v1.RendezvousService"
SETTINGS = pb.RunSettings(min_nodes=2, max_nodes=2, max_restarts=3)
CONTRADICTIONS = pb.RunSettings(min_nodes=2, max_nodes=1, max_restarts=10_001, max_restarts_per_node=10_002)
CONTRADICTIONS.keep_alive_interval.CopyFrom(Duration(seconds=1_201))


class NodeStream:
    """A node's stream, as a client writes and reads it."""

    def __init__(self, stub: pb_grpc.RendezvousServiceAsyncStub) -> None:
        self.call = stub.Join(timeout=PATIENCE)
        self.lease = pb.Lease()
        self._unread: pb.JoinResponse | None = None

    async def say(self, **message: Any) -> None:
        await self.call.write(pb.JoinRequest(**message))

    async def hear(self) -> pb.JoinResponse:
        """Return the next message, or the rest of a message after its lease was taken."""
        unread, self._unread = self._unread, None
        response = await self.call.read() if unread is None else unread
        assert isinstance(response, pb.JoinResponse), "the stream is over"
        return response

    async def admission(self) -> pb.Lease:
        """Return the lease of the first message; keep the rest of that message for `hear`."""
        response = await self.hear()
        assert response.HasField("lease")
        self.lease.CopyFrom(response.lease)
        response.ClearField("lease")
        self._unread = response if response.ListFields() else None
        return self.lease

    async def update(self) -> pb.NodeUpdate:
        response = await self.hear()
        assert response.HasField("update")
        return response.update

    async def until(self, phase: pb.Phase.ValueType) -> pb.NodeUpdate:
        """Return the next update in that phase."""
        while (update := await self.update()).phase != phase:
            pass
        return update

    async def ended(self) -> ServiceError | None:
        """Read to the end; return the error that the stream ended with, if any."""
        try:
            while await self.call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return decode(error)
        assert await self.call.code() is Code.OK
        return None


class Served:
    """A rendezvous service on a real socket; the test controls its journal and its clock."""

    def __init__(self, stage: Stage, server: Server, servicer: RendezvousServicer) -> None:
        self.stage = stage
        self.server = server
        self.servicer = servicer
        self._channels: list[grpc.aio.Channel] = []
        self._streams: list[NodeStream] = []  # held: a call that is collected as garbage is cancelled

    def channel(self) -> grpc.aio.Channel:
        """Open a new connection."""
        self._channels.append(open_channel(self.server.address))
        return self._channels[-1]

    def stub(self) -> pb_grpc.RendezvousServiceAsyncStub:
        stub: pb_grpc.RendezvousServiceAsyncStub = pb_grpc.RendezvousServiceStub(self.channel())
        return stub

    def stream(self) -> NodeStream:
        self._streams.append(NodeStream(self.stub()))
        return self._streams[-1]

    async def join(self, node_id: str, run_id: str = RUN) -> NodeStream:
        stream = self.stream()
        await stream.say(join=good_join(node_id, run_id))
        assert (await stream.admission()).number > 0
        return stream

    async def resume(self, node_id: str, lease: pb.Lease) -> NodeStream:
        stream = self.stream()
        resume = pb.ResumeRun(run_id=RUN, node_id=node_id, lease=lease.number, token=lease.token)
        await stream.say(resume=resume)
        return stream

    async def running(self, *node_ids: str) -> list[NodeStream]:
        """Return the streams of nodes whose round runs."""
        streams = [await self.join(node_id) for node_id in node_ids]
        for stream in streams:
            update = await stream.until(pb.PHASE_FROZEN)
            await stream.say(confirm=pb.ConfirmRound(round=update.assignment.round, master_port=29500))
        for stream in streams:
            await stream.until(pb.PHASE_FINAL)
        return streams

    async def run(self) -> pb.Run:
        return await self.stage.engine.get_run(RUN)

    async def until(self, holds: Callable[[pb.Run], bool]) -> pb.Run:
        """Wait until the condition holds for the run."""
        async with asyncio.timeout(PATIENCE):
            # Connections and lease renewals are not facts, so watchers receive no update about them.
            while not holds(run := await self.run()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return run

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
        await self.server.stop()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """The service, with reflection and health, like every Rallypoint server."""
    async with staged(Stage()) as stage:
        servicer = RendezvousServicer(locator_of(stage.engine))
        add = partial(pb_grpc.add_RendezvousServiceServicer_to_server, servicer)
        server = Server(
            ServerOptions(), services=[Registration(SERVICE, add, servicer.drain)], translate=translate
        )
        await server.start()
        served = Served(stage, server, servicer)
        yield served
        await served.close()


def good_join(node_id: str = "a", run_id: str = RUN, **more: Any) -> pb.JoinRun:
    return pb.JoinRun(
        run_id=run_id,
        node_id=node_id,
        settings=SETTINGS,
        address=f"{node_id}.cluster",
        local_world_size=2,
        role="trainer",
        **more,
    )


def report_of(round_: int = 1, **parts: Duration) -> pb.ReportStart:
    return pb.ReportStart(round=round_, parts=pb.RecoveryParts(**parts))


def field_of(error: ServiceError | None) -> str:
    """Return the name of the field for which a request is refused."""
    assert error is not None
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    ((field, description),) = error.field_violations
    assert error.message == f"{field}: {description}"
    return field


# ---- a node's stream


async def test_two_nodes_form_a_round(served: Served) -> None:
    """Lease, assignment, confirmation, FINAL: each node gets its own ranks, and all get the same world size."""
    a, b = await served.join("a"), await served.join("b")
    assert (a.lease.time_to_live.seconds, a.lease.keep_alive_interval.seconds) == (15, 5)
    frozen = [await a.until(pb.PHASE_FROZEN), await b.until(pb.PHASE_FROZEN)]
    assert [update.assignment.group_rank for update in frozen] == [0, 1]
    assert [update.assignment.base_rank for update in frozen] == [0, 2]
    await b.say(confirm=pb.ConfirmRound(round=1, master_port=1))
    await a.say(confirm=pb.ConfirmRound(round=1, master_port=29511))
    for stream in (a, b):
        final = (await stream.until(pb.PHASE_FINAL)).assignment
        assert (final.round, final.group_world_size, final.world_size, final.role_world_size) == (1, 2, 4, 4)
        assert (final.master_address, final.master_port) == ("a.cluster", 29511)
        assert final.fencing_token > 0


async def test_a_killed_client_is_noticed_after_the_grace(served: Served) -> None:
    """Its connection breaks; when the grace is over, the survivor gets the end of the round, with the lost node."""
    a, b = await served.running("a", "b")
    b.call.cancel()
    await served.until(lambda run: not all(node.connected for node in run.nodes))
    await served.stage.later(1.9)
    assert (await served.run()).phase == pb.PHASE_FINAL
    await served.stage.later(0.1)
    end = (await a.until(pb.PHASE_JOINABLE)).last_round_end
    assert (end.cause, end.node_id, end.round) == (pb.ROUND_END_CAUSE_NODE_LOST, "b", 1)


async def test_a_closed_connection_is_a_broken_stream(served: Served) -> None:
    """The kernel ends both connections, as when a process dies; closing a channel would only end its calls."""
    await served.running("a", "b")
    port = int(served.server.address.rpartition(":")[2])
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            with socket.socket(fileno=os.dup(connection.fd)) as client:
                client.shutdown(socket.SHUT_RDWR)
    run = await served.until(lambda run: not any(node.connected for node in run.nodes))
    assert run.phase == pb.PHASE_FINAL
    assert not (await served.stage.later(2)).nodes


async def test_a_client_that_ends_its_sending_side_is_a_broken_stream(served: Served) -> None:
    """A client that can't send heartbeats has ended its stream; the server ends its side with OK."""
    a, _ = await served.running("a", "b")
    await a.call.done_writing()
    assert await a.ended() is None
    await served.until(lambda run: not all(node.connected for node in run.nodes))


async def test_a_heartbeat_keeps_the_lease(served: Served) -> None:
    """A node that sends heartbeats stays; an open stream alone is not enough."""
    a, _ = await served.running("a", "b")
    deadline = served.stage.engine._runs[RUN].state.nodes["a"].lease_deadline
    await served.stage.later(14)
    await a.say(heartbeat=pb.Heartbeat())
    await served.until(lambda run: served.stage.engine._runs[RUN].state.nodes["a"].lease_deadline > deadline)
    run = await served.stage.later(1)
    assert [node.node_id for node in run.nodes] == ["a"]
    end = (await a.until(pb.PHASE_JOINABLE)).last_round_end
    assert end.detail == "node b was lost: no heartbeat for 15 s (3 missed, one every 5 s)"


async def test_the_watchdog_trouble_of_a_node_is_shown(served: Served) -> None:
    """Each heartbeat reports the trouble; other messages leave it unchanged. It becomes one line and is cut."""
    stream = await served.join("a")
    stub = served.stub()

    async def shown(expected: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while (await stub.GetRun(pb.GetRunRequest(run_id=RUN))).run.nodes[0].watchdog_trouble != expected:
                pass

    await shown("")
    await stream.say(heartbeat=pb.Heartbeat(watchdog_trouble="it does\nnot answer" + "." * 2000))
    await shown("it does not answer" + "." * (1024 - 18))
    await stream.say(confirm=pb.ConfirmRound(round=1))
    await stream.say(heartbeat=pb.Heartbeat(watchdog_trouble="refused"))
    await shown("refused")
    await stream.say(heartbeat=pb.Heartbeat())
    await shown("")


async def test_a_broken_stream_is_resumed_with_the_lease(served: Served) -> None:
    """The lease is the same, the client gets the present state, and no node is lost."""
    a, b = await served.running("a", "b")
    a.call.cancel()
    await served.until(lambda run: not all(node.connected for node in run.nodes))
    await b.say(worker_failed=pb.WorkerFailure(round=1, rank=2, message="it broke"))
    again = await served.resume("a", a.lease)
    assert (await again.admission()).number == a.lease.number
    update = await again.until(pb.PHASE_FROZEN)
    assert (update.phase, update.assignment.round, update.restart_count) == (pb.PHASE_FROZEN, 2, 1)
    assert update.last_round_end.detail == "worker of rank 2 on node b failed: it broke"
    assert len((await served.stage.later(3)).nodes) == 2


async def test_a_lease_that_ended_is_not_resumed(served: Served) -> None:
    """LEASE_LOST: the client may join as a new node, or not at all."""
    a = await served.join("a")
    error = await (await served.resume("a", pb.Lease(number=7))).ended()
    assert error is not None
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "LEASE_LOST")
    assert error.metadata["superseded_by"] == str(a.lease.number)


async def test_a_reader_of_a_run_can_not_act_for_its_nodes(served: Served) -> None:
    """The number of a lease is public and its token is not: no read returns it, and no stream resumes without it."""
    a, b = await served.running("a", "b")
    stub = served.stub()
    reads = [
        await stub.GetRun(pb.GetRunRequest(run_id=RUN)),
        await stub.ListRuns(pb.ListRunsRequest()),
        await stub.WatchRun(pb.WatchRunRequest(run_id=RUN)).read(),
        await stub.ListEvents(pb.ListEventsRequest(run_id=RUN)),
        await stub.WatchEvents(pb.WatchEventsRequest(run_id=RUN)).read(),
    ]
    assert len(a.lease.token) == 16
    assert a.lease.token != b.lease.token
    assert not any(a.lease.token in message.SerializeToString() for message in reads)  # type: ignore[attr-defined]
    for token in (b"", b.lease.token):
        error = await (await served.resume("a", pb.Lease(number=a.lease.number, token=token))).ended()
        assert error is not None
        assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "LEASE_NOT_PROVEN")
    assert all(node.connected for node in (await served.run()).nodes)
    await a.say(leave=pb.LeaveRun(reason="done"))
    assert await a.ended() is None


async def test_a_restart_that_an_agent_asks_for_has_the_name_of_its_operator(served: Served) -> None:
    """The event also names the agent, whose identity was checked."""
    await served.running("a", "b")
    stub = served.stub()
    await stub.RestartRun(pb.RestartRunRequest(run_id=RUN, reason="new data", on_behalf_of="alice"))
    events = (await stub.ListEvents(pb.ListEventsRequest(run_id=RUN))).events
    (actor,) = (event.actor for event in events if event.kind == pb.EVENT_KIND_RESTART_REQUESTED)
    assert (actor.kind, actor.name) == (pb.ACTOR_KIND_OPERATOR, f"alice through {actor.peer}")
    error = await refusal(stub.RestartRun(pb.RestartRunRequest(run_id=RUN, on_behalf_of="x" * 257)))
    assert field_of(error) == "on_behalf_of"


async def test_the_expected_round_and_lease_of_an_operator_are_checked(served: Served) -> None:
    """A request can be sent again without a second effect."""
    await served.running("a", "b")
    stub = served.stub()
    round_ = (await served.run()).round
    assert (await stub.RestartRun(pb.RestartRunRequest(run_id=RUN, round=round_))).ended_round == round_
    error = await refusal(stub.RestartRun(pb.RestartRunRequest(run_id=RUN, round=round_)))
    assert (error.reason, error.metadata["current_round"]) == ("ROUND_OVER", str(round_ + 1))
    error = await refusal(stub.EvictNode(pb.EvictNodeRequest(run_id=RUN, node_id="a", lease=10**6)))
    assert (error.reason, error.metadata["node_id"]) == ("LEASE_LOST", "a")
    (node,) = (
        await stub.ListNodes(pb.ListNodesRequest(run_id=RUN, filter=pb.NodeFilter(node_ids=["a"])))
    ).nodes
    request = pb.EvictNodeRequest(run_id=RUN, node_id="a", lease=node.lease)
    assert (await stub.EvictNode(request)).was_in
    assert not (await stub.EvictNode(request)).was_in


async def test_a_node_is_shown_with_the_address_of_its_agent(served: Served) -> None:
    """Clients connect there to inspect its workers."""
    stream = served.stream()
    join = good_join("a")
    join.supervisor_address = "10.0.0.1:29402"
    await stream.say(join=join)
    await stream.admission()
    (node,) = (await served.run()).nodes
    assert node.supervisor_address == "10.0.0.1:29402"


async def test_the_error_of_a_superseded_node_names_its_successor(served: Served) -> None:
    """Another agent joined under its name: its stream ends, and its lease is no longer valid."""
    old = await served.join("a")
    new = await served.join("a")
    error = await old.ended()
    assert error is not None
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "LEASE_LOST")
    assert error.metadata["superseded_by"] == str(new.lease.number)
    assert error.message.endswith("node a was lost: an agent joined again under its name")


async def test_the_newer_of_two_streams_of_one_lease_lives(served: Served) -> None:
    """The older one ends with ABORTED, which a client may retry."""
    old = await served.join("a")
    new = await served.resume("a", old.lease)
    assert (await new.hear()).lease.number == old.lease.number
    error = await old.ended()
    assert error is not None
    assert (error.code, error.reason) == (Code.ABORTED, "STREAM_REPLACED")
    await new.say(leave=pb.LeaveRun(reason="done"))
    assert await new.ended() is None


async def test_a_node_that_departs_and_leaves_gets_no_error(served: Served) -> None:
    """The other nodes get the end of the round at once; the stream of the leaving node ends with OK."""
    a, b = await served.running("a", "b")
    await b.say(depart=pb.DepartRun(reason="SIGTERM"))
    update = await a.until(pb.PHASE_JOINABLE)
    assert update.last_round_end.cause == pb.ROUND_END_CAUSE_NODE_LEFT
    assert update.last_round_end.detail == "node b left: SIGTERM"
    await b.say(leave=pb.LeaveRun())
    assert await b.ended() is None
    assert [node.node_id for node in (await served.run()).nodes] == ["a"]


async def test_the_success_of_all_ends_every_stream_in_order(served: Served) -> None:
    """The stream sends CLOSED with the outcome, then ends with OK."""
    streams = await served.running("a", "b")
    for stream in streams:
        await stream.say(succeeded=pb.ReportSuccess(round=1))
    for stream in streams:
        update = await stream.until(pb.PHASE_CLOSED)
        assert update.run_end.outcome == pb.OUTCOME_SUCCEEDED
        assert await stream.ended() is None


async def test_nothing_goes_over_the_wire_before_it_is_durable(served: Served) -> None:
    """Neither the lease of a joining node nor the updates to the other nodes."""
    a = await served.join("a")
    served.stage.journal.hold()
    b = served.stream()
    await b.say(join=good_join("b"))
    await served.stage.journal.held()
    receiving = [asyncio.create_task(stream.hear()) for stream in (a, b)]
    done, _ = await asyncio.wait(receiving, timeout=0.1)
    assert not done
    served.stage.journal.release()
    first, second = await asyncio.gather(*receiving)
    assert (first.HasField("lease"), first.HasField("update")) == (False, True)
    assert second.HasField("lease")


async def test_a_broken_journal_ends_every_call_as_unavailable(served: Served) -> None:
    """UNAVAILABLE: the client connects again after the service has restarted."""
    a = await served.join("a")
    served.stage.journal.break_()
    error = await refusal(served.stub().CloseRun(pb.CloseRunRequest(run_id=RUN)))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "JOURNAL_BROKEN")
    ended = await a.ended()
    assert ended is not None
    assert (ended.code, ended.reason) == (Code.UNAVAILABLE, "JOURNAL_BROKEN")


# ---- refused requests


@pytest.mark.parametrize(
    "first",
    [
        pb.JoinRequest(),
        pb.JoinRequest(heartbeat=pb.Heartbeat()),
        pb.JoinRequest(confirm=pb.ConfirmRound(round=1)),
        pb.JoinRequest(worker_failed=pb.WorkerFailure()),
        pb.JoinRequest(succeeded=pb.ReportSuccess()),
        pb.JoinRequest(depart=pb.DepartRun()),
        pb.JoinRequest(leave=pb.LeaveRun()),
    ],
    ids=lambda message: message.WhichOneof("message") or "empty",
)
async def test_the_first_message_must_be_join_or_resume(served: Served, first: pb.JoinRequest) -> None:
    """Any other first message is refused, and the refusal names it."""
    stream = served.stream()
    await stream.call.write(first)
    error = await stream.ended()
    assert field_of(error) == "message"
    assert error is not None
    assert (first.WhichOneof("message") or "empty") in error.message


async def test_a_stream_without_a_message_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that ends at once is refused for good; one that sends nothing may be retried: it may be a stall."""
    stream = served.stream()
    await stream.call.done_writing()
    assert field_of(await stream.ended()) == "message"
    monkeypatch.setattr(served.servicer._unopened, "_seconds", 0.05)
    error = await served.stream().ended()
    assert error is not None
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "FIRST_MESSAGE_LATE")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            "run_id node_id address supervisor_address role local_world_size settings.last_call_timeout",
            {
                "join": pb.JoinRun(
                    settings=pb.RunSettings(min_nodes=1, max_nodes=2, last_call_timeout=Duration(seconds=-1)),
                    supervisor_address="a" * 257,
                    role="a\nb",
                )
            },
        ),
        (
            "settings.max_nodes settings.keep_alive_interval settings.max_restarts_per_node settings.max_restarts",
            {
                "join": pb.JoinRun(
                    run_id=RUN, node_id="a", address="a", local_world_size=1, settings=CONTRADICTIONS
                )
            },
        ),
        ("run_id", {"resume": pb.ResumeRun(node_id="a", lease=1)}),
        ("node_id", {"resume": pb.ResumeRun(run_id=RUN, lease=1)}),
        ("token", {"resume": pb.ResumeRun(run_id=RUN, node_id="a", lease=1, token=bytes(65))}),
    ],
)
async def test_a_bad_field_of_the_first_message_is_named(
    served: Served, field: str, message: dict[str, Any]
) -> None:
    """INVALID_ARGUMENT with a BadRequest that names all of them; the run is not created."""
    stream = served.stream()
    await stream.say(**message)
    error = await stream.ended()
    assert error is not None
    assert error.code is Code.INVALID_ARGUMENT
    assert [name for name, _ in error.field_violations] == field.split()
    assert await served.stage.list_runs() == []


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("message", {"join": good_join()}),
        ("message", {"resume": pb.ResumeRun(run_id=RUN, node_id="a", lease=2)}),
        ("confirm.master_port", {"confirm": pb.ConfirmRound(round=1, master_port=65_536)}),
        ("confirm.master_port", {"confirm": pb.ConfirmRound(round=1, master_port=-1)}),
        ("depart.reason", {"depart": pb.DepartRun(reason="x" * 1025)}),
        ("leave.reason", {"leave": pb.LeaveRun(reason="a\nb")}),
        ("started.round", {"started": pb.ReportStart(round=0)}),
        ("started.parts.started", {"started": report_of(started=Duration(seconds=-1))}),
        ("started.parts.told", {"started": report_of(told=Duration(seconds=2**62))}),
        ("started.parts.stopped", {"started": report_of(stopped=Duration(seconds=25 * 24 * 3600 + 1))}),
    ],
)
async def test_a_bad_field_of_a_later_message_is_named(
    served: Served, field: str, message: dict[str, Any]
) -> None:
    """The stream ends, but the lease stays valid: a corrected client can resume."""
    a = await served.join("a")
    await a.say(**message)
    assert field_of(await a.ended()) == field
    again = await served.resume("a", a.lease)
    assert (await again.admission()).number == a.lease.number


async def test_other_settings_are_refused_by_name(served: Served) -> None:
    """The metadata has the run's own settings."""
    await served.join("a")
    stream = served.stream()
    join = good_join("b")
    join.settings.max_nodes = 9
    join.settings.last_call_timeout.CopyFrom(Duration(seconds=1, nanos=118_000_000))
    await stream.say(join=join)
    error = await stream.ended()
    assert error is not None
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "SETTINGS_DIFFER")
    assert error.metadata == {"max_nodes": "2", "last_call_timeout": "30.0"}
    assert "max_nodes is 2, not 9, last_call_timeout is 30.0, not 1.118" in error.message


async def test_a_hostile_report_does_not_stop_the_run(served: Served) -> None:
    """Impossible numbers, control characters and very long texts are cut, and the run goes on."""
    a, _ = await served.running("a", "b")
    failure = pb.WorkerFailure(
        round=1,
        rank=-(2**31),
        pid=-(2**63),
        exit_code=2**31 - 1,
        message="x\x1b\n" * 100_000,
        traceback="y" * 10**6,
    )
    failure.time.seconds, failure.time.nanos = 2**63 - 1, -(2**31)
    await a.say(worker_failed=failure)
    update = await a.until(pb.PHASE_FROZEN)
    assert update.restart_count == 1
    assert update.last_round_end.detail.isprintable()
    assert update.ByteSize() < 3000


async def test_the_start_of_a_round_is_one_event_and_no_commit_each(served: Served) -> None:
    """However often it is reported. A node that resumes learns that it is recorded; watchers get no update for it."""
    a, b = await served.running("a", "b")
    before = (await served.run()).revision
    for _ in range(100):
        await a.say(started=report_of(started=Duration(seconds=2)))
    await a.say(started=report_of(round_=9))
    last = report_of(stopped=Duration(seconds=7))
    last.age.seconds = 2**63 - 1  # a round may run for years before a node resumes
    await b.say(started=last)
    await served.until(lambda run: run.revision > before)
    await b.say(started=report_of())
    again = await served.resume("b", b.lease)
    await again.admission()
    assert (await again.update()).start_recorded
    assert (await served.run()).revision == before + 1
    events = (await served.stub().ListEvents(pb.ListEventsRequest(run_id=RUN, newest_first=True))).events
    assert (events[0].kind, events[0].round) == (pb.EVENT_KIND_ROUND_STARTED, 1)
    assert events[0].actor.kind == pb.ACTOR_KIND_SERVICE
    start = events[0].round_start
    assert (start.reported_nodes, start.slowest_node_id) == (2, "b")


async def test_garbage_is_refused(served: Served) -> None:
    """Bytes that are not a message."""
    call: Any = served.channel().stream_stream(f"/{SERVICE}/Join")(timeout=PATIENCE)
    await call.write(b"\xff\xff\xff")
    error = await refusal(call.read())
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "MALFORMED_MESSAGE")


# ---- operators and tools


async def test_a_run_can_be_looked_at(served: Served) -> None:
    """GetRun returns every node, ListRuns one summary per run."""
    await served.running("a", "b")
    await served.join("x", run_id="another")
    stub = served.stub()
    run = (await stub.GetRun(pb.GetRunRequest(run_id=RUN))).run
    assert [(node.node_id, node.state) for node in run.nodes] == [
        ("a", pb.NODE_STATE_RUNNING),
        ("b", pb.NODE_STATE_RUNNING),
    ]
    assert (run.round, run.world_size, run.settings.max_restarts) == (1, 4, 3)
    runs = (await stub.ListRuns(pb.ListRunsRequest())).runs
    assert [(each.run_id, each.node_count) for each in runs] == [("another", 1), (RUN, 2)]


async def test_a_waiting_run_reports_the_time_left(served: Served) -> None:
    """The time left for min_nodes, then for the last call, by the service's clock; with `most_nodes` nodes."""
    stub = served.stub()

    async def waiting(most_nodes: int | None = None) -> tuple[float | None, float | None, int]:
        run = (await stub.GetRun(pb.GetRunRequest(run_id=RUN, most_nodes=most_nodes))).run
        left = [
            to_seconds(getattr(run, name)) if run.HasField(name) else None
            for name in ("join_time_left", "last_call_left")
        ]
        return left[0], left[1], len(run.nodes)

    settings = pb.RunSettings(min_nodes=2, max_nodes=3)
    settings.join_timeout.FromSeconds(600)
    settings.last_call_timeout.FromSeconds(30)
    for node_id, expected in (("a", (593.0, None, 1)), ("b", (None, 23.0, 2))):
        join = good_join(node_id)
        join.settings.CopyFrom(settings)
        stream = served.stream()
        await stream.say(join=join)
        await stream.admission()
        served.stage.now += 7.0
        assert await waiting() == expected
    assert await waiting(most_nodes=1) == (None, 23.0, 1)
    assert await waiting(most_nodes=0) == (None, 23.0, 0)
    assert (
        await refusal(stub.GetRun(pb.GetRunRequest(run_id=RUN, most_nodes=-1)))
    ).reason == "INVALID_ARGUMENT"
    await served.join("x", run_id="another")
    assert not any(run.HasField("join_time_left") for run in (await stub.ListRuns(pb.ListRunsRequest())).runs)


@pytest.mark.parametrize("method", ["GetRun", "WatchRun", "CloseRun", "DeleteRun"])
async def test_a_run_that_is_not_there_is_not_found(served: Served, method: str) -> None:
    """The request does not create it; an invalid name is a bad request."""
    stub = served.stub()
    request = getattr(pb, method + "Request")

    async def call(run_id: str) -> None:
        answer = getattr(stub, method)(request(run_id=run_id), timeout=PATIENCE)
        await (answer.read() if method == "WatchRun" else answer)

    error = await refusal(call("nowhere"))
    assert (error.code, error.reason, error.metadata) == (
        Code.NOT_FOUND,
        "RUN_NOT_FOUND",
        {"run_id": "nowhere"},
    )
    for bad in ("", "x" * 257, "a\tb"):
        assert field_of(await refusal(call(bad))) == "run_id"


async def test_closing_a_run_is_sent_to_nodes_and_watchers(served: Served) -> None:
    """Nodes and watchers get the last state, and their streams end with OK; a second close returns the same end."""
    nodes = await served.running("a", "b")
    stub = served.stub()
    watching = stub.WatchRun(pb.WatchRunRequest(run_id=RUN), timeout=PATIENCE)
    await watching.read()
    end = (await stub.CloseRun(pb.CloseRunRequest(run_id=RUN, reason="wrong data"))).run_end
    assert (end.outcome, end.detail) == (pb.OUTCOME_CANCELLED, "closed by an operator: wrong data")
    for node in nodes:
        assert (await node.until(pb.PHASE_CLOSED)).run_end == end
        assert await node.ended() is None
    last = await watching.read()
    assert isinstance(last, pb.WatchRunResponse)
    assert last.run.run_end == end
    assert await watching.read() is grpc.aio.EOF
    assert (await stub.CloseRun(pb.CloseRunRequest(run_id=RUN, reason="again"))).run_end == end
    error = await refusal(stub.CloseRun(pb.CloseRunRequest(run_id=RUN, reason="x" * 1025)))
    assert field_of(error) == "reason"


async def test_deleting_a_run_frees_its_name(served: Served) -> None:
    """A run that still has nodes is not deleted."""
    nodes = await served.running("a", "b")
    stub = served.stub()
    error = await refusal(stub.DeleteRun(pb.DeleteRunRequest(run_id=RUN)))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "RUN_IN_USE")
    assert error.metadata == {"run_id": RUN, "nodes": "2"}
    await stub.CloseRun(pb.CloseRunRequest(run_id=RUN))
    for node in nodes:
        await node.until(pb.PHASE_CLOSED)
        assert await node.ended() is None
    incarnation = (await served.run()).incarnation
    error = await refusal(stub.DeleteRun(pb.DeleteRunRequest(run_id=RUN, incarnation="another")))
    assert error.reason == "RUN_NOT_FOUND"
    await stub.DeleteRun(pb.DeleteRunRequest(run_id=RUN, incarnation=incarnation))
    error = await refusal(stub.GetRun(pb.GetRunRequest(run_id=RUN)))
    assert error.code is Code.NOT_FOUND
    assert (await served.join("a")).lease.number > nodes[0].lease.number


async def test_a_closed_run_sends_its_outcome_to_late_nodes(served: Served) -> None:
    """A new node is refused, with the outcome; a node that was in the run gets the last state."""
    a, newcomer = served.stream(), served.stream()
    joins = [good_join("a"), good_join("b")]
    for join in joins:
        join.settings.reopen = pb.REOPEN_NEVER
    await a.say(join=joins[0])
    await a.admission()
    await served.stage.engine.close_run(RUN, "enough")
    await newcomer.say(join=joins[1])
    error = await newcomer.ended()
    assert error is not None
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "RUN_CLOSED")
    assert error.metadata == {"run_id": RUN, "outcome": "CANCELLED"}
    late = await served.resume("a", a.lease)
    assert (await late.admission()).number == a.lease.number
    assert (await late.update()).run_end.outcome == pb.OUTCOME_CANCELLED
    assert await late.ended() is None


async def test_a_join_to_an_ending_run_waits_until_its_nodes_have_gone(served: Served) -> None:
    """It gets the reason; a node that stays keeps its stream until it leaves."""
    a, b = served.stream(), served.stream()
    await a.say(join=good_join("a", stays_until_gone=True))
    lease = await a.admission()
    await served.stage.engine.close_run(RUN, "enough")
    assert (await a.until(pb.PHASE_CLOSED)).run_end.outcome == pb.OUTCOME_CANCELLED
    await b.say(join=good_join("b", stays_until_gone=True))
    assert "node a of it did not leave yet" in (await b.hear()).waiting.detail
    # Messages that it sent before it knew of the end do no harm.
    await a.say(confirm=pb.ConfirmRound(round=1))
    await a.say(heartbeat=pb.Heartbeat())
    again = served.stream()
    await again.say(
        resume=pb.ResumeRun(
            run_id=RUN, node_id="a", lease=lease.number, token=lease.token, stays_until_gone=True
        )
    )
    assert (await again.admission()).number == lease.number
    await again.until(pb.PHASE_CLOSED)
    await again.say(leave=pb.LeaveRun(reason="no worker is left"))
    assert await again.ended() is None
    assert (await b.admission()).incarnation != lease.incarnation


@pytest.mark.parametrize("stays", [False, True])
async def test_a_join_waits_no_longer_than_its_join_timeout(served: Served, *, stays: bool) -> None:
    """Then it is refused, with the number of nodes that are still in the run."""
    a, b = await served.join("a"), served.stream()
    await served.stage.engine.close_run(RUN, "enough")
    assert await a.ended() is None
    join = good_join("b", stays_until_gone=stays)
    join.settings.join_timeout.FromMilliseconds(50)
    await b.say(join=join)
    error = await b.ended()
    assert error is not None
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "RUN_ENDING")
    assert error.metadata == {"run_id": RUN, "nodes": "1"}


async def test_a_join_that_waits_is_ended_with_the_server(served: Served) -> None:
    """The client connects again, to the next server."""
    await served.join("a")
    await served.stage.engine.close_run(RUN, "enough")
    b = served.stream()
    await b.say(join=good_join("b", stays_until_gone=True))
    assert (await b.hear()).HasField("waiting")
    await served.servicer.drain()
    error = await b.ended()
    assert error is not None
    assert error.reason == "DRAINING"


async def test_a_join_that_waits_may_go_away(served: Served) -> None:
    """Then nothing waits any more."""
    a = served.stream()
    await a.say(join=good_join("a", stays_until_gone=True))
    await a.admission()
    await served.stage.engine.close_run(RUN, "enough")
    b = served.stream()
    await b.say(join=good_join("b", stays_until_gone=True))
    assert (await b.hear()).HasField("waiting")
    run = served.stage.engine._runs[RUN]
    await until(lambda: bool(run.waiting), "the join to wait, after its first message")
    b.call.cancel()
    await until(lambda: not run.waiting, "the end of its wait")
    await a.say(leave=pb.LeaveRun(reason="no worker is left"))
    assert await a.ended() is None
    assert (await served.run()).phase == pb.PHASE_CLOSED


async def test_a_watcher_resumes_where_it_was(served: Served) -> None:
    """It gets the present state first, or only newer states than it has seen; revisions only grow."""
    await served.join("a")
    stub = served.stub()
    first = stub.WatchRun(pb.WatchRunRequest(run_id=RUN), timeout=PATIENCE)
    seen = await first.read()
    assert isinstance(seen, pb.WatchRunResponse)
    first.cancel()
    again = stub.WatchRun(pb.WatchRunRequest(run_id=RUN, after_revision=seen.run.revision), timeout=PATIENCE)
    reading = asyncio.ensure_future(again.read())
    await served.until(lambda run: len(served.stage.engine._runs[RUN].watchers) == 1)
    assert not reading.done()
    await served.join("b")
    newer = await reading
    assert isinstance(newer, pb.WatchRunResponse)
    assert newer.run.revision > seen.run.revision
    assert newer.run.node_count == 2
    ahead = stub.WatchRun(pb.WatchRunRequest(run_id=RUN, after_revision=999), timeout=PATIENCE)
    error = await refusal(ahead.read())
    assert (error.code, error.reason) == (Code.OUT_OF_RANGE, "REVISION_AHEAD")


async def large_run(served: Served, nodes: int = 300) -> list[Member]:
    """Create a run whose state is a message of some 150 KB: a few of them fill the buffers of a connection."""
    stage = served.stage
    members = await asyncio.gather(*(stage.join(f"n{number:03}" + "x" * 200) for number in range(nodes)))
    return list(members)


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_watcher_that_does_not_read_gets_the_latest_state_only(served: Served) -> None:
    """A hundred changes while it does not read: it gets the messages in flight, and then the present state."""
    members = await large_run(served)
    watching = served.stub().WatchRun(pb.WatchRunRequest(run_id=RUN), timeout=PATIENCE)
    await watching.read()
    for member in members[100:200]:
        await served.stage.leave(member)
    last = (await served.stage.later(1.0)).revision  # watchers of large runs get an update only now and then
    revisions = [0]
    while revisions[-1] < last:
        response = await watching.read()
        assert isinstance(response, pb.WatchRunResponse)
        revisions.append(response.run.revision)
    assert revisions == sorted(set(revisions))
    assert len(revisions) < 50


async def test_a_watcher_that_never_reads_is_ended(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after the write timeout, so it costs nothing; it may resume. Other calls are served as before."""
    monkeypatch.setattr(flow, "WRITE_TIMEOUT", 0.5)
    members = await large_run(served)
    stub = served.stub()
    stuck = stub.WatchRun(pb.WatchRunRequest(run_id=RUN), timeout=PATIENCE)
    await stuck.read()
    watchers = served.stage.engine._runs[RUN].watchers.slots
    for member in members[100:]:
        if not watchers:
            break
        await served.stage.leave(member)
        await asyncio.sleep(0.02)
    await served.until(lambda run: not watchers)
    error = await refusal(read_to_the_end(stuck))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "SUBSCRIBER_TOO_SLOW")
    assert (await stub.GetRun(pb.GetRunRequest(run_id=RUN), timeout=PATIENCE)).run.node_count > 0


# ---- the server's start and drain


async def test_a_draining_server_announces_it_and_ends_every_stream(served: Served) -> None:
    """Nodes get the message and then an error, watchers and newcomers an error to retry; no node is lost."""
    nodes = await served.running("a", "b")
    watching = served.stub().WatchRun(pb.WatchRunRequest(run_id=RUN), timeout=PATIENCE)
    await watching.read()
    late = served.stub()
    await late.ListRuns(pb.ListRunsRequest())
    revision = (await served.run()).revision
    draining = asyncio.create_task(served.server.drain(5.0))
    for node in nodes:
        response = await node.hear()
        assert response.HasField("draining")
        assert response.draining.revision == revision
        ended = await node.ended()
        assert ended is not None, "a client takes OK for the end of its membership"
        assert (ended.code, ended.reason) == (Code.UNAVAILABLE, "DRAINING")
    error = await refusal(watching.read())
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")
    # gRPC itself cancels a call that arrives as the server closes: to clients the two mean the same.
    error = await refusal(late.ListRuns(pb.ListRunsRequest(), timeout=PATIENCE))
    assert error.code in {Code.UNAVAILABLE, Code.CANCELLED}
    await draining
    run = await served.stage.later(100)
    assert (run.phase, run.round, len(run.nodes)) == (pb.PHASE_FINAL, 1, 2)


async def test_a_stream_that_opens_while_the_server_drains_ends_with_the_others(served: Served) -> None:
    """Its node was admitted at the last moment: it gets `draining` like the others, and does not delay the drain."""
    await served.join("a")
    served.stage.journal.hold()
    late = served.stream()
    await late.say(join=good_join("b"))
    await served.stage.journal.held()
    draining = asyncio.create_task(served.server.drain(60.0))
    watched = served.stage.engine._runs[RUN].members["a"].updates
    with pytest.raises(Exception, match="going away"):
        await watched.take()
    served.stage.journal.release()
    assert (await late.admission()).number > 0
    while not (response := await late.hear()).HasField("draining"):
        assert response.HasField("update")
    ended = await late.ended()
    assert ended is not None
    assert ended.reason == "DRAINING"
    await draining


async def test_a_silent_stream_delays_no_drain(served: Served) -> None:
    """Its client was cut off before its first message: it gets the same error as all others."""
    stub = served.stub()
    silent = stub.Join(timeout=PATIENCE)
    await stub.ListRuns(pb.ListRunsRequest())  # arrives after it
    draining = asyncio.create_task(served.server.drain(PATIENCE))
    error = await refusal(silent.read())
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")
    await draining


async def test_reflection_and_health_are_served(served: Served) -> None:
    """grpcurl finds the service, and a health check returns SERVING."""
    channel = served.channel()
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    async for answer in reflection.ServerReflectionInfo(asked, timeout=PATIENCE):
        assert SERVICE in [service.name for service in answer.list_services_response.service]
    health = health_pb2_grpc.HealthStub(channel)
    status = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=PATIENCE)
    assert status.status == health_pb2.HealthCheckResponse.SERVING
