"""A node stays a member of its run over broken streams and server restarts, and repeats reports that were lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.service import SERVICE_NAME, rendezvous_services
from rallypoint.rendezvous.client import (
    Admitted,
    Event,
    HeldLease,
    Membership,
    MembershipReset,
    MembershipUpdate,
    RendezvousUnreachable,
)
from rallypoint.rendezvous.journal.journal import Journal, MemoryJournal
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.durations import set_seconds
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.server import Registration, Server
from rendezvous.cut_proxy import CutProxy
from support.waiting import PATIENCE, until

RUN = "run-1"


class Service:
    """A rendezvous service that can be stopped and started again at the same address."""

    def __init__(self, journal: Callable[[], Journal]) -> None:
        """`journal`: makes the journal for each start."""
        # Bound and not listening, it reserves the port: no other process gets it while the service is away.
        self._place = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._place.getsockname()[1]}"
        self._journal = journal
        self._stack = AsyncExitStack()
        self.server: Server

    async def start(self) -> None:
        """Serve."""
        services = await self._stack.enter_async_context(rendezvous_services(self._journal()))
        options = ServerOptions(port=self._place.getsockname()[1])
        self.server = Server(options, services=services, translate=translate)
        await self.server.start()
        self._stack.push_async_callback(self.server.stop)

    async def stop(self) -> None:
        """Stop at once, as a process that is killed."""
        await self._stack.aclose()

    async def close(self) -> None:
        """Stop, and free the port."""
        await self.stop()
        self._place.close()


class Member:
    """A node, and all events of its membership."""

    def __init__(self, endpoint: str, request: pb.JoinRun, connect_timeout: float = PATIENCE) -> None:
        self.node_id = request.node_id
        self.events: list[Event] = []
        self._news = asyncio.Event()
        self.channel = open_channel(endpoint)
        self.membership = Membership(
            self.channel, endpoint, request, self._receive, connect_timeout=connect_timeout
        )
        self.running = asyncio.create_task(self.membership.run())

    def _receive(self, event: Event) -> None:
        self.events.append(event)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the events make a condition true."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def admitted(self, times: int = 1) -> Admitted:
        """Wait for the n-th admission."""
        await self.until(lambda: len(self.admissions) >= times)
        return self.admissions[times - 1]

    async def told(self, phase: pb.Phase.ValueType, round_: int = 0) -> pb.NodeUpdate:
        """Wait until the latest update has this phase and an assignment of this round; 0: no assignment."""

        def matches() -> bool:
            updates = self.updates
            return bool(updates) and updates[-1].phase == phase and updates[-1].assignment.round == round_

        await self.until(matches)
        return self.updates[-1]

    async def end(self) -> None:
        """Wait for the end of the membership; raise its error."""
        async with asyncio.timeout(PATIENCE):
            await self.running

    @property
    def admissions(self) -> list[Admitted]:
        """The admissions, one for each stream."""
        return [event for event in self.events if isinstance(event, Admitted)]

    @property
    def updates(self) -> list[pb.NodeUpdate]:
        """All updates that were received."""
        return [event.update for event in self.events if isinstance(event, MembershipUpdate)]

    @property
    def lost_leases(self) -> int:
        """The number of leases that ended."""
        return sum(isinstance(event, MembershipReset) for event in self.events)

    async def close(self) -> None:
        """Disconnect without leaving the run."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.channel.close()


def join_request(node_id: str, nodes: int = 2, most: int = 0, **settings: float) -> pb.JoinRun:
    """A join request: rounds form at once, and a broken stream has a long grace period."""
    run_settings = pb.RunSettings(min_nodes=nodes, max_nodes=most or nodes)
    for name, seconds in {"last_call_timeout": 0.0, "disconnect_grace": PATIENCE, **settings}.items():
        set_seconds(getattr(run_settings, name), seconds)
    return pb.JoinRun(
        run_id=RUN,
        node_id=node_id,
        settings=run_settings,
        address="10.0.0.1",
        local_world_size=2,
        role="default",
    )


@pytest.fixture
async def service(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Service]:
    """A service whose runs outlive it; parametrized with "memory", one that forgets them."""
    forgets = getattr(request, "param", "") == "memory"
    service = Service(MemoryJournal if forgets else lambda: SqliteJournal(tmp_path / "journal.db"))
    await service.start()
    yield service
    await service.close()


