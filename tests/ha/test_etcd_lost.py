"""etcd has no majority for longer than a lease lives: workers go on, and replicas report only durable states."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import pytest

from ha.cluster import ETCD, PATIENCE, REPLICAS, TTL, Cluster, running_cluster
from ha.crowd import steady, watched_crowd
from ha.length import ordinarily
from ha.runs import run_everywhere
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as state_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import Plaintext

pytestmark = [pytest.mark.slow, pytest.mark.integration]

RUN, NEW_RUN = "lost-majority", "joined-meanwhile"
NODES = ordinarily(32, in_full=256)
# Longer than the lease of a replica, shorter than that of a node: no node may be lost for lack of an owner.
OUTAGE = ordinarily(2 * TTL, in_full=30.0)
# Codes that leave the outcome of a write unknown; any other would be a decision that can't have been committed.
_UNKNOWN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}


@pytest.mark.timeout(6 * PATIENCE)
async def test_a_lost_majority_stops_no_worker_and_acknowledges_nothing(tmp_path: Path) -> None:
    """Meanwhile no write is acknowledged, no node admitted, no round ended; the latter two follow when etcd is back."""
    loop = asyncio.get_running_loop()
    async with running_cluster(tmp_path) as cluster, watched_crowd(cluster.endpoints, RUN, NODES) as crowd:
        round_ = await crowd.agree(PATIENCE)
        revision = (await run_everywhere(cluster, RUN)).revision
        lost = [await cluster.etcd.leader()]
        lost.append(next(name for name in ETCD if name not in lost))
        for name in lost:
            await cluster.process(name).kill()
        began = loop.time()
        crowd.watched[0].break_worker()
        async with watched_crowd(cluster.endpoints, NEW_RUN, 1, steady(1)) as newcomers:
            outcomes = await _write_until(cluster, began + OUTAGE)
            assert set(outcomes) <= _UNKNOWN, outcomes
            assert newcomers.watched[0].admissions == [], (
                "a node was let in that nobody can have written down"
            )
            assert crowd.disturbances == [], "a round was ended that nobody can have ended durably"
            told = max(node.told[-1].update.revision for node in crowd.watched)
            assert told <= revision, "a revision was told that etcd can't have"
            await cluster.restart(*lost)
            served = loop.time()
            await newcomers.agree(PATIENCE)
        # The failure was reported during the outage, and counts after it: once, for a reason that is durable.
        next_round = await crowd.agree(PATIENCE, after=round_)
        recovered = loop.time()
        run = await run_everywhere(cluster, RUN)
        assert (run.phase, run.round, run.restart_count) == (pb.PHASE_FINAL, next_round, 1)
        assert all(len(node.admissions) == 1 for node in crowd.watched), "every lease outlived the outage"
        assert cluster.replicas.complaints() == []
    print(  # noqa: T201
        f"{NODES} nodes, the majority of etcd away for {served - began:.1f} s: no worker stopped, "
        f"{sum(outcomes.values())} writes attempted and none acknowledged; {recovered - served:.2f} s after etcd "
        "served again, a failure that was reported meanwhile had led to the next round of all nodes"
    )


async def _write_until(cluster: Cluster, end: float) -> Counter[grpc.StatusCode]:
    """Try to set states at every replica until `end`; return the number of replies by code."""
    loop = asyncio.get_running_loop()
    outcomes: Counter[grpc.StatusCode] = Counter()

    async def write(name: str) -> None:
        channel = open_channel(cluster.replicas.endpoint(name), Plaintext())
        stub, number = state_grpc.StateServiceStub(channel), 0
        while loop.time() < end:
            number += 1
            request = state_pb.SetStateRequest(run_id=f"{name}-{number}", state=b"lost")
            try:
                await stub.SetState(request, timeout=min(1.0, end - loop.time()))
                outcomes[grpc.StatusCode.OK] += 1
            except grpc.aio.AioRpcError as error:
                outcomes[error.code()] += 1
            await asyncio.sleep(0.02)
        await channel.close()

    await asyncio.gather(*map(write, REPLICAS))
    return outcomes
