"""All keys of a run in etcd expire with one lease, which every server of the run finds and keeps alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import EtcdAddress, parse_address
from rallypoint.etcd.errors import EtcdRefused
from rallypoint.etcd.values import Delete, Get, Put, Txn
from rallypoint.launcher.run_lease import (
    NUMBERS_TTL,
    LeasedClient,
    forgotten,
    keep_alive,
    on_lease,
    run_lease,
)
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.journal.etcd.keys import HIGH_WATER
from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.pace import Pace
from support.etcd_server import PATIENT, EtcdCluster
from support.waiting import PATIENCE


@pytest.fixture
def address(etcd: EtcdCluster, tmp_path: Path) -> EtcdAddress:
    """A prefix for this test alone."""
    return parse_address(f"{etcd.url}/{tmp_path.name}?{PATIENT}", {})


@pytest.fixture
async def client(address: EtcdAddress) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(address) as client:
        yield client


def test_only_puts_without_a_lease_get_the_runs() -> None:
    """For example, an owner key must expire with its owner."""
    txn = Txn([], [Put(b"a", b"1"), Put(b"b", b"2", 7), Delete(b"c")], [Put(b"d", b"4"), Get(b"e")])
    assert on_lease(txn, 5) == Txn(
        [], [Put(b"a", b"1", 5), Put(b"b", b"2", 7), Delete(b"c")], [Put(b"d", b"4", 5), Get(b"e")]
    )
    marks = Txn([], [Put(b"m/a", b"1"), Put(b"m/b", b"2", 7), Put(b"n", b"3")])
    assert on_lease(marks, 5, b"m/", 9) == Txn(
        [], [Put(b"m/a", b"1", 9), Put(b"m/b", b"2", 7), Put(b"n", b"3", 5)], []
    )


async def test_all_servers_of_a_run_find_one_lease(client: EtcdClient) -> None:
    """Any number of them may begin at once."""
    found = await asyncio.gather(*(run_lease(client, "job") for _ in range(8)))
    assert len(set(found)) == 1
    assert await run_lease(client, "job") == found[0]


async def test_the_end_of_the_lease_deletes_all_keys_of_the_run(
    client: EtcdClient, address: EtcdAddress
) -> None:
    """Then the run is a new one, with a new lease."""
    lease = await run_lease(client, "job")
    async with LeasedClient(address, lease, pace=Pace()) as leased:
        await leased.transact(Txn([], [Put(f"{address.prefix}/x".encode(), b"1")]))
    assert len(await there(client)) == 2
    await client.revoke(lease)
    assert await there(client) == []
    assert await run_lease(client, "job") != lease


async def test_a_high_water_mark_outlives_the_run_on_one_lease_of_its_own(
    client: EtcdClient, address: EtcdAddress
) -> None:
    """The lease is bounded: the next server of the run finds it by the mark, and prolongs it."""
    mark = Keys(address.prefix).space(0) + HIGH_WATER + b"job"
    leases = set()
    for _ in range(2):
        lease = await run_lease(client, "job")
        async with LeasedClient(address, lease, pace=Pace()) as leased:
            await leased.transact(Txn([], [Put(f"{address.prefix}/x".encode(), b"1"), Put(mark, b"5")]))
            await leased.transact(Txn([], [Put(mark, b"6")]))
        await client.revoke(lease)
        assert await there(client) == [mark]
        (pair,) = (await client.get(mark)).pairs
        leases.add(pair.lease)
        assert NUMBERS_TTL - 600 < await client.keep_alive(pair.lease) <= NUMBERS_TTL
    assert len(leases) == 1


async def test_a_high_water_mark_whose_lease_was_ended_gets_another(
    client: EtcdClient, address: EtcdAddress
) -> None:
    """An operator may do so. The write that detects it fails; the next owner's write succeeds."""
    mark = Keys(address.prefix).space(0) + HIGH_WATER + b"job"
    async with LeasedClient(address, await run_lease(client, "job"), pace=Pace()) as leased:
        await leased.transact(Txn([], [Put(mark, b"5")]))
        (pair,) = (await client.get(mark)).pairs
        await client.revoke(pair.lease)
        with pytest.raises(EtcdRefused):
            await leased.transact(Txn([], [Put(mark, b"6")]))
        assert (await leased.transact(Txn([], [Put(mark, b"6")]))).succeeded


async def there(client: EtcdClient) -> list[bytes]:
    """Return all keys of the run."""
    prefix = client.address.prefix
    return [pair.key for pair in (await client.get(f"{prefix}/".encode(), f"{prefix}0".encode())).pairs]


async def test_a_lease_is_kept_alive_until_it_ends(client: EtcdClient) -> None:
    """It is renewed long before it expires; the server of the run is notified when it is gone."""
    slept: asyncio.Queue[float] = asyncio.Queue()
    go_on = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.put_nowait(seconds)
        await go_on.wait()

    lease = await run_lease(client, "job", 600)
    keeping = asyncio.create_task(keep_alive(client, lease, Pace(sleep=sleep)))
    assert await asyncio.wait_for(slept.get(), PATIENCE) == 100
    await client.revoke(lease)
    assert not keeping.done()
    go_on.set()
    await asyncio.wait_for(keeping, PATIENCE)


@pytest.mark.parametrize("revoked", [True, False], ids=["lease revoked", "key deleted"])
async def test_the_server_of_a_deleted_run_is_notified_at_once(client: EtcdClient, revoked: bool) -> None:
    """It is not at the next renewal: until then it would write with a lease that is gone, or that is never renewed."""
    lease = await run_lease(client, "job")
    watching = asyncio.create_task(forgotten(client, lease, Pace()))
    key = f"{client.address.prefix}/run".encode()
    await client.transact(Txn([], [Put(key, b"touched", lease)]))
    assert not (await asyncio.wait({watching}, timeout=0.5))[0]
    if revoked:
        await client.revoke(lease)
    else:
        await client.transact(Txn([], [Delete(key)]))
    await asyncio.wait_for(watching, PATIENCE)
    assert await run_lease(client, "job") != lease


async def test_a_key_of_another_program_is_reported(client: EtcdClient) -> None:
    """It has no lease of a run, and never will."""
    await client.transact(Txn([], [Put(f"{client.address.prefix}/run".encode(), b"theirs")]))
    with pytest.raises(SettingError, match="is not ours: choose another --rdzv-id, or etcd_prefix"):
        await run_lease(client, "job")
