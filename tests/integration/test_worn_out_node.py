"""A host whose workers fail repeatedly is evicted from the run, and the others continue without it."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from integration.scene import scene
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.waiting import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.integration]


def runs_after(round_: int, run: pb.Run) -> bool:
    """Return True if a later round is FINAL."""
    return run.round > round_ and run.phase == pb.PHASE_FINAL


async def test_a_host_whose_workers_fail_too_often_is_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one restart it ends with 3 and the reason; its eviction does not increase the restart count."""
    conf = {"last_call_timeout": "5", "max_restarts_per_node": "1"}
    async with scene(tmp_path, monkeypatch, nodes="1:2", workers=1, max_restarts=5, conf=conf) as stage:
        await stage.start_agents("a", "b")
        round_ = 1
        for times in (1, 2):
            await stage.started(2, round_)
            (worker,) = (await stage.cluster.get_job("b")).workers
            os.kill(worker.pid, signal.SIGKILL)
            run = await stage.becomes("the next round", partial(runs_after, round_))
            round_ = run.round
            assert run.restart_count == 1, f"after {times}"
        assert await stage.cluster.programs["b"].ended(PATIENCE) == 3
        told = stage.report("b")
        assert "this host is not fit to run workers" in told
        assert "its workers failed 2 times, last that of rank" in told
        run = await stage.cluster.get_run("run-1")
        assert (run.world_size, run.round, run.restart_count) == (1, 3, 1)
        assert run.last_round_end.cause == pb.ROUND_END_CAUSE_NODE_EVICTED
        assert len(run.evicted_node_ids) == 1
        await stage.started(1, round_)
        (tmp_path / "finish").touch()
        assert await stage.cluster.programs["a"].ended(PATIENCE) == 0
