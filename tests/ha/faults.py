"""The faults of the nemesis: each is a context manager that breaks a cluster at its start and repairs it at its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from ha.clocks import BootClock, WallClock
from ha.cluster import AGENTS, ETCD, REPLICAS, Cluster
from ha.etcd_gateway import EtcdSilent


@dataclass(slots=True)
class Stage:
    """The targets of the nemesis.

    Attributes:
        cluster: The cluster that it breaks.
        runs: The runs whose owners it breaks.
        draw: Its source of random numbers.
        boot_clock: A replica, and its clock since boot.
        wall_clock: A replica, and its wall clock; None: this machine can't set one.
    """

    cluster: Cluster
    runs: Sequence[str]
    draw: random.Random
    boot_clock: tuple[str, BootClock]
    wall_clock: tuple[str, WallClock] | None

    async def owner(self) -> str:
        """Return the owner of a random run, as read from etcd; a random replica if it can't be read."""
        try:
            async with asyncio.timeout(2.0):
                owners = await self.cluster.owners()
                owner = owners.get(await self.cluster.shard(self.draw.choice(self.runs)), "")
        except (EtcdSilent, TimeoutError, KeyError):
            owner = ""
        return owner if owner in REPLICAS else self.draw.choice(REPLICAS)


Fault = Callable[[Stage], AbstractAsyncContextManager[str]]
"""Breaks something when the block begins, yields a description of it, and repairs it when the block ends."""


@asynccontextmanager
async def owner_killed(stage: Stage) -> AsyncIterator[str]:
    """The owner of a run is SIGKILLed."""
    name = await stage.owner()
    await stage.cluster.process(name).kill()
    yield f"{name} is killed"
    await _start(stage, name)


@asynccontextmanager
async def owner_paused(stage: Stage) -> AsyncIterator[str]:
    """The owner of a run is SIGSTOPped, and continues later with its old state."""
    name = await stage.owner()
    process = stage.cluster.process(name)
    process.pause()
    yield f"{name} is stopped"
    process.resume()


@asynccontextmanager
async def owner_ended(stage: Stage) -> AsyncIterator[str]:
    """The owner of a run receives SIGTERM, and hands its shards over."""
    name = await stage.owner()
    code = await stage.cluster.process(name).terminate()
    assert code == 0, f"{name} ended with {code} when told to go"
    yield f"{name} is gone in good order"
    await _start(stage, name)


@asynccontextmanager
async def replicas_restarted(stage: Stage) -> AsyncIterator[str]:
    """All replicas are restarted, one after the other."""
    for name in stage.draw.sample(REPLICAS, len(REPLICAS)):
        code = await stage.cluster.process(name).terminate()
        assert code == 0, f"{name} ended with {code} when told to go"
        await _start(stage, name)
    yield "all replicas were restarted"


@asynccontextmanager
async def wall_clock_set(stage: Stage) -> AsyncIterator[str]:
    """The wall clock of a replica is set by hours, ahead or back."""
    assert stage.wall_clock is not None
    name, clock = stage.wall_clock
    # Back to the right time when it is far off, so that it jumps both ways.
    seconds = -clock.offset if abs(clock.offset) > 8 * 3600 else stage.draw.uniform(-5, 5) * 3600
    clock.jump(seconds)
    yield f"the wall clock of {name} is set by {seconds:+.0f} s"


@asynccontextmanager
async def machine_suspended(stage: Stage) -> AsyncIterator[str]:
    """The clock since boot of a replica jumps, as if its machine had been suspended."""
    name, clock = stage.boot_clock
    seconds = stage.draw.choice((3.0, 20.0, 600.0))
    clock.jump(seconds)
    yield f"the machine of {name} was suspended for {seconds:.0f} s"


@asynccontextmanager
async def etcd_leader_killed(stage: Stage) -> AsyncIterator[str]:
    """The leader of etcd is SIGKILLed."""
    name = await _leader(stage)
    await stage.cluster.process(name).kill()
    yield f"{name}, which led, is killed"
    await stage.cluster.etcd.restart(name)


@asynccontextmanager
async def etcd_leader_paused(stage: Stage) -> AsyncIterator[str]:
    """The leader of etcd is SIGSTOPped, and still acts as the leader when it continues."""
    name = await _leader(stage)
    process = stage.cluster.process(name)
    process.pause()
    yield f"{name}, which led, is stopped"
    process.resume()


@asynccontextmanager
async def etcd_minority_lost(stage: Stage) -> AsyncIterator[str]:
    """One member of etcd is SIGKILLed."""
    name = stage.draw.choice(ETCD)
    await stage.cluster.process(name).kill()
    yield f"{name} is killed"
    await stage.cluster.etcd.restart(name)


@asynccontextmanager
async def etcd_majority_lost(stage: Stage) -> AsyncIterator[str]:
    """Two members of etcd are SIGKILLed: etcd commits nothing until one is back."""
    names = stage.draw.sample(ETCD, 2)
    for name in names:
        await stage.cluster.process(name).kill()
    yield f"{' and '.join(names)} are killed"
    await stage.cluster.restart(*names)


