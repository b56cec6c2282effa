"""Agents that serve their job's rendezvous over an etcd: each finds the run at any address, and each may be lost."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from rallypoint.agent.config.job import Peer
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import EtcdAddress, parse_address
from rallypoint.etcd.values import Delete, Put, Txn
from rallypoint.launcher import replicated
from rallypoint.launcher.replicated import OwnReplica, replicated_rendezvous
from rallypoint.launcher.run_lease import SEAT_TTL, run_lease
from rallypoint.rendezvous.cluster import shard_manager as hosting
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.cluster.view import ReplicaRegistration
from rallypoint.rendezvous.journal.etcd.keys import Owner
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as state_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import AccessFiles, ClientSecurity, ClientTLS, Plaintext, RunSecret, SettingError
from rallypoint.rpc.errors import decode
from rallypoint.rpc.pace import Pace
from serving.conftest import make_certificates
from support.etcd_server import EtcdCluster
from support.joining import join_request
from support.log_events import log_events
from support.ports import free_port
from support.refusals import refusal
from support.server_info import info_at
from support.waiting import PATIENCE

RUN = "run-1"
NODES = 30
PLAINTEXT = Plaintext()


@pytest.fixture
def place(etcd: EtcdCluster, tmp_path: Path) -> EtcdAddress:
    """A prefix for this test alone."""
    return parse_address(f"{etcd.url}/{tmp_path.name}", {})


@asynccontextmanager
async def agent(place: EtcdAddress, security: ClientSecurity = PLAINTEXT) -> AsyncIterator[OwnReplica]:
    """Run the rendezvous of one agent."""
    host = "localhost" if isinstance(security, ClientTLS) else "127.0.0.1"
    async with replicated_rendezvous(place, RUN, host, security, PATIENCE, access=AccessFiles()) as replica:
        yield replica


async def owner(place: EtcdAddress) -> str | None:
    """Return the address of the run's owner in etcd."""
    async with EtcdClient(place) as client:
        for pair in (await client.get(f"{place.prefix}/owners/0000".encode())).pairs:
            return Owner.decode(pair.value).address
    return None


async def pointed(replica: OwnReplica) -> str:
    """Return the address to which an agent's own endpoint redirects."""
    async with grpc.aio.insecure_channel(replica.peer.endpoint) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.RendezvousServiceStub(channel).GetRun(
                pb.GetRunRequest(run_id=RUN), timeout=PATIENCE
            )
    error = decode(caught.value)
    assert error.reason == "NOT_OWNER"
    return error.metadata["owner_address"]


class Member:
    """A node of the run, as seen from its agent."""

    def __init__(self, reading: asyncio.Task[pb.RunEnd]) -> None:
        """`reading`: returns the run's end."""
        self.reading = reading

    async def ends(self) -> pb.RunEnd:
        """Return the end of the run that the service reports."""
        return await asyncio.wait_for(self.reading, PATIENCE)

    async def sent_to(self) -> str:
        """Return the address to which the node is redirected when the owner changes."""
        error = await refusal(asyncio.wait_for(self.reading, PATIENCE))
        assert error.reason == "NOT_OWNER"
        return error.metadata["owner_address"]


async def join(
    stub: pb_grpc.RendezvousServiceAsyncStub, node_id: str, settings: pb.RunSettings
) -> tuple[Any, pb.JoinResponse]:
    """Join the run, as soon as its owner serves it; return the stream, and its first message."""
    async with asyncio.timeout(PATIENCE):
        while True:
            call: Any = stub.Join()
            try:
                await call.write(join_request(RUN, node_id, settings))
                first = await call.read()
                assert isinstance(first, pb.JoinResponse), "the stream ended without a word"
                return call, first
            except grpc.aio.AioRpcError as error:
                # gRPC itself raises INTERNAL if the stream ended during this write.
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
                    raise
                await asyncio.sleep(0.05)


