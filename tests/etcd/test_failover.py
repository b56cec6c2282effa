"""Members that die, hang or lose their leader: the client calls another one, within bounds."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from etcd.patient import FIRST, put
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.cluster import EtcdChannel
from rallypoint.etcd.endpoint import Credentials
from rallypoint.etcd.errors import EtcdUnavailable
from rallypoint.etcd.v1 import kv_pb2
from rallypoint.etcd.values import CreateRevision, Put, Txn
from rallypoint.rpc.endpoint import Endpoint
from support.etcd_server import PATIENT, EtcdCluster, EtcdMember
from support.ports import free_port
from support.waiting import PATIENCE


async def elapsed(call: object) -> float:
    """Return the seconds until a call succeeds."""
    began = time.monotonic()
    await call  # type: ignore[misc]
    return time.monotonic() - began


def called(client: EtcdClient, cluster: EtcdCluster) -> EtcdMember:
    """Return the member that a client calls next."""
    return next(member for member in cluster.members if member.endpoint == client.members.current.where)


async def test_a_dead_member_costs_nothing(connect: Callable[..., EtcdClient], trio: EtcdCluster) -> None:
    """No process listens there, so nothing was sent: even a transaction goes to the next one, within the same call."""
    client = connect(f"{trio.url}?{PATIENT}", pace=FIRST)
    await client.get(b"a")
    for dead in range(3):
        trio.members[dead].kill()
        if dead == 0:
            # Two are a majority; one is not.
            await put(client, b"a")
            fresh = connect(f"{trio.url}?{PATIENT}", pace=FIRST)
            await put(fresh, b"b")
        trio.members[dead].start()
        for member in trio.members:
            member.wait()
    dead_first = connect(f"etcd://127.0.0.1:{free_port()},{trio.endpoints}?{PATIENT}", pace=FIRST)
    result = await dead_first.transact(Txn([CreateRevision(b"c", 0)], [Put(b"c", b"")]))
    assert result.succeeded


async def test_a_stopped_member_delays_calls_only_briefly(
    connect: Callable[..., EtcdClient], trio: EtcdCluster
) -> None:
    """A read goes to another member after one attempt's time, and no later call goes to the stopped one."""
    client = connect(trio.url + "?attempt-timeout=2&request-timeout=60", pace=FIRST)
    await put(client, b"a")
    stopped = called(client, trio)
    stopped.send(signal.SIGSTOP)
    try:
        # The others may have to elect a leader first.
        assert await elapsed(client.get(b"a")) >= 1.9
        assert client.members.current.where != stopped.endpoint
        for _ in range(20):
            await client.get(b"a")
            assert client.members.current.where != stopped.endpoint
    finally:
        stopped.send(signal.SIGCONT)


async def test_a_transaction_is_sent_once(connect: Callable[..., EtcdClient], trio: EtcdCluster) -> None:
    """If its member hangs, the outcome is unknown, and raised so after one attempt's time: it is done once, or not."""
    client = connect(trio.url + "?attempt-timeout=1&request-timeout=60", pace=FIRST)
    await put(client, b"a")
    stopped = called(client, trio)
    stopped.send(signal.SIGSTOP)
    try:
        with pytest.raises(EtcdUnavailable) as unknown:
            await client.transact(Txn([], [Put(b"x", b"")]))
        assert not unknown.value.unsent
        # The next one goes to another member at once.
        assert client.members.current.where != stopped.endpoint
        await put(client, b"b")
    finally:
        stopped.send(signal.SIGCONT)
    # It has handled all received requests once it takes part again.
    direct = connect(f"etcd://{stopped.endpoint}?request-timeout=60")
    await put(direct, b"c")
    assert [pair.version for pair in (await client.get(b"x")).pairs] in ([], [1])


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An address that accepts connections and never replies."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_an_address_that_never_answers_delays_calls_only_briefly(
    connect: Callable[..., EtcdClient], shared_etcd: EtcdCluster, black_hole: str
) -> None:
    """Nothing was sent to it, so that a transaction goes to another member as well."""
    url = f"etcd://{black_hole},{shared_etcd.endpoints}?attempt-timeout=0.5&request-timeout=60"
    assert (await connect(url, pace=FIRST).transact(Txn([], [Put(b"/hole", b"")]))).succeeded
    reader = connect(url, pace=FIRST)
    assert await elapsed(reader.get(b"/hole")) > 0.4
    assert reader.members.current.where == shared_etcd.endpoints


async def test_without_any_member_the_wait_is_bounded(
    connect: Callable[..., EtcdClient], black_hole: str
) -> None:
    """It is certain that nothing was done."""
    client = connect(f"etcd://{black_hole},127.0.0.1:{free_port()}?attempt-timeout=0.2&request-timeout=1")
    for call in (client.get(b"a"), client.transact(Txn([], [Put(b"a", b"")])), client.grant(5)):
        with pytest.raises(EtcdUnavailable, match="etcd gave no answer for 1 s") as unavailable:
            await asyncio.wait_for(call, PATIENCE)
        assert unavailable.value.unsent


@pytest.mark.slow
async def test_a_member_without_a_leader_refuses_at_once(
    connect: Callable[..., EtcdClient], trio: EtcdCluster
) -> None:
    """It does not hold each call for its whole time."""
    client = connect(trio.url + "?attempt-timeout=30&request-timeout=2", pace=FIRST)
    await put(client, b"a")
    for member in trio.members[1:]:
        member.kill()
    began = time.monotonic()
    while True:
        try:
            await client.get(b"a")
        except EtcdUnavailable as error:
            if "can't connect" in str(error) or "no leader" in str(error):
                break
        assert time.monotonic() - began < PATIENCE
    for member in trio.members[1:]:
        member.start()
    await put(client, b"b")


async def test_a_name_with_several_addresses_stands_for_all_of_them(trio: EtcdCluster) -> None:
    """One that hangs gets some calls at most: the next attempt goes to another."""

    class Name(Endpoint):
        @property
        def target(self) -> str:
            return "ipv4:" + trio.endpoints

    connection = EtcdChannel(Name("etcd.svc", 2379), Credentials(None))
    request = kv_pb2.RangeRequest(key=b"a", serializable=True)
    members = set()

    async def ask() -> None:
        await connection.ready(PATIENCE)
        response = await connection.unary("/etcdserverpb.KV/Range", request, kv_pb2.RangeResponse, 2.0, ())
        members.add(response.header.member_id)

    try:
        async with asyncio.timeout(PATIENCE):
            while len(members) < 3:
                await ask()
        trio.members[0].send(signal.SIGSTOP)
        answered = 0
        for _ in range(3):
            try:
                await ask()
            except EtcdUnavailable:
                continue
            answered += 1
        assert answered >= 2
    finally:
        trio.members[0].send(signal.SIGCONT)
        await connection.close()
