"""A registered name belongs to a live replica, and becomes free when a dead one's lease ends."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import EtcdAddress, parse_address
from rallypoint.etcd.values import Delete, Put, Txn
from rallypoint.rendezvous.cluster import registering
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.cluster.registering import wait_for_name
from rallypoint.rendezvous.cluster.view import ReplicaRegistration
from rallypoint.rpc.endpoint import SettingError
from support.etcd_server import etcd_cluster
from support.waiting import PATIENCE

OTHERS = ReplicaRegistration("10.9.9.9:29400", "the other", 0.0, lease_ttl=0.5)
OURS = ReplicaRegistration("10.9.9.8:29400", "ours", 0.0, lease_ttl=0.5)


@pytest.mark.slow
async def test_an_election_is_no_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the lease of a dead replica its full time again; only a lease that outlives it without one is alive."""
    monkeypatch.setattr(registering, "_ENDING", 0.5)
    with etcd_cluster(tmp_path) as cluster:
        address = parse_address(f"{cluster.url}/x")
        async with EtcdClient(address) as client:
            keys = Keys(address.prefix)
            await client.transact(Txn([], [Put(keys.replica("a"), OTHERS.encode())]))
            with pytest.raises(SettingError, match="alive already"):
                await wait_for_name(client, keys, "a", OURS)

            before, real, asked = await client.term(), client.term, 0
            waits_again = asyncio.Event()

            async def term() -> int:
                """Return the old term first; the second call comes after the election, when the wait starts again."""
                nonlocal asked
                asked += 1
                if asked == 2:
                    waits_again.set()
                return before if asked == 1 else await real()

            monkeypatch.setattr(client, "term", term)
            await asyncio.to_thread(cluster.members[0].restart)
            waiting = asyncio.create_task(wait_for_name(client, keys, "a", OURS))
            async with asyncio.timeout(PATIENCE):
                await waits_again.wait()
                assert not waiting.done()
                await client.transact(Txn([], [Delete(keys.replica("a"))]))
                await waiting


async def test_a_pause_of_ours_is_no_sign_of_life_either(
    client: EtcdClient, address: EtcdAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that was stopped while the other's lease ended finds its own wait over, and the name free."""
    monkeypatch.setattr(registering, "_ENDING", 0.5)
    keys = Keys(address.prefix)
    await client.transact(Txn([], [Put(keys.replica("a"), OTHERS.encode())]))
    waiting = asyncio.create_task(wait_for_name(client, keys, "a", OURS))
    await asyncio.wait({waiting}, timeout=0.5)

    async def end() -> None:
        async with EtcdClient(address) as other:
            await other.transact(Txn([], [Delete(keys.replica("a"))]))

    # Meanwhile this process's event loop does not run, as if the process were stopped.
    thread = threading.Thread(target=asyncio.run, args=(end(),))
    thread.start()
    thread.join()
    time.sleep(3)  # noqa: ASYNC251
    async with asyncio.timeout(PATIENCE):
        await waiting


@pytest.mark.slow
async def test_after_a_pause_of_ours_a_dead_replica_has_its_whole_time_again(
    client: EtcdClient, address: EtcdAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd may have been paused with it, as on one machine that was suspended."""
    monkeypatch.setattr(registering, "_ENDING", 0.5)
    keys = Keys(address.prefix)
    await client.transact(Txn([], [Put(keys.replica("a"), OTHERS.encode())]))
    waiting = asyncio.create_task(wait_for_name(client, keys, "a", OURS))
    await asyncio.wait({waiting}, timeout=0.5)
    time.sleep(3)  # noqa: ASYNC251
    assert not (await asyncio.wait({waiting}, timeout=0.5))[0]
    with pytest.raises(SettingError, match="alive already"):
        await waiting