@pytest.fixture
async def join() -> AsyncIterator[Callable[..., Member]]:
    """Makes members; they are closed after the test."""
    members: list[Member] = []

    def make(endpoint: str, request: pb.JoinRun, connect_timeout: float = PATIENCE) -> Member:
        members.append(Member(endpoint, request, connect_timeout))
        return members[-1]

    yield make
    for member in members:
        await member.close()


@pytest.fixture
async def proxy(service: Service) -> AsyncIterator[CutProxy]:
    """A proxy in front of the service."""
    async with CutProxy(service.address) as proxy:
        yield proxy


async def see(endpoint: str, condition: Callable[[pb.Run], bool]) -> pb.Run:
    """Watch the run until a condition is true; return the run."""
    async with asyncio.timeout(PATIENCE), open_channel(endpoint) as channel:
        stub = pb_grpc.RendezvousServiceStub(channel)
        async for response in stub.WatchRun(pb.WatchRunRequest(run_id=RUN), wait_for_ready=True):
            if condition(response.run):
                return response.run
    raise AssertionError("the run was closed before it was so")


async def close_run(endpoint: str) -> None:
    """Close the run, as an operator."""
    async with open_channel(endpoint) as channel:
        await pb_grpc.RendezvousServiceStub(channel).CloseRun(pb.CloseRunRequest(run_id=RUN))


async def formed(*members: Member, round_: int = 1) -> None:
    """Confirm a round for the members; wait until it is final."""
    for member in members:
        await member.told(pb.PHASE_FROZEN, round_)
        member.membership.confirm(round_, 5000)
    for member in members:
        await member.told(pb.PHASE_FINAL, round_)


async def pair(service: Service, join: Callable[..., Member]) -> tuple[Member, Member]:
    """Two members, in round 2, of a run that needs only one."""
    one = join(service.address, join_request("a", nodes=1, most=2))
    await formed(one)
    two = join(service.address, join_request("b", nodes=1, most=2))
    await formed(one, two, round_=2)
    return one, two


async def test_two_members_join_confirm_and_run(service: Service, join: Callable[..., Member]) -> None:
    """Two nodes get to a final round, and to the end of a run that succeeds."""
    one, two = (join(service.address, join_request(node_id)) for node_id in ("a", "b"))
    await formed(one, two)
    seats = {member.updates[-1].assignment.group_rank: member.updates[-1].assignment for member in (one, two)}
    assert sorted(seats) == [0, 1]
    assert {(seat.world_size, seat.master_address, seat.master_port) for seat in seats.values()} == {
        (4, "10.0.0.1", 5000)
    }
    for member in (one, two):
        member.membership.report_success(1)
    for member in (one, two):
        await member.end()
        assert member.updates[-1].run_end.outcome == pb.OUTCOME_SUCCEEDED
        assert [type(event) for event in member.events[:1]] == [Admitted]


async def test_a_restarted_service_is_found_again_under_the_same_lease(
    service: Service, join: Callable[..., Member]
) -> None:
    """A restart of the service ends no lease and no round."""
    one, two = (join(service.address, join_request(node_id)) for node_id in ("a", "b"))
    await formed(one, two)
    await service.stop()
    await service.start()
    for member in (one, two):
        first, again = await member.admitted(1), await member.admitted(2)
        assert (first.resumed, again.resumed) == (False, True)
        assert again.lease == first.lease == member.membership.lease
    run = await see(service.address, lambda run: all(node.connected for node in run.nodes))
    assert (run.phase, run.round) == (pb.PHASE_FINAL, 1)
    for member in (one, two):
        # On resuming, the node receives the state that it knows.
        await member.until(lambda member=member: len(member.updates) > 2)  # type: ignore[misc]
        assert member.updates[-1].assignment.round == 1
        assert member.lost_leases == 0


async def test_a_service_that_drains_is_found_again_too(
    service: Service, join: Callable[..., Member]
) -> None:
    """A graceful restart costs no more than a crash."""
    one = join(service.address, join_request("a", nodes=1))
    await formed(one)
    await service.server.drain()
    await service.stop()
    await service.start()
    assert (await one.admitted(2)).resumed
    assert one.lost_leases == 0


