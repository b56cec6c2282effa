"""All replicas and etcd members are restarted, one after the other, under a training job: it trains on."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from ha.cluster import ETCD, PATIENCE, REPLICAS, running_cluster
from ha.crowd import watched_crowd
from ha.job import WORKERS, running_job
from ha.length import ordinarily
from ha.runs import run_everywhere
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.integration]

RUN = "rolling"
NODES = 32
ROUNDS = ordinarily(1, in_full=3)


@pytest.mark.timeout(6 * PATIENCE * (1 + ROUNDS))
async def test_a_rolling_restart_of_everything_restarts_no_worker(tmp_path: Path) -> None:
    """Three replicas and three etcd members end in good order and restart: one process per rank, to the end."""
    loop = asyncio.get_running_loop()
    took: list[float] = []
    async with (
        running_cluster(tmp_path / "cluster") as cluster,
        running_job(cluster, RUN, tmp_path / "job") as job,
        watched_crowd(cluster.endpoints, f"{RUN}-crowd", NODES) as crowd,
    ):
        started = job.starts()
        assert len(started) == len(set(started)) == 2 * WORKERS
        crowds_round = await crowd.agree(PATIENCE)
        before = await run_everywhere(cluster, RUN)
        for name in (*REPLICAS, *ETCD) * ROUNDS:
            began = loop.time()
            # etcd ends itself with the signal that it received.
            in_good_order = 0 if name in REPLICAS else -signal.SIGTERM
            assert await cluster.process(name).terminate() == in_good_order
            await cluster.restart(name)
            await job.count_on()
            took.append(loop.time() - began)
        await cluster.settled()
        after = await run_everywhere(cluster, RUN)
        assert (after.phase, after.round, after.restart_count) == (pb.PHASE_FINAL, before.round, 0)
        assert job.starts() == started, "a worker was restarted"
        assert crowd.disturbances == []
        assert crowd.common_round() == crowds_round
        assert await job.finish() == [0, 0], job.logs()
        assert job.starts() == started, "a worker was restarted"
        assert cluster.replicas.complaints() == []
    print(  # noqa: T201
        f"{ROUNDS} x 3 replicas and 3 members of etcd restarted, up to {max(took):.1f} s each: {len(started)} real "
        f"workers and those of {NODES} nodes counted on, 0 restarts, still round {after.round}"
    )
