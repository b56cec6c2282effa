"""etcd is compacted and defragmented under load: no change is missed, and nothing stops."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from ha.cluster import PATIENCE, running_cluster
from ha.crowd import watched_crowd
from ha.length import ordinarily
from ha.runs import run_everywhere
from ha.steady_writer import SteadyWriter
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.integration]

RUN = "compacted"
NODES = 32
TIMES = ordinarily(3, in_full=60)
# Number of concurrent writers, and of the writes of each between two compactions.
WRITERS, EACH = 16, 25


@pytest.mark.timeout(5 * PATIENCE + TIMES * 10)
async def test_compaction_and_defragmentation_under_load_disturb_nothing(tmp_path: Path) -> None:
    """Every write counts once, every node keeps its round, and a later owner finds all of it."""
    async with running_cluster(tmp_path) as cluster, watched_crowd(cluster.endpoints, RUN, NODES) as crowd:
        round_ = await crowd.agree(PATIENCE)
        async with AsyncExitStack() as stack:
            writers = [
                SteadyWriter(cluster.endpoints, node, f"sum-{number}")
                for number, node in enumerate(crowd.nodes[:WRITERS])
            ]
            for writer in writers:
                await stack.enter_async_context(writer)
            for _ in range(TIMES):
                await asyncio.gather(*(writer.go_on(EACH) for writer in writers))
                await cluster.etcd.compact()
                await cluster.etcd.defragment()
                # The revisions from which a watch would resume are gone: after a broken stream it must read all again.
                member = await cluster.etcd.leader()
                await cluster.process(member).kill()
                await cluster.restart(member)
            gap = max(writer.longest_gap() for writer in writers)
            since = asyncio.get_running_loop().time()
            owner = await cluster.owner(RUN)
            await cluster.process(owner).kill()
            await crowd.resumed(since, PATIENCE)
            await asyncio.gather(*(writer.go_on(EACH) for writer in writers))
            written = sum([await writer.stop() for writer in writers])
        await cluster.restart(owner)
        run = await run_everywhere(cluster, RUN)
        assert (run.phase, run.round, run.restart_count) == (pb.PHASE_FINAL, round_, 0)
        assert crowd.disturbances == []
        assert cluster.replicas.complaints() == []
    print(  # noqa: T201
        f"{TIMES} times etcd was compacted, each member defragmented and the leader killed, under {WRITERS} writers: "
        f"longest wait for a write {gap:.2f} s; {written} writes, each there once, for another owner as well"
    )