@pytest.mark.parametrize("service", ["memory"], indirect=True)
async def test_a_node_joins_again_at_a_service_that_forgot_the_run(
    service: Service, join: Callable[..., Member]
) -> None:
    """The lease is not valid there: the node joins as a newcomer, and gets a MembershipReset."""
    one = join(service.address, join_request("a", nodes=1))
    await formed(one)
    await service.stop()
    await service.start()
    again = await one.admitted(2)
    assert not again.resumed
    assert [type(event) for event in one.events if not isinstance(event, MembershipUpdate)] == [
        Admitted,
        MembershipReset,
        Admitted,
    ]
    await formed(one)


async def test_a_node_that_lost_its_lease_joins_again(
    service: Service, proxy: CutProxy, join: Callable[..., Member]
) -> None:
    """A node that was away for too long is a newcomer, and its old lease is never sent again."""
    away = join(proxy.address, join_request("a", nodes=1, most=2, disconnect_grace=0.05))
    await formed(away)
    stays = join(service.address, join_request("b", nodes=1, most=2, disconnect_grace=0.05))
    await formed(away, stays, round_=2)
    proxy.refuse()
    await see(service.address, lambda run: [node.node_id for node in run.nodes] == ["b"])
    proxy.heal()
    again = await away.admitted(2)
    assert not again.resumed
    assert again.lease > away.admissions[0].lease
    ended = next(event for event in away.events if isinstance(event, MembershipReset))
    assert "no longer holds lease" in ended.reason


@pytest.mark.parametrize("lost", ["what was said", "the answer"])
async def test_the_last_report_is_repeated_on_the_next_stream(
    proxy: CutProxy, service: Service, join: Callable[..., Member], lost: str
) -> None:
    """A report written into a connection that broke may have arrived or not; sending it twice is harmless."""
    one = join(proxy.address, join_request("a", nodes=1))
    await one.told(pb.PHASE_FROZEN, 1)
    if lost == "what was said":
        proxy.swallow()
        one.membership.confirm(1, 5000)
        await until(lambda: proxy.swallowed > 0)
    else:
        proxy.keep_back()
        one.membership.confirm(1, 5000)
        await see(service.address, lambda run: run.phase == pb.PHASE_FINAL)
    proxy.heal()
    proxy.cut()
    assert (await one.told(pb.PHASE_FINAL, 1)).assignment.master_port == 5000
    assert one.lost_leases == 0


async def test_a_failure_is_received_though_the_node_departs_right_after(
    service: Service, join: Callable[..., Member]
) -> None:
    """A signal that comes right after a worker failed must not make the failure look like a departure."""
    one = join(service.address, join_request("a", nodes=1))
    await formed(one)
    one.membership.report_failure(pb.WorkerFailure(round=1, rank=1, exit_code=3, message="ValueError: boom"))
    one.membership.depart("got SIGTERM")
    await one.end()
    assert one.updates[-1].run_end.outcome == pb.OUTCOME_FAILED
    assert one.updates[-1].run_end.failure.message == "ValueError: boom"


async def test_members_answer_at_once_when_a_failed_round_settles(
    service: Service, join: Callable[..., Member]
) -> None:
    """The run ends once all have reported that they are alive: long before the next heartbeat is due."""
    requests = [join_request(node_id) for node_id in ("a", "b")]
    for request in requests:
        request.settings.keep_alive_interval.FromSeconds(1200)
    one, two = (join(service.address, request) for request in requests)
    await formed(one, two)
    one.membership.report_failure(pb.WorkerFailure(round=1, message="it broke"))
    for member in (one, two):
        await member.end()
        assert member.updates[-1].run_end.outcome == pb.OUTCOME_FAILED


async def test_a_repeated_failure_report_has_a_greater_age(
    proxy: CutProxy, join: Callable[..., Member]
) -> None:
    """The first report was lost with its connection; from the age, the service still finds the run's first failure."""
    one = join(proxy.address, join_request("a", nodes=1))
    await formed(one)
    proxy.swallow()
    failure = pb.WorkerFailure(round=1, message="it broke")
    failure.age.FromMilliseconds(500)
    one.membership.report_failure(failure)
    await until(lambda: proxy.swallowed > 0)
    said = asyncio.get_running_loop().time()
    await until(lambda: asyncio.get_running_loop().time() - said >= 0.2)
    proxy.heal()
    proxy.cut()
    await one.end()
    assert one.updates[-1].run_end.failure.age.ToNanoseconds() >= 0.7e9


