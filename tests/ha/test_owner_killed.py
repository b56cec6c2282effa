"""The owner of a run is SIGKILLed: another replica owns it one lease later, and no worker stops."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median

import pytest

from ha.cluster import PATIENCE, TTL, running_cluster
from ha.crowd import watched_crowd
from ha.length import FULL_LENGTH, ordinarily
from ha.runs import run_everywhere
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.marks import slow
from torture.tormented_node import WORKERS

pytestmark = pytest.mark.integration

RUN = "killed-owners"
REPEATS = ordinarily(2, in_full=20)
# From the kill to the last resumed node, seconds. Checked only at full length: CI may be slow.
WITHIN = TTL + 2.0


@pytest.mark.timeout(3 * PATIENCE + REPEATS * PATIENCE)
@pytest.mark.parametrize(("count", "repeats"), [(32, 1), slow(256, REPEATS)])
async def test_every_node_is_resumed_by_another_owner_and_no_round_ends(
    tmp_path: Path, count: int, repeats: int
) -> None:
    """All nodes resume within the lease and 2 s; the round goes on, and all replicas report it alike."""
    loop = asyncio.get_running_loop()
    claimed: list[float] = []
    resumed: list[float] = []
    async with running_cluster(tmp_path) as cluster, watched_crowd(cluster.endpoints, RUN, count) as crowd:
        round_ = await crowd.agree(PATIENCE)
        for _ in range(repeats):
            since = loop.time()
            owner = await cluster.owner(RUN)
            killed = loop.time()
            await cluster.process(owner).kill()
            await cluster.owner(RUN, but=[owner])
            claimed.append(loop.time() - killed)
            resumed.append(await crowd.resumed(since, PATIENCE) - killed)
            assert crowd.disturbances == []
            await cluster.restart(owner)
        run = await run_everywhere(cluster, RUN)
        assert crowd.disturbances == []
        assert crowd.common_round() == round_
        assert (run.phase, run.round, run.restart_count) == (pb.PHASE_FINAL, round_, 0)
        assert run.world_size == count * WORKERS
        assert cluster.replicas.complaints() == []
    print(  # noqa: T201
        f"{repeats} owners killed under {count} nodes, lease {TTL:g} s: another owner after {median(claimed):.2f} s "
        f"(median; slowest {max(claimed):.2f} s), last node resumed after {median(resumed):.2f} s (slowest "
        f"{max(resumed):.2f} s); still round {round_}, no worker stopped"
    )
    assert not FULL_LENGTH or max(resumed) < WITHIN, resumed
