"""The cluster that the other tests here break: partitions are real, and nothing of it outlives a test."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from ha.cluster import ETCD, PATIENCE, running_cluster
from ha.etcd_gateway import EtcdSilent, ask, read
from ha.etcd_members import CLIENT_PORT
from ha.network import AGENTS, claim_number
from ha.waiting import until
from support.mortal import mortal
from support.processes import fresh_marker, gone, living

pytestmark = [pytest.mark.integration, pytest.mark.timeout(5 * PATIENCE)]

_MORTAL_CLUSTER = """
import asyncio, sys
from pathlib import Path
from ha.cluster import running_cluster

async def main():
    async with running_cluster(Path(sys.argv[1]), replicas=False) as cluster:
        print(cluster.network.address("agents"), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_parted_members_elect_another_leader_and_agree_when_healed(tmp_path: Path) -> None:
    """A leader without its majority is replaced and answers no read; after healing all three answer again."""
    async with running_cluster(tmp_path, replicas=False) as cluster:
        former = await cluster.etcd.leader()
        others = [name for name in ETCD if name != former]
        await cluster.part(former, *others)

        async def look() -> str:
            return former if await cluster.etcd.leader() == former else ""

        await until("another leader", look)
        with pytest.raises(EtcdSilent):
            await read(cluster.etcd.endpoint(former), "/x", 1.0)
        await cluster.heal()
        await cluster.etcd.serve()


@pytest.mark.slow
async def test_a_host_parted_from_the_agents_is_not_reached(tmp_path: Path) -> None:
    """A member that is partitioned from this host does not answer it, another does; after healing it answers."""
    async with running_cluster(tmp_path, replicas=False) as cluster:
        endpoint = await cluster.network.reach(AGENTS, "etcd-0", CLIENT_PORT)
        await cluster.part(AGENTS, "etcd-0")
        with pytest.raises(EtcdSilent):
            await ask(endpoint, "maintenance/status", 1.0)
        others = await ask(cluster.etcd.endpoint("etcd-1"), "cluster/member/list", PATIENCE)
        assert len(others["members"]) == len(ETCD)
        await cluster.heal()
        await ask(endpoint, "maintenance/status", PATIENCE)


@pytest.mark.slow
async def test_a_slow_link_is_slow_and_becomes_fast_again(tmp_path: Path) -> None:
    """A reply of a quarter of a megabyte takes seconds over a link of 512 kbit/s."""
    async with running_cluster(tmp_path, replicas=False) as cluster:
        endpoint = await cluster.network.reach(AGENTS, "etcd-0", CLIENT_PORT)
        await ask(endpoint, "kv/put", PATIENCE, key="eA==", value="A" * 350_000)
        await cluster.network.slow("etcd-0", kilobits=512)
        assert await _seconds_to_read(endpoint) > 2
        await cluster.heal()
        assert await _seconds_to_read(endpoint) < PATIENCE


@pytest.mark.slow
async def test_a_member_comes_back_with_its_data_and_outlives_compaction(tmp_path: Path) -> None:
    """The members keep their data when they are killed, paused, compacted and defragmented."""
    async with running_cluster(tmp_path, replicas=False) as cluster:
        await ask(cluster.etcd.endpoint("etcd-0"), "kv/put", PATIENCE, key="eA==", value="eQ==")
        for name in ETCD:
            await cluster.process(name).kill()
        await cluster.restart(*ETCD)
        await cluster.etcd.compact()
        await cluster.etcd.defragment()
        cluster.process("etcd-0").pause()
        assert await cluster.etcd.read("x") == {"x": b"y"}
        cluster.process("etcd-0").resume()
        await cluster.etcd.serve("etcd-0")
        assert await read(cluster.etcd.endpoint("etcd-0"), "x", PATIENCE) == {"x": b"y"}


async def test_nothing_is_left_of_a_cluster_whose_test_was_killed(tmp_path: Path) -> None:
    """SIGKILL of a test ends every process that it has started, and its network."""
    with fresh_marker() as marker:
        folder = tmp_path / marker
        starter = subprocess.Popen(  # noqa: ASYNC220 (it is to die with this thread)
            mortal(sys.executable, "-c", _MORTAL_CLUSTER, str(folder)),
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HA_MARKER": marker},
        )
        assert starter.stdout is not None
        with starter.stdout:
            address = (await asyncio.to_thread(starter.stdout.readline)).strip()
        assert address, "the cluster did not start"
        assert len(living(marker)) > len(ETCD)
        os.kill(starter.pid, signal.SIGKILL)
        starter.wait(PATIENCE)
        await until("the end of all processes", partial(asyncio.to_thread, _survivors, marker))
        await until("the end of the network", partial(asyncio.to_thread, _remainder, address))


def test_no_two_networks_have_the_same_number() -> None:
    """A number is given only once while its claim is held."""
    one, claim = claim_number()
    with claim:
        other, another_claim = claim_number()
        another_claim.close()
        assert one != other


async def _seconds_to_read(endpoint: str) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    # Not linearizable: a member behind a slow link may have to wait for a leader.
    answer = await ask(endpoint, "kv/range", PATIENCE, key="eA==", serializable=True)
    assert len(answer["kvs"]) == 1
    return loop.time() - began


def _survivors(marker: str) -> str:
    return "" if gone(marker) else str(living(marker))


def _remainder(address: str) -> str:
    """Return the interfaces of this host if one still has that address. Loopback addresses leave nothing behind."""
    if address.startswith("127."):
        return ""
    shown = subprocess.run(["ip", "-4", "address"], capture_output=True, text=True, check=True).stdout
    return shown if f" {address}/" in shown else ""