async def test_a_start_is_reported_with_its_age_until_it_is_recorded(join: Callable[..., Member]) -> None:
    """It is sent once on each new stream, unless the first update there has `start_recorded`."""
    final = pb.NodeUpdate(phase=pb.PHASE_FINAL, assignment=pb.Assignment(round=1))
    admitted, recorded = lease(7), lease(7)
    admitted.update.CopyFrom(final)
    recorded.update.CopyFrom(final)
    recorded.update.start_recorded = True
    async with AsyncExitStack() as stack:
        script = Script([admitted], [admitted], [recorded])
        proxy = await stack.enter_async_context(CutProxy(await serve_script(script, stack)))
        one = join(proxy.address, join_request("a"))
        await one.told(pb.PHASE_FINAL, 1)
        one.membership.report_start(pb.ReportStart(round=1))
        for times in (1, 2, 3):
            await one.admitted(times)
            count = len(script.heard)
            await until(lambda count=count: len(script.heard) > count + 5)  # type: ignore[misc]
            proxy.cut()
        said = [request.started for request in script.heard if request.HasField("started")]
        assert [start.round for start in said] == [1, 1]
        assert said[0].age.ToNanoseconds() < said[1].age.ToNanoseconds()
        await one.close()


async def test_a_success_is_received_though_the_node_leaves_right_after(
    service: Service, join: Callable[..., Member]
) -> None:
    """A node leaves like this after the exit barrier; the round goes on for the others."""
    one, two = join(service.address, join_request("a")), join(service.address, join_request("b"))
    await formed(one, two)
    one.membership.report_success(1)
    one.membership.leave("the exit barrier is over")
    await one.end()
    two.membership.report_success(1)
    await two.end()
    assert two.updates[-1].run_end.outcome == pb.OUTCOME_SUCCEEDED
    assert [update.assignment.round for update in two.updates if update.phase == pb.PHASE_FINAL] == [1]


async def test_leaving_gives_the_lease_back(service: Service, join: Callable[..., Member]) -> None:
    """The others form a new round, and need not wait until the node's lease expires."""
    one, two = await pair(service, join)
    one.membership.leave("no longer needed")
    await one.end()
    run = await see(service.address, lambda run: [node.node_id for node in run.nodes] == ["b"])
    assert "a left: no longer needed" in run.last_round_end.detail
    assert two.lost_leases == 0


async def test_a_departing_node_is_waited_for_until_it_has_left(
    service: Service, join: Callable[..., Member]
) -> None:
    """The round ends at once; the next one is formed when the old workers are gone."""
    one, two = await pair(service, join)
    one.membership.depart("got SIGTERM")
    await two.told(pb.PHASE_JOINABLE)
    run = await see(service.address, lambda run: run.phase == pb.PHASE_JOINABLE)
    assert {node.node_id: node.state for node in run.nodes}["a"] == pb.NODE_STATE_DEPARTING
    one.membership.leave("got SIGTERM")
    await one.end()
    await formed(two, round_=3)


async def test_a_leave_that_a_draining_service_did_not_take_is_repeated(
    proxy: CutProxy, service: Service, join: Callable[..., Member]
) -> None:
    """Otherwise the others would wait until the lease of that node expires."""
    one = join(proxy.address, join_request("a", nodes=1))
    await one.admitted()
    proxy.swallow()
    one.membership.leave("no longer needed")
    await until(lambda: proxy.swallowed > 0)
    await service.server.drain(grace=0.1)
    await service.stop()
    proxy.heal()
    proxy.cut()
    await service.start()
    await one.end()
    run = await see(service.address, lambda run: not run.nodes)
    assert run.last_round_end.detail == "node a left: no longer needed"


async def test_a_departing_node_that_lost_its_lease_does_not_join_again(
    proxy: CutProxy, service: Service, join: Callable[..., Member]
) -> None:
    """It has no lease to give back, and joining only to leave would cost a round."""
    one = join(proxy.address, join_request("a", nodes=1, disconnect_grace=0.05))
    await one.admitted()
    proxy.refuse()
    one.membership.depart("got SIGTERM")
    await see(service.address, lambda run: not run.nodes)
    proxy.heal()
    await one.end()
    run = await see(service.address, lambda run: True)
    assert not run.nodes
    assert (len(one.admissions), one.lost_leases) == (1, 1)


