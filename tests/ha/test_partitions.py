"""Hosts can't reach each other for a while: runs move to where they can be served, and reports never conflict."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from ha.cluster import AGENTS, ETCD, PATIENCE, REPLICAS, TTL, Cluster, running_cluster
from ha.crowd import WatchedCrowd, patient, watched_crowd
from ha.length import ordinarily
from ha.runs import run_at, run_everywhere
from ha.steady_writer import SteadyWriter
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as state_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import Plaintext
from rallypoint.rpc.errors import decode
from support.refusals import refusal

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(8 * PATIENCE)]

RUN = "parted"
NODES = 32
REPEATS = ordinarily(1, in_full=5)
# Successive writes that must be answered before the next fault.
CALM = 50
# Longer than a client needs to detect a dead connection: 10 + 5 s.
UNREACHABLE = 20.0


@dataclass
class Scene:
    """A run of many nodes with a writer, and the cluster that serves it."""

    cluster: Cluster
    crowd: WatchedCrowd
    writer: SteadyWriter
    round: int


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    """Yield a scene; its run must be unchanged in the end: same round, no restart, every write there once."""
    async with (
        running_cluster(folder) as cluster,
        watched_crowd(cluster.endpoints, RUN, NODES, patient(NODES)) as crowd,
    ):
        round_ = await crowd.agree(PATIENCE)
        async with SteadyWriter(cluster.endpoints, crowd.nodes[0]) as writer:
            await writer.go_on()
            yield Scene(cluster, crowd, writer, round_)
            await cluster.heal()
            await writer.go_on()
            await writer.stop()
        run = await run_everywhere(cluster, RUN)
        assert (run.phase, run.round, run.restart_count) == (pb.PHASE_FINAL, round_, 0)
        assert crowd.disturbances == []
        assert crowd.common_round() == round_
        assert cluster.replicas.complaints() == []


async def test_a_replica_parted_from_etcd_loses_its_runs_and_serves_nothing(tmp_path: Path) -> None:
    """Another owns the run a lease later; the partitioned one ends its streams, and refuses writes and reads."""
    loop = asyncio.get_running_loop()
    moved: list[float] = []
    async with scene(tmp_path) as at:
        for repeat in range(REPEATS):
            owner = await at.cluster.owner(RUN)
            endpoint = at.cluster.replicas.endpoint(owner)
            watching = asyncio.create_task(_watch_to_the_end(endpoint))
            await at.cluster.part(owner, *ETCD)
            parted = loop.time()
            writing = asyncio.create_task(_set_state(endpoint, f"parted-{repeat}"))
            await at.cluster.owner(RUN, but=[owner])
            await at.crowd.resumed(parted, PATIENCE)
            moved.append(loop.time() - parted)
            assert await watching in ("NOT_OWNER", "DRAINING", "UNAVAILABLE")
            assert await writing is grpc.StatusCode.UNAVAILABLE
            assert (await refusal(run_at(endpoint, RUN))).code in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            )
            await at.writer.go_on()
            await at.cluster.heal()
            await at.cluster.registered(owner)
    print(  # noqa: T201
        f"owner parted from etcd {REPEATS} times: {NODES} nodes with another one after {max(moved):.2f} s at most, "
        f"longest wait for a write {at.writer.longest_gap():.2f} s"
    )


async def test_agents_parted_from_the_owner_resume_after_healing(tmp_path: Path) -> None:
    """Followers name the owner, which keeps the run; after healing every node resumes, every write is answered."""
    loop = asyncio.get_running_loop()
    async with scene(tmp_path) as at:
        await at.cluster.settled()
        owner = await at.cluster.owner(RUN)
        await at.cluster.part(AGENTS, owner)
        parted = loop.time()
        follower = next(name for name in REPLICAS if name != owner)
        told = await _redirected(at.cluster.replicas.endpoint(follower))
        assert told == at.cluster.replicas.endpoint(owner)
        assert (await run_at(at.cluster.replicas.endpoint(follower), RUN)).round == at.round
        await asyncio.sleep(UNREACHABLE)  # nothing is to happen
        assert at.crowd.disturbances == []
        assert await at.cluster.owner(RUN) == owner
        await at.cluster.heal()
        healed = loop.time()
        await at.writer.go_on()
        last = await at.crowd.resumed(parted, PATIENCE)
    print(  # noqa: T201
        f"{NODES} nodes parted from the owner for {healed - parted:.1f} s: last one resumed {last - healed:.2f} s "
        "after healing, 0 restarts"
    )


async def test_losing_one_member_of_etcd_ends_no_round(tmp_path: Path) -> None:
    """A follower is partitioned from all hosts, then the leader, then the leader is killed: no round ends."""
    loop = asyncio.get_running_loop()
    gaps: dict[str, float] = {}
    async with scene(tmp_path) as at:
        for trouble in (*("follower parted", "leader parted", "leader killed") * REPEATS,):
            # One fault at a time: wait until writes flow again.
            await at.writer.go_on(CALM)
            leader = await at.cluster.etcd.leader()
            follower = next(name for name in ETCD if name != leader)
            member = follower if trouble == "follower parted" else leader
            began = loop.time()
            if trouble == "leader killed":
                await at.cluster.process(member).kill()
            else:
                await at.cluster.part(member, *REPLICAS, *[name for name in ETCD if name != member])
            await asyncio.sleep(TTL)  # the other members must be enough for a lease's time to live
            await at.writer.go_on()
            gaps[trouble] = max(gaps.get(trouble, 0.0), at.writer.longest_gap(since=began))
            await at.cluster.heal()
            if trouble == "leader killed":
                await at.cluster.restart(member)
            await at.cluster.etcd.serve()
    longest = ", ".join(f"{what} {gap:.2f} s" for what, gap in gaps.items())
    print(f"one member of etcd at a time, {REPEATS} times each: longest wait for a write: {longest}")  # noqa: T201


async def test_slow_links_end_no_round(tmp_path: Path) -> None:
    """With 256 kbit/s on the owner's link, its run is served, by any owner, and no round ends."""
    loop = asyncio.get_running_loop()
    async with scene(tmp_path) as at:
        slowed = loop.time()
        await at.cluster.network.slow(await at.cluster.owner(RUN), kilobits=256)
        await asyncio.sleep(TTL)  # nothing is to happen
        await at.writer.go_on()
    print(f"owner behind 256 kbit/s: longest wait for a write {at.writer.longest_gap(since=slowed):.2f} s")  # noqa: T201


