"""An agent that serves its job's rendezvous: which agent serves, which join, and their messages when it ends."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from integration.test_rights import public
from rallypoint.agent.config.job import Peer
from rallypoint.launcher import embedded_service, services
from rallypoint.launcher.embedded_service import EmbeddedService, answers_calls, rendezvous_at
from rallypoint.launcher.plan import Hosted
from rallypoint.launcher.services import own_addresses
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import AccessFiles, ClientSecurity, ClientTLS, Plaintext, RunSecret, SettingError
from rallypoint.serving.policy import Role
from rallypoint.serving.tokens import Token, issue
from serving.conftest import make_certificates
from support.joining import join_request
from support.ports import free_port
from support.waiting import PATIENCE, until

RUN = "run-1"


@pytest.fixture
def port() -> int:
    """Return a free port."""
    return free_port()


@pytest.fixture
def stranger() -> Iterator[str]:
    """An address at which a program listens that is no service."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0)
        yield f"localhost:{listening.getsockname()[1]}"


class Member:
    """A node of the run, as seen from its agent."""

    def __init__(self, call: object, updates: asyncio.Queue[pb.NodeUpdate]) -> None:
        self.call = call
        self.updates = updates

    async def ends(self) -> pb.RunEnd:
        """Return the end of the run that the service reports."""
        async with asyncio.timeout(PATIENCE):
            while True:
                update = await self.updates.get()
                if update.phase == pb.PHASE_CLOSED:
                    return update.run_end


@asynccontextmanager
async def member(
    endpoint: str, node_id: str = "other", security: ClientSecurity = None
) -> AsyncIterator[Member]:
    """Join a run of one node."""
    async with open_channel(endpoint, security) as channel:
        call = pb_grpc.RendezvousServiceStub(channel).Join()
        settings = pb.RunSettings(min_nodes=1, max_nodes=2)
        await call.write(join_request(RUN, node_id, settings))
        updates: asyncio.Queue[pb.NodeUpdate] = asyncio.Queue()
        joined = asyncio.Event()

        async def read() -> None:
            async for response in call:
                joined.set()
                if response.HasField("update"):
                    updates.put_nowait(response.update)
                    if response.update.phase == pb.PHASE_CLOSED:
                        return  # as agents do, which ends the stream

        reading = asyncio.create_task(read())
        reading.add_done_callback(lambda _: call.cancel())
        await asyncio.wait_for(joined.wait(), PATIENCE)
        try:
            yield Member(call, updates)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def close(host: EmbeddedService) -> None:
    """End the run, as its nodes do at their success."""
    async with open_channel(host.peer.endpoint) as channel:
        await pb_grpc.RendezvousServiceStub(channel).CloseRun(pb.CloseRunRequest(run_id=RUN, reason="test"))


async def test_the_first_agent_on_a_host_serves_and_the_others_join(port: int) -> None:
    """Several agents on one host have the same command line."""
    place = Hosted(f"localhost:{port}")
    async with (
        rendezvous_at(place, None, AccessFiles()) as first,
        rendezvous_at(place, None, AccessFiles()) as second,
    ):
        assert first is not None
        assert second is None
        assert await answers_calls(place.endpoint, None)


async def test_an_agent_serves_only_if_it_is_to(port: int) -> None:
    """Node rank 1, another host's name, or is_host=0: these agents connect to the host that serves."""
    for place in (Hosted(f"localhost:{port}", here=False), Hosted(f"192.0.2.7:{port}")):
        async with rendezvous_at(place, None, AccessFiles()) as host:
            assert host is None


async def test_two_required_servers_at_one_address_are_refused(port: int) -> None:
    """Two hosts with node rank 0 are an example."""
    place = Hosted(f"127.0.0.1:{port}", here=True)
    async with rendezvous_at(place, None, AccessFiles()):
        with pytest.raises(SettingError, match="another agent does; only one host may have --node-rank 0"):
            async with rendezvous_at(place, None, AccessFiles()):
                pass