async def test_a_node_that_departs_before_its_admission_does_not_join(
    proxy: CutProxy, join: Callable[..., Member]
) -> None:
    """This holds before the first admission too."""
    proxy.refuse()
    one = join(proxy.address, join_request("a"))
    one.membership.depart("got SIGTERM")
    await one.end()
    assert one.events == []


async def test_two_agents_of_one_name_do_not_chase_each_other_out(
    service: Service, join: Callable[..., Member]
) -> None:
    """The newer one gets the lease; the older one gets an error, and does not join again."""
    older = join(service.address, join_request("a"))
    await older.admitted()
    younger = join(service.address, join_request("a"))
    await younger.admitted()
    # gRPC may end the stream without the reason; the refusal to resume has another text.
    words = r"an agent joined again under its name|lease \d+ superseded it"
    with pytest.raises(ServiceError, match=words) as caught:
        await older.end()
    assert caught.value.reason == "LEASE_LOST"
    assert not younger.running.done()


async def test_a_closed_run_is_left_with_its_end(service: Service, join: Callable[..., Member]) -> None:
    """A member receives the outcome, and its membership ends."""
    one = join(service.address, join_request("a"))
    await one.admitted()
    await close_run(service.address)
    await one.end()
    assert one.updates[-1].run_end.outcome == pb.OUTCOME_CANCELLED


async def test_a_node_away_when_the_run_was_closed_receives_its_end(
    proxy: CutProxy, service: Service, join: Callable[..., Member]
) -> None:
    """Its lease ended with the run, but it still receives the outcome."""
    one = join(proxy.address, join_request("a"))
    await one.admitted()
    proxy.refuse()
    await close_run(service.address)
    proxy.heal()
    await one.end()
    assert one.updates[-1].run_end.outcome == pb.OUTCOME_CANCELLED
    assert one.lost_leases == 0


async def test_a_join_of_a_closed_run_is_refused(service: Service, join: Callable[..., Member]) -> None:
    """The error is RUN_CLOSED, and recommends another run id."""
    for request in (requests := [join_request("a"), join_request("b")]):
        request.settings.reopen = pb.REOPEN_NEVER
    first = join(service.address, requests[0])
    await first.admitted()
    await close_run(service.address)
    await first.end()
    with pytest.raises(ServiceError, match="start a new one under another run id") as caught:
        await join(service.address, requests[1]).end()
    assert caught.value.reason == "RUN_CLOSED"


async def test_a_run_is_opened_again_when_its_last_node_has_left(
    service: Service, join: Callable[..., Member]
) -> None:
    """With `stays_until_gone` a node keeps its lease past the end and over a restart; a join waits until it leaves."""
    requests = [join_request("a"), join_request("b", nodes=1)]
    for request in requests:
        request.stays_until_gone = True
    first = join(service.address, requests[0])
    await first.admitted()
    await close_run(service.address)
    await first.told(pb.PHASE_CLOSED)
    assert not first.running.done()
    await service.stop()
    await service.start()
    await first.admitted(2)
    second = join(service.address, requests[1])
    first.membership.leave("no worker is left")
    await first.end()
    await second.told(pb.PHASE_FROZEN, 1)
    assert first.lost_leases == 0
    held = second.admissions[0].held
    assert held.incarnation not in ("", first.admissions[0].held.incarnation)


async def test_an_agent_that_was_in_the_ended_run_does_not_join_the_next(
    service: Service, join: Callable[..., Member], proxy: CutProxy
) -> None:
    """Its lease is over, and it receives the outcome of its own run."""
    stale = join(proxy.address, join_request("a", nodes=1, disconnect_grace=0.05))
    await formed(stale)
    proxy.refuse()
    await see(service.address, lambda run: run.node_count == 0)
    await close_run(service.address)
    await join(service.address, join_request("b", nodes=1)).admitted()
    proxy.heal()
    with pytest.raises(ServiceError, match="CANCELLED") as caught:
        await stale.end()
    assert caught.value.reason == "RUN_CLOSED"
    assert len(stale.admissions) == 1