async def _watch_to_the_end(endpoint: str) -> str:
    """Watch the run at one replica; return the reason with which it ended the stream."""
    channel = open_channel(endpoint, Plaintext())
    try:
        watching = pb_grpc.RendezvousServiceStub(channel).WatchRun(
            pb.WatchRunRequest(run_id=RUN), timeout=PATIENCE, wait_for_ready=True
        )
        async for _ in watching:
            pass
    except grpc.aio.AioRpcError as failure:
        return decode(failure).reason
    finally:
        await channel.close()
    return "it ended well"


async def _redirected(endpoint: str) -> str:
    """Return the address to which a replica redirects a watcher of the run."""
    channel = open_channel(endpoint, Plaintext())
    try:
        watching = pb_grpc.RendezvousServiceStub(channel).WatchRun(
            pb.WatchRunRequest(run_id=RUN), timeout=PATIENCE
        )
        await watching.read()
    except grpc.aio.AioRpcError as failure:
        error = decode(failure)
        return error.metadata.get("owner_address", repr(error))
    finally:
        await channel.close()
    return "it streams"


async def _set_state(endpoint: str, state: str) -> grpc.StatusCode:
    """Try to set the run's first state at one replica, which loses or has lost the run; return the status code."""
    channel = open_channel(endpoint, Plaintext())
    try:
        request = state_pb.SetStateRequest(run_id=RUN, state=state.encode())
        await state_grpc.StateServiceStub(channel).SetState(request, timeout=PATIENCE, wait_for_ready=True)
    except grpc.aio.AioRpcError as failure:
        return failure.code()
    finally:
        await channel.close()
    return grpc.StatusCode.OK