@asynccontextmanager
async def etcd_restarted(stage: Stage) -> AsyncIterator[str]:
    """All members of etcd are restarted, one after the other."""
    for name in stage.draw.sample(ETCD, len(ETCD)):
        await stage.cluster.process(name).terminate()
        await stage.cluster.etcd.restart(name)
    yield "all members of etcd were restarted"


@asynccontextmanager
async def etcd_compacted(stage: Stage) -> AsyncIterator[str]:
    """etcd is compacted and defragmented: each member serves no requests meanwhile."""
    try:
        revision = await stage.cluster.etcd.compact()
        await stage.cluster.etcd.defragment()
    except EtcdSilent as error:
        yield f"etcd can't be compacted: {error}"
    else:
        yield f"etcd is compacted at {revision} and defragmented"


@asynccontextmanager
async def replica_parted_from_etcd(stage: Stage) -> AsyncIterator[str]:
    """A replica reaches its clients, but no member of etcd."""
    name = await stage.owner()
    async with _parted(stage, name, *ETCD):
        yield f"{name} is parted from etcd"


@asynccontextmanager
async def replica_parted_from_a_member(stage: Stage) -> AsyncIterator[str]:
    """A replica can't reach one member of etcd."""
    name, member = await stage.owner(), stage.draw.choice(ETCD)
    async with _parted(stage, name, member):
        yield f"{name} is parted from {member}"


@asynccontextmanager
async def replica_parted_from_agents(stage: Stage) -> AsyncIterator[str]:
    """A replica keeps its lease, but its clients can't reach it."""
    name = await stage.owner()
    async with _parted(stage, AGENTS, name):
        yield f"{name} is parted from all clients"


@asynccontextmanager
async def leader_parted_from_members(stage: Stage) -> AsyncIterator[str]:
    """The leader of etcd reaches its clients, but no other member: some of its answers are stale."""
    name = await _leader(stage)
    async with _parted(stage, name, *(each for each in ETCD if each != name)):
        yield f"{name}, which led, is parted from the other members"


@asynccontextmanager
async def link_slow(stage: Stage) -> AsyncIterator[str]:
    """The link of a replica or a member is slow."""
    name, kilobits = stage.draw.choice((*REPLICAS, *ETCD)), stage.draw.choice((64, 256, 1024))
    await stage.cluster.network.slow(name, kilobits)
    try:
        yield f"the link of {name} carries {kilobits} kbit/s"
    finally:
        await stage.cluster.heal()


@asynccontextmanager
async def _parted(stage: Stage, one: str, *others: str) -> AsyncIterator[None]:
    try:
        await stage.cluster.part(one, *others)
        yield
    finally:
        await stage.cluster.heal()


async def _leader(stage: Stage) -> str:
    """Return the leader of etcd; a random member if there is none within 5 s."""
    try:
        async with asyncio.timeout(5.0):
            return await stage.cluster.etcd.leader()
    except TimeoutError:
        return stage.draw.choice(ETCD)


async def _start(stage: Stage, name: str) -> None:
    """Start a replica again; return when it serves."""
    stage.cluster.replicas.spawn(name)
    await stage.cluster.replicas.serve(name)


REPLICA_FAULTS: Mapping[Fault, tuple[float, tuple[float, float]]] = {
    # Weight, and the least and greatest duration in seconds.
    owner_killed: (4, (0.0, 8.0)),
    owner_paused: (4, (1.0, 18.0)),
    owner_ended: (2, (0.0, 8.0)),
    replicas_restarted: (1, (0.0, 1.0)),
    wall_clock_set: (1, (0.0, 4.0)),
    machine_suspended: (1, (0.0, 4.0)),
}
"""Faults of replicas: one at a time."""

ETCD_FAULTS: Mapping[Fault, tuple[float, tuple[float, float]]] = {
    etcd_leader_killed: (2, (0.0, 10.0)),
    etcd_leader_paused: (2, (1.0, 12.0)),
    etcd_minority_lost: (1, (1.0, 10.0)),
    etcd_majority_lost: (1, (1.0, 15.0)),
    etcd_restarted: (1, (0.0, 1.0)),
    etcd_compacted: (2, (0.0, 1.0)),
}
"""Faults of etcd: one at a time, and at the same time as one of a replica."""

LINK_FAULTS: Mapping[Fault, tuple[float, tuple[float, float]]] = {
    replica_parted_from_etcd: (3, (1.0, 18.0)),
    replica_parted_from_a_member: (2, (1.0, 15.0)),
    replica_parted_from_agents: (2, (1.0, 15.0)),
    leader_parted_from_members: (2, (1.0, 12.0)),
    link_slow: (1, (2.0, 10.0)),
}
"""Faults of the network: each in place of a fault of etcd."""
