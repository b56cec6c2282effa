"""Three etcd members and three rendezvous replicas, as real processes on hosts that can be partitioned.

    async with running_cluster(tmp_path) as cluster:
        owner = await cluster.owner("run-1")
        await cluster.process(owner).kill()

After the block no process and no network of it is left, also if the block fails or the test is killed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ha.etcd_gateway import EtcdSilent
from ha.etcd_members import CLIENT_PORT, EtcdMembers
from ha.network import AGENTS, Network, missing, network_of
from ha.process import HostProcess
from ha.replicas import PREFIX, Replicas
from ha.waiting import PATIENCE, until
from rallypoint.rendezvous.cluster.ownership import by_preference, shard_of

__all__ = ["AGENTS", "ETCD", "PATIENCE", "REPLICAS", "TTL", "Cluster", "running_cluster"]

ETCD = ("etcd-0", "etcd-1", "etcd-2")
REPLICAS = ("replica-0", "replica-1", "replica-2")
TTL = 5.0
"""Time to live of a replica's lease, seconds."""


class Cluster:
    """The processes and the network of a cluster, with operations on them.

    Attributes:
        network: The network of the hosts.
        etcd: The members.
        replicas: The replicas.
    """

    def __init__(self, network: Network, etcd: EtcdMembers, replicas: Replicas) -> None:
        """Use parts that the caller opens and closes."""
        self.network = network
        self.etcd = etcd
        self.replicas = replicas

    @property
    def endpoints(self) -> str:
        """The endpoints of all replicas, in the form of `--rdzv-endpoint`."""
        return self.replicas.endpoints

    def process(self, name: str) -> HostProcess:
        """Return the process of a member or replica."""
        return self.etcd.members[name] if name in self.etcd.members else self.replicas.replicas[name]

    async def restart(self, *names: str) -> None:
        """Start members and replicas again, with their data; return when they serve."""
        for name in names:
            (self.etcd if name in self.etcd.members else self.replicas).spawn(name)
        for name in names:
            await (self.etcd if name in self.etcd.members else self.replicas).serve(name)

    # --- Ownership --------------------------------------------------------------------------------------

    async def owners(self) -> dict[int, str]:
        """Read the owner of each shard from etcd; shards without an owner are left out.

        Raises:
            EtcdSilent: No member answers.
        """
        found = await self.etcd.read(f"{PREFIX}/owners/")
        return {int(key.rsplit("/", 1)[1], 16): json.loads(value)["replica"] for key, value in found.items()}

    async def shard(self, run_id: str) -> int:
        return shard_of(run_id, await self._shards())

    async def owner(self, run_id: str, *, but: Collection[str] = (), timeout: float = PATIENCE) -> str:
        """Wait until a replica that is not in `but` owns a run; return its name.

        Raises:
            AssertionError: None does in time.
        """
        owner = ""

        async def look() -> str:
            nonlocal owner
            try:
                owner = (await self.owners()).get(await self.shard(run_id), "")
            except (EtcdSilent, KeyError) as error:
                return f"etcd: {error}"
            return "" if owner and owner not in but else f"the owner is {owner or 'nobody'}"

        await until(f"an owner of {run_id}, none of {list(but)}", look, timeout)
        return owner

    async def expired(self, name: str) -> None:
        """Wait until the lease of a dead, stopped or disconnected replica has expired.

        Raises:
            AssertionError: It has not in time.
        """

        async def look() -> str:
            return f"{name} is registered" if await self._is_registered(name) else ""

        await until(f"the end of the lease of {name}", look)

    async def registered(self, name: str) -> None:
        """Wait until a replica is registered, so that it can take over runs.

        Raises:
            AssertionError: It is not in time.
        """

        async def look() -> str:
            return "" if await self._is_registered(name) else f"{name} is not registered"

        await until(f"{name} to be counted with", look)

    async def settled(self, timeout: float = PATIENCE) -> None:
        """Wait until every shard is owned by its preferred replica among those that run.

        Raises:
            AssertionError: Some shard has another owner for too long.
        """

        async def look() -> str:
            running = [
                name for name, each in self.replicas.replicas.items() if each.running and not each.paused
            ]
            try:
                wanted = {shard: by_preference(shard, running)[0] for shard in range(await self._shards())}
                owners = await self.owners()
            except (EtcdSilent, KeyError) as error:
                return f"etcd: {error}"
            wrong = {shard: owners.get(shard) for shard in wanted if owners.get(shard) != wanted[shard]}
            return f"shards owned by others: {wrong}" if wrong else ""

        await until("every shard to be where it belongs", look, timeout)

    async def _is_registered(self, name: str) -> bool:
        return f"{PREFIX}/replicas/{name}" in await self.etcd.read(f"{PREFIX}/replicas/")

    async def _shards(self) -> int:
        layout = json.loads((await self.etcd.read(f"{PREFIX}/layout"))[f"{PREFIX}/layout"])
        return int(layout["shards"])

    # --- Faults of the network --------------------------------------------------------------------------

    async def part(self, one: str, *others: str) -> None:
        """Partition a host (AGENTS: the test's) from others: nothing arrives either way, no connection is closed.

        Skips the test on a machine where that is not possible.
        """
        for other in others:
            if why_not := self.network.why_inseparable(one, other):
                pytest.skip(why_not)
            await self.network.part(one, other)

    async def heal(self) -> None:
        """Let all hosts reach each other again, over links of full speed."""
        await self.network.heal()


@asynccontextmanager
async def running_cluster(folder: Path, *, replicas: bool = True) -> AsyncIterator[Cluster]:
    """Run a cluster with its data and logs in `folder`; `replicas`: start these as well, not only etcd."""
    if lacking := missing("etcd", "setpriv"):
        pytest.skip(f"needs {' and '.join(lacking)} (.ci/install-etcd installs etcd)")
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 (before anything runs)
    async with network_of((*ETCD, *REPLICAS)) as network:
        etcd = EtcdMembers(ETCD, network, folder)
        services = Replicas(REPLICAS, network, folder, TTL)
        try:
            await services.connect(ETCD, CLIENT_PORT)
            await etcd.open()
            if replicas:
                await services.open()
            yield Cluster(network, etcd, services)
        finally:
            services.close()
            etcd.close()