@asynccontextmanager
async def member(
    endpoint: str, security: ClientSecurity = PLAINTEXT, node_id: str = "a"
) -> AsyncIterator[Member]:
    """Join the run at its owner."""
    settings = pb.RunSettings(min_nodes=1, max_nodes=2 * NODES)
    async with open_channel(endpoint, security) as channel:
        call, first = await join(pb_grpc.RendezvousServiceStub(channel), node_id, settings)

        async def read() -> pb.RunEnd:
            response: Any = first
            while response is not grpc.aio.EOF:
                if response.HasField("update") and response.update.phase == pb.PHASE_CLOSED:
                    end: pb.RunEnd = response.update.run_end
                    return end
                response = await call.read()
            raise AssertionError("the stream ended without a word")

        reading = asyncio.create_task(read())
        try:
            yield Member(reading)
        finally:
            call.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def close(endpoint: str) -> None:
    """End the run, as its nodes do at their success."""
    async with open_channel(endpoint, PLAINTEXT) as channel:
        request = pb.CloseRunRequest(run_id=RUN, reason="all done")
        await pb_grpc.RendezvousServiceStub(channel).CloseRun(request, timeout=PATIENCE)


async def run_at(endpoint: str) -> pb.Run:
    """Return the run from its owner."""
    async with open_channel(endpoint, PLAINTEXT) as channel:
        request = pb.GetRunRequest(run_id=RUN)
        return (await pb_grpc.RendezvousServiceStub(channel).GetRun(request, timeout=PATIENCE)).run


async def seated(place: EtcdAddress, count: int) -> None:
    """Wait until so many agents are ready to serve."""
    first, end = f"{place.prefix}/replicas/".encode(), f"{place.prefix}/replicas0".encode()
    async with asyncio.timeout(PATIENCE), EtcdClient(place) as client:
        found = await client.get(first, end)
        names = {pair.key for pair in found.pairs}
        async with aclosing(client.watch(first, end, found.revision + 1)) as watching:
            while len(names) < count:
                names |= {change.pair.key for change in await anext(watching) if not change.deleted}


async def becomes(replica: OwnReplica, owner: str | None) -> None:
    """Wait until an agent's own endpoint redirects to this owner."""
    async with asyncio.timeout(PATIENCE):
        while await pointed(replica) != owner:  # noqa: ASYNC110 (asked as a client asks)
            await asyncio.sleep(0.01)


async def test_every_agent_redirects_to_the_owner(place: EtcdAddress) -> None:
    """Its own endpoint never changes and redirects to the owner, also at an agent without a seat."""
    async with AsyncExitStack() as stack:
        agents = [await stack.enter_async_context(agent(place)) for _ in range(5)]
        served_at = await owner(place)
        assert [await pointed(each) for each in agents] == [served_at] * 5


async def test_a_run_outlives_its_owner(place: EtcdAddress) -> None:
    """A leaving owner hands it over first: its nodes are redirected, and every agent finds the new owner."""
    async with agent(place) as first, AsyncExitStack() as stack:
        before = await owner(place) or ""
        other = await stack.enter_async_context(agent(place))
        await seated(place, 2)
        async with member(before) as node:
            await first.stop_when_over(RUN, "test", [], succeeded=False)
            after = await owner(place) or ""
            assert after not in (before, "")
            assert await node.sent_to() == after
        await becomes(other, after)
        assert (await run_at(after)).run_id == RUN


async def test_both_servers_of_an_agent_announce_redirects(place: EtcdAddress) -> None:
    """The server of the run has the name that the other replicas see."""
    async with agent(place) as replica:
        served_at = await owner(place) or ""
        here, there = await info_at(replica.peer.endpoint), await info_at(served_at, PLAINTEXT)
        async with open_channel(served_at, PLAINTEXT) as channel:
            listed = await pb_grpc.RendezvousServiceStub(channel).ListReplicas(pb.ListReplicasRequest())
    assert "replicas" in there.capabilities
    assert "replicas" in here.capabilities
    assert [each.instance for each in listed.replicas] == [there.instance]


