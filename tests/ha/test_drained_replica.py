"""A replica that receives SIGTERM hands its runs over before it ends: no client waits for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median

import pytest

from ha.cluster import PATIENCE, TTL, running_cluster
from ha.crowd import watched_crowd
from ha.length import FULL_LENGTH, ordinarily
from ha.runs import run_everywhere
from ha.steady_writer import SteadyWriter
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.integration]

RUN = "drained"
NODES = 64
REPEATS = ordinarily(1, in_full=10)


@pytest.mark.timeout(3 * PATIENCE + REPEATS * PATIENCE)
async def test_a_drained_replica_hands_its_runs_over_first(tmp_path: Path) -> None:
    """The run has another owner when the old one's process has ended, and nodes resume there before a lease ends."""
    loop = asyncio.get_running_loop()
    gaps: list[float] = []
    async with running_cluster(tmp_path) as cluster, watched_crowd(cluster.endpoints, RUN, NODES) as crowd:
        round_ = await crowd.agree(PATIENCE)
        async with SteadyWriter(cluster.endpoints, crowd.nodes[0]) as writer:
            for _ in range(REPEATS):
                await cluster.settled()
                told = loop.time()
                owner = await cluster.owner(RUN)
                assert await cluster.process(owner).terminate() == 0
                assert await cluster.owner(RUN) != owner, "the run has an owner when the drained one is gone"
                await crowd.resumed(told, PATIENCE)
                await writer.go_on()
                gaps.append(writer.longest_gap(since=told))
                await cluster.restart(owner)
            await writer.stop()
        run = await run_everywhere(cluster, RUN)
        assert (run.phase, run.round, run.restart_count) == (pb.PHASE_FINAL, round_, 0)
        assert crowd.disturbances == []
        assert cluster.replicas.complaints() == []
    print(  # noqa: T201
        f"{REPEATS} drained owners under {NODES} nodes: a writer waited {median(gaps):.2f} s for its longest answer "
        f"(median; longest {max(gaps):.2f} s), no lease of {TTL:g} s had to run out, 0 restarts"
    )
    assert not FULL_LENGTH or max(gaps) < TTL / 2, gaps
