"""Users and passwords, and tokens that expire."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from etcd.patient import FIRST, put
from rallypoint.etcd.client import EtcdClient, statuses
from rallypoint.etcd.errors import EtcdRefused, Reason
from rallypoint.etcd.session import Session
from rallypoint.etcd.values import Put, Txn, prefix_end
from support.etcd_server import EtcdCluster, etcd_cluster
from support.waiting import until

PREFIX = b"/rallypoint/"


def etcdctl(cluster: EtcdCluster, *arguments: str) -> str:
    """Run a command of an operator."""
    command = ["etcdctl", "--endpoints", cluster.endpoints, "--command-timeout", "30s", *arguments]
    done = subprocess.run(command, env={"ETCDCTL_API": "3"}, check=True, capture_output=True, text=True)
    return done.stdout


def as_root(cluster: EtcdCluster, *arguments: str) -> str:
    return etcdctl(cluster, "--user", "root:root-password", *arguments)


def add_users(cluster: EtcdCluster) -> None:
    if shutil.which("etcdctl") is None:
        pytest.skip("needs the etcdctl command (apt install etcd-client)")
    etcdctl(cluster, "user", "add", "root:root-password")
    etcdctl(cluster, "user", "grant-role", "root", "root")
    etcdctl(cluster, "role", "add", "ours")
    etcdctl(cluster, "role", "grant-permission", "ours", "--prefix=true", "readwrite", "/rallypoint/")
    etcdctl(cluster, "user", "add", "me:password")
    etcdctl(cluster, "user", "grant-role", "me", "ours")


# Checking a password costs almost nothing this way.
CHEAP = ("--bcrypt-cost", "4")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdCluster]:
    """A member that accepts `me`, by password, for the default prefix. Tokens expire after 2 s without use."""
    with etcd_cluster(tmp_path, extra=[*CHEAP, "--auth-token-ttl", "2"]) as cluster:
        add_users(cluster)
        etcdctl(cluster, "auth", "enable")
        yield cluster


def of_me(cluster: EtcdCluster, password: str = "password") -> str:  # noqa: S107
    return cluster.url.replace("://", f"://me:{password}@") + "?attempt-timeout=20&request-timeout=60"


async def refusal(client: EtcdClient, key: bytes) -> Reason:
    with pytest.raises(EtcdRefused) as refused:
        await client.transact(Txn([], [Put(key, b"")]))
    return refused.value.reason


async def test_a_user_has_the_permissions_of_its_role(
    connect: Callable[..., EtcdClient], guarded: EtcdCluster
) -> None:
    """Nothing else is permitted; a refusal has its reason."""
    me = connect(of_me(guarded))
    await put(me, PREFIX + b"a")
    assert await refusal(me, b"/elsewhere") is Reason.PERMISSION_DENIED
    with pytest.raises(EtcdRefused) as refused:
        await anext(me.watch(b"/elsewhere", b"", 1))
    assert refused.value.reason is Reason.PERMISSION_DENIED
    assert await refusal(connect(guarded.url), PREFIX + b"a") is Reason.UNAUTHENTICATED
    assert await refusal(connect(of_me(guarded, "wrong")), PREFIX + b"a") is Reason.UNAUTHENTICATED
    assert list(await statuses(me)) == [guarded.endpoints]


@pytest.mark.slow
async def test_a_token_that_died_is_replaced(
    connect: Callable[..., EtcdClient], guarded: EtcdCluster
) -> None:
    """It ends by age, with its member, or as users were changed: in reads, transactions, leases and watches alike."""
    clients = [connect(of_me(guarded)) for _ in range(5)]
    session = await Session.open(connect(of_me(guarded)), 60)
    for client in clients:
        await put(client, PREFIX + b"0")
    lease, _ = await clients[2].grant(300)

    async def works() -> None:
        reader, writer, keeper, watcher, granter = clients
        assert (await reader.get(PREFIX + b"0")).pairs
        await writer.transact(Txn([], [Put(PREFIX + b"0", b"")]))
        assert await keeper.keep_alive(lease) > 0
        async with aclosing(watcher.watch(PREFIX, prefix_end(PREFIX), 1)) as changes:
            assert await anext(changes)
        await granter.revoke((await granter.grant(60))[0])

    await works()
    # etcd checks once a second for expired tokens.
    await asyncio.sleep(4.5)
    await works()
    (member,) = guarded.members
    member.restart()
    # A client of the old one may not have noticed its end.
    await put(clients[1], PREFIX + b"0")
    await works()
    as_root(guarded, "user", "add", "another:password")
    await works()
    assert session.held()
    await session.close()
    with pytest.raises(EtcdRefused):
        await refused_for_ever(clients[0], guarded)


async def refused_for_ever(client: EtcdClient, cluster: EtcdCluster) -> None:
    as_root(cluster, "user", "delete", "me")
    await client.get(PREFIX + b"0")


async def test_a_watch_survives_the_death_of_its_token(
    connect: Callable[..., EtcdClient], guarded: EtcdCluster
) -> None:
    """It may resume with one that the member doesn't know: servers before 3.5.3 report no permission then."""
    client = connect(of_me(guarded))
    await put(client, PREFIX + b"a")
    told: list[bytes] = []

    async def watch() -> None:
        async with aclosing(client.watch(PREFIX, prefix_end(PREFIX), 1)) as changes:
            async for batch in changes:
                told.extend(change.pair.key for change in batch)

    watching = asyncio.create_task(watch())
    await until(lambda: told == [PREFIX + b"a"], "the first change")
    guarded.members[0].restart()
    other = connect(of_me(guarded))
    await put(other, PREFIX + b"b")
    await until(lambda: PREFIX + b"b" in told or watching.done(), "the change after the restart")
    assert told == [PREFIX + b"a", PREFIX + b"b"]
    watching.cancel()
    await asyncio.wait({watching})