async def test_node_rank_0_at_another_hosts_address_is_refused(
    port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other hosts would not find it. A name without an address may get one later, as a pod's own name does."""
    monkeypatch.setattr(embedded_service, "_ANSWER", 0.3)
    secret = RunSecret("a" * 32)
    stranger = Hosted(f"192.0.2.7:{port}", here=True)
    with pytest.raises(SettingError, match=r"192\.0\.2\.7 is no address of this host.*--node-rank 0"):
        async with rendezvous_at(stranger, secret, AccessFiles()):
            pass
    for place in (replace(stranger, away=True), Hosted(f"no-such-host.invalid:{port}", here=True)):
        async with rendezvous_at(place, secret, AccessFiles()) as host:
            assert host is not None
    assert caplog.text.count("others join only if that address leads here") == 2


async def test_a_port_of_another_program_is_reported(stranger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is checked first: joining a program that is no service would take a minute to fail."""
    monkeypatch.setattr(embedded_service, "_ANSWER", 0.3)
    with pytest.raises(SettingError, match="another program listens there") as caught:
        async with rendezvous_at(Hosted(stranger), None, AccessFiles()):
            pass
    assert str(caught.value).startswith(f"can't serve rendezvous at {stranger}: ")
    assert "choose another --master-port or --rdzv-endpoint" in str(caught.value)
    assert "--port" not in str(caught.value), "that is a flag of services"


async def test_serving_with_tls_needs_a_certificate(port: int) -> None:
    """A CA alone is enough only for a client."""
    with pytest.raises(SettingError, match="give --tls-cert and --tls-key beside --tls-ca"):
        async with rendezvous_at(Hosted(f"localhost:{port}"), ClientTLS(), AccessFiles()):
            pass


async def test_with_tls_a_client_without_a_certificate_is_refused(port: int, tmp_path: Path) -> None:
    """All hosts of a job have the same files: the server's certificate is also the client's."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command (apt install openssl)")
    files = make_certificates(tmp_path, "ours")
    tls = ClientTLS(files.ca, files.server, files.server_key)
    async with rendezvous_at(Hosted(f"localhost:{port}"), tls, AccessFiles()) as host:
        assert host is not None
        assert host.peer == Peer(f"localhost:{port}", tls)
        assert await answers_calls(host.peer.endpoint, tls)
        assert not await answers_calls(host.peer.endpoint, ClientTLS(files.ca))
        assert not await answers_calls(host.peer.endpoint, None)
        await asyncio.wait_for(host.stop_when_over(RUN, "done", (), succeeded=True), PATIENCE)


@pytest.mark.parametrize("security", [Plaintext(), RunSecret("a" * 32)])
async def test_other_hosts_are_served_if_security_is_set(port: int, security: ClientSecurity) -> None:
    """It serves at the named address, and at no other."""
    place = Hosted(f"0.0.0.0:{port}", here=True)
    with pytest.raises(SettingError, match="refusing to serve plaintext"):
        async with rendezvous_at(place, None, AccessFiles()):
            pass
    async with rendezvous_at(place, security, AccessFiles()) as host:
        assert host is not None
        assert await answers_calls(host.peer.endpoint, security)
        assert await answers_calls(f"127.0.0.2:{port}", security)
        assert not await answers_calls(f"127.0.0.2:{port}", None)
    async with rendezvous_at(Hosted(f"127.0.0.3:{port}", here=True), security, AccessFiles()) as host:
        assert host is not None
        assert await answers_calls(f"127.0.0.3:{port}", security)
        assert not await answers_calls(f"127.0.0.2:{port}", security)


async def test_tokens_restrict_an_agents_own_service_too(port: int, tmp_path: Path) -> None:
    """A node may not close the run; its host still closes it when it leaves with the rendezvous."""
    key, keys, file = Ed25519PrivateKey.generate(), tmp_path / "token.pub", tmp_path / "token"
    keys.write_bytes(public(key))
    file.write_text(issue(key, Token("host", frozenset({Role.NODE}), [RUN], time.time() + 60), time.time()))
    node = RunSecret("a" * 32, token=file)
    async with rendezvous_at(Hosted(f"localhost:{port}"), node, AccessFiles(token_keys=keys)) as host:
        assert host is not None
        for security, refusal in (
            (RunSecret(node.text), grpc.StatusCode.UNAUTHENTICATED),
            (node, grpc.StatusCode.PERMISSION_DENIED),
        ):
            async with open_channel(host.peer.endpoint, security) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await pb_grpc.RendezvousServiceStub(channel).CloseRun(pb.CloseRunRequest(run_id=RUN))
                assert refused.value.code() is refusal
        async with member(host.peer.endpoint, security=node) as other:
            leaving = asyncio.create_task(host.stop_when_over(RUN, "got SIGTERM", (), succeeded=False))
            assert (await other.ends()).outcome == pb.OUTCOME_CANCELLED
            await asyncio.wait_for(leaving, PATIENCE)


async def test_a_name_that_only_this_host_reaches_is_served_at_all_addresses(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian resolves a host's own name so; other hosts resolve it to an address that they reach."""

    async def no_addresses(_host: str) -> list[str]:
        return ["127.0.1.1"]

    for module in (embedded_service, services):
        monkeypatch.setattr(module, "own_addresses", no_addresses)
    secret = RunSecret("a" * 32)
    async with rendezvous_at(Hosted(f"head.example:{port}"), secret, AccessFiles()) as host:
        assert host is not None
        assert await answers_calls(f"127.0.0.2:{port}", secret)
        assert await answers_calls(host.peer.endpoint, secret)


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("192.0.2.7", False),
        ("no-such-host.invalid", False),
    ],
)
async def test_names_of_this_host_are_recognized(host: str, here: bool) -> None:
    """The test is if a socket can be bound there: this machine's name is not used."""
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    assert bool(await own_addresses(host)) is here


