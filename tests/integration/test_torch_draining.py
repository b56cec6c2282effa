"""Ranks of two hosts save the same step when one host is drained, and the other host continues from that step."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.scene import scene
from integration.test_draining import drain, with_flags
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.waiting import PATIENCE

pytestmark = [pytest.mark.integration, pytest.mark.torch]

WORKER = Path(__file__).with_name("torch_leaving_worker.py")


async def test_training_goes_on_from_the_step_that_all_ranks_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an all-reduce of the flag (docs/draining.md), ranks of the warned and of the other host save together."""
    pytest.importorskip("torch")
    async with scene(tmp_path, monkeypatch, nodes="1:2", conf={"last_call_timeout": "5"}) as stage:
        with_flags(stage, worker=WORKER)
        await stage.start_agents("a", "b")
        assert [line["step"] for line in await stage.started(4)] == [0] * 4
        ours = {worker.rank for worker in (await stage.cluster.get_job("a")).workers}
        await drain(stage, "a", "--grace", "600", "--reason", "maintenance")
        saved = await stage.said("saved", 4)
        assert len({line["step"] for line in saved}) == 1
        assert {line["rank"] for line in saved if line["told"]} == ours
        assert await stage.cluster.programs["a"].ended(PATIENCE) == 143, stage.report("a")
        run = await stage.becomes(
            "a round without it", lambda run: run.round > 1 and run.phase == pb.PHASE_FINAL
        )
        again = await stage.started(2, round_=run.round)
        assert [(line["step"], line["world_size"]) for line in again] == [(saved[0]["step"], 2)] * 2
        assert run.restart_count == 0
        (tmp_path / "finish").touch()
        assert await stage.cluster.programs["b"].ended(PATIENCE) == 0, stage.report("b")