async def test_users_can_be_turned_on_and_off_under_a_client(
    connect: Callable[..., EtcdClient], tmp_path: Path
) -> None:
    """A client with a password works before, gets a token once they are on, and goes without one once they are off."""
    with etcd_cluster(tmp_path, extra=CHEAP) as cluster:
        add_users(cluster)
        client = connect(of_me(cluster))
        await put(client, PREFIX + b"a")
        etcdctl(cluster, "auth", "enable")
        await put(client, PREFIX + b"a")
        assert (await client.get(PREFIX + b"a")).pairs[0].version == 2
        as_root(cluster, "auth", "disable")
        await put(client, PREFIX + b"a")
        assert (await connect(of_me(cluster)).get(PREFIX + b"a")).pairs[0].version == 3


@pytest.mark.slow
async def test_a_member_that_hangs_while_it_checks_passwords_delays_calls_only_briefly(
    connect: Callable[..., EtcdClient], tmp_path: Path
) -> None:
    """Any number may wait for the token: they wait together, not one after the other, and then call another member."""
    with etcd_cluster(tmp_path, 3, extra=CHEAP) as cluster:
        add_users(cluster)
        etcdctl(cluster, "auth", "enable")
        for member in cluster.members:
            member.wait()
        warm = connect(of_me(cluster))
        await put(warm, PREFIX + b"a")
        client = connect(of_me(cluster).replace("attempt-timeout=20", "attempt-timeout=1"), pace=FIRST)
        await client.members.current.ready(10)
        stopped = cluster.members[0]
        stopped.send(signal.SIGSTOP)
        try:
            began = asyncio.get_running_loop().time()
            await asyncio.gather(*(client.get(PREFIX + b"a") for _ in range(50)))
            # One after the other would take 50 s; the rest is room for an election on a busy machine.
            assert asyncio.get_running_loop().time() - began < 45
        finally:
            stopped.send(signal.SIGCONT)
