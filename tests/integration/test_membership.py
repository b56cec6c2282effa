"""Hosts and the rendezvous service come and go: the remaining hosts continue, and no worker stops without need."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cli.cli_process import rallypoint
from integration.scene import RUN, scene
from rallypoint.agent.v1 import supervisor_service_pb2 as agent_pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.waiting import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.integration]


async def test_survivors_of_a_lost_host_form_a_smaller_world_and_grow_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three hosts (1:3) loses all its processes: two continue, know the reason, and admit a third again."""
    conf = {"last_call_timeout": "1"}
    async with scene(tmp_path, monkeypatch, nodes="1:3", workers=1, conf=conf) as stage:
        agents = await stage.start_agents("a", "b", "c")
        three = await stage.becomes("a world of three", lambda run: run.world_size == 3)
        await stage.started(3, three.round)
        lost = agents[2]
        family = [lost.pid, *(child.pid for child in psutil.Process(lost.pid).children(recursive=True))]
        assert len(family) > 2
        killed = time.time()
        lost.told_to_end = True
        for pid in family:
            with suppress(ProcessLookupError):  # the others may already have ended with the agent
                os.kill(pid, signal.SIGKILL)
        two = await stage.becomes(
            "a world of two", lambda run: (run.phase, run.world_size) == (pb.PHASE_FINAL, 2)
        )
        survivors = await stage.started(2, two.round)
        print(f"killed → last survivor runs again {max(it['at'] for it in survivors) - killed:.2f} s")  # noqa: T201
        assert max(it["at"] for it in survivors) - killed < PATIENCE
        assert two.last_round_end.cause == pb.ROUND_END_CAUSE_NODE_LOST
        reason = "node c was lost: its connection broke and it did not come back within 2 s"
        assert two.last_round_end.detail == reason
        assert {node.node_id for node in two.nodes} == {"a", "b"}
        assert {it["environment"]["TORCHELASTIC_RESTART_COUNT"] for it in survivors} == {"0"}
        await stage.start_agents("c")
        three = await stage.becomes("a world of three again", lambda run: run.world_size == 3)
        await stage.started(3, three.round)
        await stage.finish()


async def test_a_rendezvous_service_that_is_killed_stops_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its restart the same workers run in the same round, and no round number is used twice."""
    async with scene(tmp_path, monkeypatch, max_restarts=1) as stage:
        cluster = stage.cluster
        agents = await stage.start_agents("a", "b")
        first = await stage.started(4)

        def status() -> str:
            shown = rallypoint("status", RUN, "--rdzv-endpoint", cluster.rendezvous_endpoint).stdout
            return re.sub(r" \(\w+\)", "", shown)  # how long ago

        before = status()
        assert "FINAL, round 1, 4 workers on 2 nodes" in before
        await cluster.programs["rendezvous"].kill()
        assert all(psutil.pid_exists(it["pid"]) for it in first)
        await cluster.start_rendezvous()
        for agent in agents:
            await agent.log.first("the agent to resume", lambda line: line.event == "resumed")
        assert status() == before
        jobs = [await cluster.get_job(name) for name in ("a", "b")]
        running = [
            worker.pid
            for job in jobs
            for worker in job.workers
            if worker.state == agent_pb.WORKER_STATE_RUNNING
        ]
        assert sorted(running) == sorted(it["pid"] for it in first)
        os.kill(first[0]["pid"], signal.SIGKILL)
        await stage.started(4, round_=2)
        await stage.finish()
        assert {line.fields["round"] for line in cluster.output.items if line.event == "started"} == {1, 2}


async def test_a_host_that_receives_sigterm_leaves_the_others_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM to one of two: it leaves gracefully and reports that, and the other continues in a new round."""
    async with scene(tmp_path, monkeypatch, nodes="1:2", conf={"last_call_timeout": "1"}) as stage:
        goes, stays = await stage.start_agents("a", "b")
        two = await stage.becomes("both to run", lambda run: run.world_size == 4)
        await stage.started(4, two.round)
        goes.told_to_end = True
        goes.signal(signal.SIGTERM)
        assert await goes.ended(PATIENCE) == 128 + signal.SIGTERM
        assert goes.report == "Error: left the run: got SIGTERM"
        one = await stage.becomes(
            "a world of one", lambda run: (run.phase, run.world_size) == (pb.PHASE_FINAL, 2)
        )
        await stage.started(2, one.round)
        assert one.round > two.round
        assert one.last_round_end.detail == "node a left: got SIGTERM"
        assert one.last_round_end.cause == pb.ROUND_END_CAUSE_NODE_LEFT
        assert not one.HasField("run_end")
        assert stays.running
        await stage.finish()