async def test_the_machines_host_name_is_its_own(port: int) -> None:
    """The system may know it by any address."""
    assert await own_addresses(socket.gethostname())


async def test_a_host_that_left_closes_the_run(port: int) -> None:
    """The others can't go on without their rendezvous; they receive the reason before it ends."""
    async with rendezvous_at(Hosted(f"localhost:{port}"), None, AccessFiles()) as host:
        assert host is not None
        async with member(host.peer.endpoint) as other:
            leaving = asyncio.create_task(host.stop_when_over(RUN, "got SIGTERM", (), succeeded=False))
            end = await other.ends()
            assert end.outcome == pb.OUTCOME_CANCELLED
            assert end.detail.endswith("the host that served the run's rendezvous is gone: got SIGTERM")
            await asyncio.wait_for(leaving, PATIENCE)


async def test_a_host_that_is_done_waits_for_the_others(port: int) -> None:
    """The work of the others is not lost because this host finished first."""
    async with rendezvous_at(Hosted(f"localhost:{port}"), None, AccessFiles()) as host:
        assert host is not None
        async with member(host.peer.endpoint) as other:
            waiting = asyncio.create_task(host.stop_when_over(RUN, "done", (signal.SIGTERM,), succeeded=True))
            await until(lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "the wait to begin")
            assert not waiting.done()
            await close(host)
            await other.ends()
            await asyncio.wait_for(waiting, PATIENCE)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_a_signal_ends_that_wait(port: int) -> None:
    """A user who wants this host to exit need not wait for other hosts' work."""
    async with rendezvous_at(Hosted(f"localhost:{port}"), None, AccessFiles()) as host:
        assert host is not None
        async with member(host.peer.endpoint) as other:
            waiting = asyncio.create_task(host.stop_when_over(RUN, "done", (signal.SIGTERM,), succeeded=True))
            await until(lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "the wait to begin")
            signal.raise_signal(signal.SIGTERM)
            assert (await other.ends()).detail.endswith("is gone: got SIGTERM")
            await asyncio.wait_for(waiting, PATIENCE)


async def test_a_run_that_is_over_or_never_began_delays_no_exit(port: int) -> None:
    """No node needs a message."""
    async with rendezvous_at(Hosted(f"localhost:{port}"), None, AccessFiles()) as host:
        assert host is not None
        await asyncio.wait_for(host.stop_when_over(RUN, "it failed", (), succeeded=False), PATIENCE)
        async with member(host.peer.endpoint) as other:
            await close(host)
            await other.ends()
        await asyncio.wait_for(host.stop_when_over(RUN, "done", (), succeeded=True), PATIENCE)


async def test_a_node_that_asks_for_another_run_is_reported(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two hosts with different names for one job would wait for each other; each name is reported once."""
    async with rendezvous_at(Hosted(f"localhost:{port}"), None, AccessFiles(), "other-job") as host:
        assert host is not None
        for node_id in ("a", "b"):
            async with member(host.peer.endpoint, node_id):
                pass
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        f"a node asks for run {RUN!r} here, but this agent serves run 'other-job': "
        "do all hosts of the job have the same --rdzv-id?"
    ]
