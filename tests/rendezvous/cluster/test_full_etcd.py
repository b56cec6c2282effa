"""If the database of etcd is full, accepted writes wait, new ones are refused, and no run is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from etcd.patient import compact
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import parse_address
from rallypoint.etcd.errors import EtcdRefused, Reason
from rallypoint.etcd.values import Delete, Put, Txn
from rallypoint.rendezvous.base.errors import EtcdFull
from rallypoint.rendezvous.cluster.keys import Keys
from rendezvous.cluster.served import SHARDS, Served, run_in, served, shared_out
from support.etcd_server import NEEDS_ETCD, EtcdCluster, etcd_cluster
from support.refusals import refusal
from support.waiting import PATIENCE, until

pytestmark = [
    NEEDS_ETCD,
    pytest.mark.skipif(shutil.which("etcdctl") is None, reason="needs etcdctl (apt install etcd-client)"),
]

_FILLING, _MEBIBYTE = b"/filling/", 1 << 20


class Filled:
    """A small etcd with one replica; the test can fill it and make room again."""

    def __init__(self, cluster: EtcdCluster, client: EtcdClient, replica: Served) -> None:
        self.client = client
        self.replica = replica
        self._cluster = cluster

    async def fill(self) -> None:
        """Write until etcd refuses."""
        for number in itertools.count():
            try:
                await self.client.transact(Txn([], [Put(_FILLING + b"%d" % number, bytes(_MEBIBYTE))]))
            except EtcdRefused as refused:
                if refused.reason is not Reason.NO_SPACE:
                    raise
                return

    async def make_room(self) -> None:
        """Make room as the docs describe it."""
        await self.client.transact(Txn([], [Delete(_FILLING, _FILLING[:-1] + b"0")]))
        await compact(self.client, (await self.client.get(b"/nothing")).revision)
        for command in (["defrag"], ["alarm", "disarm"]):
            await asyncio.to_thread(self._etcdctl, *command)

    def _etcdctl(self, *command: str) -> None:
        environment = {**os.environ, "ETCDCTL_API": "3"}
        told = ["etcdctl", "--endpoints", self._cluster.endpoints, *command]
        subprocess.run(told, env=environment, check=True, capture_output=True, timeout=PATIENCE)


@pytest.fixture
async def filled(tmp_path: Path) -> AsyncIterator[Filled]:
    """An etcd that is not filled yet; every shard is served."""
    with etcd_cluster(tmp_path, extra=["--quota-backend-bytes", str(20 * _MEBIBYTE)]) as cluster:
        address = parse_address(f"{cluster.url}/full")
        async with EtcdClient(address) as client, served(address, "a") as replica:
            await shared_out(replica)
            yield Filled(cluster, client, replica)


def _known_full(replica: Served) -> bool:
    try:
        replica.services.locator.writer(run_in(0))
    except EtcdFull:
        return True
    return False


async def test_writes_wait_until_there_is_room(filled: Filled) -> None:
    """The waiting writes then complete. New ones are refused at once, with the remedy; reads are answered."""
    replica, run_id = filled.replica, run_in(0)
    before = (await replica.set_state(run_id, b"before")).current
    await filled.fill()
    waiting = asyncio.create_task(replica.set_state(run_id, b"after", before.token))
    await until(lambda: _known_full(replica), "the first write to be refused")
    error = await refusal(replica.set_state(run_id, b"more"))
    assert error.reason == "ETCD_FULL"
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.retry_after is not None
    assert "compact and defragment" in error.message
    assert not waiting.done()
    assert await replica.get_state(run_id) == before
    await filled.make_room()
    answer = await waiting
    assert answer.has_set
    assert answer.current.state == b"after"
    # No shard moved, and the session was kept: the next write succeeds as usual.
    assert replica.serving == set(range(SHARDS))
    assert replica.readiness == [True]
    assert (await replica.set_state(run_id, b"again", answer.current.token)).has_set


async def test_a_request_for_a_run_without_an_owner_gets_the_cause(filled: Filled) -> None:
    """A shard without an owner key can't be claimed while etcd is full; once there is room, it is claimed."""
    replica = filled.replica
    await filled.fill()
    await filled.client.transact(Txn([], [Delete(Keys(filled.client.address.prefix).owner(3))]))
    hosting = replica.services.replica.shard_manager
    assert hosting is not None
    await until(lambda: hosting.obstacle(3) != "", "a claim to be refused")
    error = await refusal(replica.set_state(run_in(3), b"more"))
    assert error.reason == "NOT_OWNER"
    assert "database space exceeded" in error.metadata["cause"]
    assert "compact and defragment" in error.message
    await filled.make_room()
    await shared_out(replica)