async def test_the_last_replica_stays_until_all_nodes_have_the_end(place: EtcdAddress) -> None:
    """No other process could send it."""
    async with agent(place) as last, AsyncExitStack() as stack:
        served_at = await owner(place) or ""
        nodes = [await stack.enter_async_context(member(served_at, node_id=f"node{n}")) for n in range(NODES)]
        await close(served_at)
        await last.stop_when_over(RUN, "test", [], succeeded=True)
        assert [(await node.ends()).detail.endswith("all done") for node in nodes] == [True] * NODES
    assert await owner(place) is None


async def test_the_end_of_a_finished_run_waits_for_no_successor(
    place: EtcdAddress, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That holds even if another replica is registered, such as one that hangs. No warning is logged."""
    monkeypatch.setattr(hosting, "_SUCCESSOR_WITHIN", 3600.0)
    hanging = ReplicaRegistration("127.0.0.1:1", "of a process that hangs", 0.0, SEAT_TTL)
    async with agent(place) as last, EtcdClient(place) as client:
        served_at = await owner(place) or ""
        async with member(served_at) as node:
            await client.transact(Txn([], [Put(Keys(place.prefix).replica("z"), hanging.encode())]))
            await close(served_at)
            await node.ends()
            await last.stop_when_over(RUN, "test", [], succeeded=True)
    assert [each for each in log_events(caplog.records) if each.level not in ("DEBUG", "INFO")] == []


async def test_an_open_call_has_time_to_receive_the_end(place: EtcdAddress) -> None:
    """The replica waits for a call that is open when the run is over, before it ends."""
    async with agent(place) as last:
        served_at = await owner(place) or ""
        async with member(served_at) as node, open_channel(served_at, PLAINTEXT) as channel:
            listening = state_grpc.StateServiceStub(channel).WatchState(
                state_pb.WatchStateRequest(run_id=RUN)
            )
            await listening.read()
            await close(served_at)
            await node.ends()
            leaving = asyncio.create_task(last.stop_when_over(RUN, "test", [], succeeded=True))
            await asyncio.wait({leaving}, timeout=1)
            assert not leaving.done()
            listening.cancel()
            await asyncio.wait_for(leaving, PATIENCE)


async def test_a_deleted_run_is_served_again(place: EtcdAddress) -> None:
    """It is served at once, with a new lease: the old one would expire some day with all keys written since."""
    key = f"{place.prefix}/run".encode()
    async with agent(place) as replica, EtcdClient(place) as client:
        (before,) = (await client.get(key)).pairs
        deleted = await client.transact(
            Txn([], [Delete(place.prefix.encode() + b"/", place.prefix.encode() + b"0")])
        )
        async with (
            asyncio.timeout(PATIENCE),
            aclosing(client.watch(key, b"", deleted.revision + 1)) as watching,
        ):
            changes = await anext(watching)
            assert changes[0].pair.lease not in (0, before.lease)
        async with asyncio.timeout(PATIENCE):
            while await owner(place) is None:  # noqa: ASYNC110 (asked as a person asks)
                await asyncio.sleep(0.05)
        assert await pointed(replica)


async def test_a_closed_run_stays_closed(place: EtcdAddress) -> None:
    """An agent that joins when all others are gone serves their run, and receives its end."""
    async with agent(place) as first:
        served_at = await owner(place) or ""
        async with member(served_at) as node:
            await close(served_at)
            await node.ends()
        await first.stop_when_over(RUN, "test", [], succeeded=True)
    async with agent(place):
        assert (await run_at(await owner(place) or "")).phase == pb.PHASE_CLOSED


class Node:
    """The only node of the run, which fails in each round, by hand."""

    def __init__(self, stub: pb_grpc.RendezvousServiceAsyncStub) -> None:
        self._stub = stub
        self._first: Any = None
        self.lease = pb.Lease()

    async def join(self, max_restarts: int) -> None:
        """Join the run."""
        settings = pb.RunSettings(min_nodes=1, max_nodes=1, max_restarts=max_restarts)
        self._call, self._first = await join(self._stub, "n", settings)

    async def phase(self, phase: pb.Phase.ValueType) -> pb.NodeUpdate:
        """Return the first update of a phase."""
        while True:
            response, self._first = self._first or await self._call.read(), None
            assert isinstance(response, pb.JoinResponse)
            if response.HasField("lease"):
                self.lease = response.lease
            if response.update.phase == phase:
                return response.update

    async def running(self) -> pb.NodeUpdate:
        """Start the next round."""
        frozen = await self.phase(pb.PHASE_FROZEN)
        confirm = pb.ConfirmRound(round=frozen.assignment.round, master_port=1)
        await self._call.write(pb.JoinRequest(confirm=confirm))
        return await self.phase(pb.PHASE_FINAL)

    async def fail(self, round_: int) -> None:
        """Report a worker's failure."""
        await self._call.write(pb.JoinRequest(worker_failed=pb.WorkerFailure(round=round_, exit_code=1)))


@pytest.mark.slow
async def test_no_number_goes_back_when_the_lease_of_a_run_ends_under_it(
    place: EtcdAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All agents were disconnected from etcd for longer than the lease lives, and then reconnect: the run goes on.

    Rounds, fencing tokens, leases and revisions go on from their last values, and so does the used budget.
    """
    # The TTL is long enough to be kept alive on a machine that stalls.
    monkeypatch.setattr(replicated, "run_lease", partial(run_lease, ttl=15))
    run, shards, end = (f"{place.prefix}{text}".encode() for text in ("/run", "/shards/", "/shards0"))
    async with agent(place) as cut_off, EtcdClient(place) as client:
        async with open_channel(await owner(place) or "", PLAINTEXT) as channel:
            node = Node(pb_grpc.RendezvousServiceStub(channel))
            await node.join(max_restarts=2)
            before = await node.running()
            await node.fail(before.assignment.round)
            before = await node.running()
            assert (before.assignment.round, before.restart_count) == (2, 1)
        await cut_off.end()
        async with asyncio.timeout(PATIENCE):
            while (await client.get(run)).pairs:  # noqa: ASYNC110 (etcd ends it in its own time)
                await asyncio.sleep(0.05)
        left = (await client.get(shards, end)).pairs
        assert [pair.key for pair in left] == [Keys(place.prefix).space(0) + b"highwater/" + RUN.encode()]
        assert left[0].lease, "what has no lease stays for ever"
    monkeypatch.undo()
    async with agent(place), open_channel(await owner(place) or "", PLAINTEXT) as channel:
        again = Node(pb_grpc.RendezvousServiceStub(channel))
        await again.join(max_restarts=2)
        after = await again.running()
        assert after.assignment.round == before.assignment.round + 1
        assert after.assignment.fencing_token > before.assignment.fencing_token
        assert after.revision > before.revision
        assert again.lease.number > node.lease.number
        assert after.restart_count == 1
        await again.fail(after.assignment.round)
        after = await again.running()
        await again.fail(after.assignment.round)
        assert (await again.phase(pb.PHASE_CLOSED)).run_end.outcome == pb.OUTCOME_FAILED, (
            "two restarts in all"
        )


async def test_with_tls_a_client_without_a_certificate_is_refused(place: EtcdAddress, tmp_path: Path) -> None:
    """The client is refused at the server for others; the agent's own access is a socket of this user."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command (apt install openssl)")
    files = make_certificates(tmp_path, "ours")
    tls = ClientTLS(files.ca, files.server, files.server_key)
    async with agent(place, tls) as replica:
        served_at = await owner(place) or ""
        assert served_at.startswith("localhost:")
        async with member(served_at, tls):
            pass
        await assert_refused(served_at, PLAINTEXT)
        assert replica.peer.endpoint.startswith("unix:")


async def test_without_a_setting_the_agents_share_a_secret_by_etcd(place: EtcdAddress) -> None:
    """A client that can't read the run's keys there can't call its services, on any agent."""
    async with agent(place, None) as one, agent(place, None) as two:
        secret = one.peer.security
        assert isinstance(secret, RunSecret)
        assert two.peer.security == secret
        served_at = await owner(place) or ""
        async with member(served_at, secret):
            pass
        for security in (PLAINTEXT, None, RunSecret("b" * 32)):
            await assert_refused(served_at, security)
    async with agent(place, None) as later:
        assert later.peer.security == secret


async def assert_refused(endpoint: str, security: ClientSecurity) -> None:
    """Fail if a client gets a reply there."""
    async with open_channel(endpoint, security) as channel:
        stub = pb_grpc.RendezvousServiceStub(channel)
        assert (
            await refusal(stub.GetRun(pb.GetRunRequest(run_id=RUN), timeout=PATIENCE))
        ).code is grpc.StatusCode.UNAVAILABLE


async def test_serving_with_tls_needs_a_certificate(place: EtcdAddress) -> None:
    """A CA alone is enough only for a client."""
    with pytest.raises(SettingError, match="give --tls-cert and --tls-key beside --tls-ca"):
        async with agent(place, ClientTLS()):
            pass


async def test_an_unreachable_etcd_is_reported() -> None:
    """The agent retries for a while: etcd may be starting."""
    address = parse_address(f"etcd://127.0.0.1:{free_port()}/x?request-timeout=0.2", {})
    with pytest.raises(SettingError, match=r"no etcd answers at 127\.0\.0\.1:.*retried for 0.3 s"):
        async with replicated_rendezvous(address, RUN, "127.0.0.1", None, 0.3, access=AccessFiles()):
            pass


async def test_a_run_that_can_not_be_served_ends_the_launch(place: EtcdAddress) -> None:
    """The error is one line, at once: here another program's key is at the key of the run, which has no owner."""
    async with EtcdClient(place) as client:
        await client.transact(Txn([], [Put(f"{place.prefix}/run".encode(), b"another program's")]))
    async with asyncio.timeout(PATIENCE / 2):
        with pytest.raises(SettingError, match=f"{place.prefix}/run in etcd is not ours"):
            async with agent(place):
                pass


class Trying(OwnReplica):
    """An agent that always gets a seat, and whose attempts at serving are scripted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: list[tuple[float, Exception]]) -> None:
        """`ends`: duration and error of each attempt; the last repeats."""
        self.slept: list[float] = []
        self.now = 0.0
        self._ends = ends
        pace = Pace(clock=lambda: self.now, sleep=self._sleep, draw=lambda: 1.0)
        monkeypatch.setattr(replicated, "Pace", lambda: pace)
        monkeypatch.setattr(replicated, "seat", self._seat)
        address = parse_address("etcd://127.0.0.1:1/x", {})
        super().__init__(address, RUN, "127.0.0.1", None, Peer("127.0.0.1:1"), access=AccessFiles())

    async def attempts(self, count: int) -> list[float]:
        """Return the pauses between so many attempts."""
        self._refused.cancel()  # the launch has begun
        self.begin(EtcdClient(self._etcd))
        assert self._renewals is not None
        while len(self.slept) < count - 1 and not self._renewals.done():  # noqa: ASYNC110 (it sleeps no longer than we let it)
            await asyncio.sleep(0)
        await self.end()
        return self.slept[: count - 1]

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    @asynccontextmanager
    async def _seat(self, *_: object) -> AsyncIterator[None]:
        yield

    async def _serve(self, *_: object) -> None:
        held, error = self._ends.pop(0) if len(self._ends) > 1 else self._ends[0]
        self._stood = held
        raise error


async def test_a_lasting_error_is_retried_with_back_off_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Getting a seat is no success: each attempt costs etcd a lease."""
    replica = Trying(monkeypatch, [(0.1, SettingError("no"))])
    assert await replica.attempts(10) == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_an_error_after_long_serving_is_logged_and_retried_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be the same error as before: it is another outage."""
    error = SettingError("no")
    replica = Trying(monkeypatch, [(0.0, error), (0.0, error), (SEAT_TTL + 1, error), (0.0, error)])
    assert await replica.attempts(5) == [0.05, 0.1, 0.05, 0.1]
    assert len(caplog.records) == 2


async def test_a_bug_is_logged_and_does_not_end_the_attempts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, with its traceback; otherwise no agent would serve when the others are gone, unexplained."""
    replica = Trying(monkeypatch, [(0.0, RuntimeError())])
    assert len(await replica.attempts(5)) == 4
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is RuntimeError