class Refusing(pb_grpc.RendezvousServiceServicer):
    """A service that admits a node, refuses it once when it resumes, and then admits it again."""

    def __init__(self, refusal: ServiceError) -> None:
        self.first_messages: list[pb.JoinRequest] = []
        self._refusal = refusal

    async def Join(
        self,
        request_iterator: AsyncIterator[pb.JoinRequest],
        context: grpc.aio.ServicerContext[pb.JoinRequest, pb.JoinResponse],
    ) -> AsyncIterator[pb.JoinResponse]:
        """See the class."""
        self.first_messages.append(await anext(request_iterator))
        if len(self.first_messages) == 2:
            raise self._refusal
        yield pb.JoinResponse(lease=pb.Lease(number=7, keep_alive_interval=Duration(seconds=5)))
        if len(self.first_messages) == 1:
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "the server is going away")
        await asyncio.Event().wait()


@asynccontextmanager
async def refusing(refusal: ServiceError) -> AsyncIterator[tuple[Refusing, Member]]:
    """A node whose stream ended, and that is refused when it resumes."""
    servicer = Refusing(refusal)  # type: ignore[abstract]
    add = partial(pb_grpc.add_RendezvousServiceServicer_to_server, servicer)
    server = Server(ServerOptions(), services=[Registration(SERVICE_NAME, add)])
    await server.start()
    member = Member(server.address, join_request("a"))
    try:
        yield servicer, member
    finally:
        await member.close()
        await server.stop()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (grpc.StatusCode.UNAVAILABLE, "FIRST_MESSAGE_LATE"),
        (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
        (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
        (grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED"),
        (grpc.StatusCode.FAILED_PRECONDITION, "OF_A_LATER_VERSION"),
    ],
)
async def test_an_admitted_node_gives_up_only_if_it_is_refused(code: grpc.StatusCode, reason: str) -> None:
    """After any other error it resumes with its lease: its workers run, and the next attempt may succeed."""
    async with refusing(ServiceError(code, reason, "not now")) as (servicer, member):
        assert (await member.admitted(times=2)).resumed
        assert [each.resume.lease for each in servicer.first_messages] == [0, 7, 7]
        assert not member.running.done()


@pytest.mark.parametrize(
    ("reason", "metadata"),
    [
        ("RUN_CLOSED", {}),
        ("SETTINGS_DIFFER", {}),
        ("NODE_EVICTED", {}),
        ("JOIN_TIMED_OUT", {}),
        ("LEASE_LOST", {"superseded_by": "9"}),
    ],
)
async def test_an_admitted_node_that_is_refused_gives_up(reason: str, metadata: dict[str, str]) -> None:
    """Each further attempt would be refused too."""
    refusal = ServiceError(grpc.StatusCode.FAILED_PRECONDITION, reason, "go", metadata=metadata)
    async with refusing(refusal) as (servicer, member):
        with pytest.raises(ServiceError, match="go") as caught:
            await member.end()
        assert caught.value.reason == reason
        assert len(servicer.first_messages) == 2


async def test_an_unreachable_address_is_reported_after_the_timeout(join: Callable[..., Member]) -> None:
    """The error has the cause of the failed connection."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        one = join(address, join_request("a"), 0.5)
        began = asyncio.get_running_loop().time()
        with pytest.raises(RendezvousUnreachable, match=f"at {address} within 0.5 s: .*Connection refused"):
            await one.end()
    assert 0.4 < asyncio.get_running_loop().time() - began < 10


async def test_a_silent_host_is_reported_with_its_address_too(join: Callable[..., Member]) -> None:
    """Another program listens there, not a rendezvous service."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(RendezvousUnreachable, match=f"at {address} within 0.5 s: "):
            await join(address, join_request("a"), 0.5).end()


class Script:
    """A service that sends scripted responses, and keeps all requests."""

    def __init__(self, *streams: list[pb.JoinResponse | grpc.StatusCode]) -> None:
        """`streams`: the responses on the first stream, the second …; a status ends it, else it stays open."""
        self.streams = list(streams)
        self.heard: list[pb.JoinRequest] = []

    async def join(
        self,
        request_iterator: AsyncIterator[pb.JoinRequest],
        context: grpc.aio.ServicerContext[pb.JoinRequest, pb.JoinResponse],
    ) -> None:
        """Follow the script."""
        self.heard.append(await anext(request_iterator))
        for answer in self.streams.pop(0) if self.streams else []:
            if isinstance(answer, grpc.StatusCode):
                await context.abort(answer, "as the script says")
            else:
                await context.write(answer)
        async for request in request_iterator:
            self.heard.append(request)


async def serve_script(script: Script, stack: AsyncExitStack) -> str:
    """Serve a script; return the address."""
    handler = grpc.stream_stream_rpc_method_handler(
        script.join, pb.JoinRequest.FromString, pb.JoinResponse.SerializeToString
    )
    generic = grpc.method_handlers_generic_handler(SERVICE_NAME, {"Join": handler})
    registration = Registration(SERVICE_NAME, lambda server: server.add_generic_rpc_handlers((generic,)))
    server = Server(ServerOptions(), services=[registration])
    await server.start()
    stack.push_async_callback(server.stop)
    return server.address


def lease(number: int) -> pb.JoinResponse:
    """A lease that asks for a heartbeat every 10 ms."""
    answer = pb.JoinResponse(lease=pb.Lease(number=number, revision=1))
    answer.lease.keep_alive_interval.FromMilliseconds(10)
    return answer


async def test_a_node_without_reports_sends_heartbeats(join: Callable[..., Member]) -> None:
    """It sends heartbeats at the interval of the lease."""
    async with AsyncExitStack() as stack:
        script = Script([lease(7)])
        one = join(await serve_script(script, stack), join_request("a"))
        await until(lambda: len(script.heard) > 5)
        assert script.heard[0].join == join_request("a")
        assert {request.WhichOneof("message") for request in script.heard[1:]} == {"heartbeat"}
        await one.close()


async def test_a_node_reports_a_missing_watchdog_at_once_and_until_it_has_one(
    join: Callable[..., Member],
) -> None:
    """It repeats that on a new stream, and beside other reports."""
    async with AsyncExitStack() as stack:
        quiet = lease(7)
        quiet.lease.keep_alive_interval.FromSeconds(3600)
        script = Script([quiet, grpc.StatusCode.UNAVAILABLE], [quiet])
        one = join(await serve_script(script, stack), join_request("a"))
        one.membership.report_watchdog("the timer service does not answer")
        await one.admitted(2)
        one.membership.confirm(3, 29500)

        def told() -> list[str]:
            return [
                request.heartbeat.watchdog_trouble
                for request in script.heard
                if request.WhichOneof("message") == "heartbeat"
            ]

        await until(lambda: "the timer service does not answer" in told())
        one.membership.report_watchdog("")
        await until(lambda: told()[-1:] == [""])
        await one.close()


@pytest.mark.parametrize(
    "end",
    [
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    ],
)
async def test_a_broken_stream_is_resumed_from_the_last_revision(
    join: Callable[..., Member], end: grpc.StatusCode
) -> None:
    """This holds for any status; only a refusal with a reason of the service ends the membership."""
    async with AsyncExitStack() as stack:
        seen = pb.JoinResponse(update=pb.NodeUpdate(revision=41, phase=pb.PHASE_JOINABLE))
        script = Script([lease(7), seen, end], [lease(7)])
        one = join(await serve_script(script, stack), join_request("a"))
        await one.admitted(2)
        resumed = pb.ResumeRun(run_id=RUN, node_id="a", lease=7, after_revision=41)
        assert [request.resume for request in script.heard if request.HasField("resume")] == [resumed]
        assert one.lost_leases == 0
        await one.close()


async def test_a_service_that_goes_away_before_it_gives_a_lease_admits_no_node(
    join: Callable[..., Member],
) -> None:
    """Without a lease there is no admission; the node repeats its last request."""
    async with AsyncExitStack() as stack:
        gone: list[pb.JoinResponse | grpc.StatusCode] = [
            pb.JoinResponse(draining=pb.Draining(revision=5)),
            grpc.StatusCode.UNAVAILABLE,
        ]
        script = Script(gone, [lease(7), grpc.StatusCode.UNAVAILABLE], gone, [lease(7)])
        one = join(await serve_script(script, stack), join_request("a"))
        await one.admitted(2)
        assert one.admissions == [Admitted(HeldLease(7), resumed=False), Admitted(HeldLease(7), resumed=True)]
        asked = [request.WhichOneof("message") for request in script.heard]
        assert [each for each in asked if each != "heartbeat"] == ["join", "join", "resume", "resume"]
        await one.close()
