"""A host with a worker that can't be killed reports that and leaves; the others continue without it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from integration.scene import Scene, scene
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.waiting import PATIENCE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may freeze a file system"),
]

WORKER = Path(__file__).with_name("hanging_worker.py")


async def succeeds(command: str) -> bool:
    """Run a shell command; return True if it succeeds."""
    process = await asyncio.create_subprocess_shell(command, stderr=asyncio.subprocess.DEVNULL)
    return await asyncio.wait_for(process.wait(), PATIENCE) == 0


@asynccontextmanager
async def disk_to_freeze(folder: Path) -> AsyncIterator[Path]:
    """Mount a file system of its own; thaw and unmount it afterwards."""
    disk, image = folder / "disk", folder / "disk.img"
    disk.mkdir()
    if not await succeeds(f"truncate -s 16M {image} && mkfs.ext4 -q {image} && mount -o loop {image} {disk}"):
        pytest.skip("this machine lets nobody mount a file system of his own")
    try:
        yield disk
    finally:
        await succeeds(f"fsfreeze -u {disk}")
        # Lazily: the frozen worker dies only now, and still has a file open there.
        await succeeds(f"umount --lazy {disk}")


async def test_uninterruptible_sleep_makes_a_host_unhealthy_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a frozen file system, and SIGKILL has no effect: its host reports that, and ends with 3."""
    conf = {"last_call_timeout": "15"}
    async with scene(tmp_path, monkeypatch, nodes="1:2", workers=1, max_restarts=1, conf=conf) as stage:
        async with disk_to_freeze(tmp_path) as disk:
            stage.job = replace(stage.job, command=(str(WORKER), str(tmp_path), "disk", "1", "0.5"))
            await stage.start_agents("a", "b")
            (opened,) = await stage.said("opened", 1)
            assert await succeeds(f"fsfreeze -f {disk}")
            (tmp_path / "frozen").touch()
            workers = (await stage.cluster.get_job("a")).workers
            fit, unfit = ("b", "a") if workers[0].pid == opened["pid"] else ("a", "b")
            assert await stage.cluster.programs[unfit].ended(2 * PATIENCE) == 3
            os.kill(opened["pid"], 0)  # it is alive
            # A round of both hosts may have been formed before the other one received the report.
            run = await stage.becomes(
                "a round without it", lambda run: run.round > 1 and run.phase == pb.PHASE_FINAL
            )
            assert run.world_size == 1
            await stage.started(1, round_=run.round)
            told = stage.report(unfit)
            reason = f"process of workers outlived SIGKILL: {opened['pid']} (python"
            assert f"Error: this host is not fit to run workers: {reason}" in told
            assert "it did not leave 'step' within 0.5 s (found " in told
            assert "it is in uninterruptible sleep" in told
            assert f"system call write of {disk}/checkpoint" in told
            assert starts(stage, unfit) == 1
        (tmp_path / "finish").touch()
        assert await stage.cluster.programs[fit].ended(PATIENCE) == 0


def starts(stage: Scene, name: str) -> int:
    """Return the number of worker groups that an agent has started."""
    return sum(line.event == "starting workers" for line in stage.cluster.programs[name].log.items)


async def test_a_stuck_worker_is_detected_after_the_time_in_torchs_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no timer, and would hang forever: after the variable's time its host leaves, and the others continue."""
    conf = {"last_call_timeout": "15"}
    async with scene(tmp_path, monkeypatch, nodes="1:2", workers=1, conf=conf) as stage:
        # A cluster passes none of torch's variables on: they may belong to a job that runs the tests.
        stage.cluster._environment["TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"] = "1"
        async with disk_to_freeze(tmp_path) as disk:
            order = (str(WORKER), str(tmp_path), "disk", "1", "0.5", "unguarded")
            stage.job = replace(stage.job, command=order)
            await stage.start_agents("a", "b")
            (opened,) = await stage.said("opened", 1)
            assert await succeeds(f"fsfreeze -f {disk}")
            (tmp_path / "frozen").touch()
            workers = (await stage.cluster.get_job("a")).workers
            fit, unfit = ("b", "a") if workers[0].pid == opened["pid"] else ("a", "b")
            assert await stage.cluster.programs[unfit].ended(2 * PATIENCE) == 3
            run = await stage.becomes(
                "a round without it", lambda run: run.round > 1 and run.phase == pb.PHASE_FINAL
            )
            assert (run.world_size, run.restart_count) == (1, 0)
            who = f"worker of rank 1 (process {opened['pid']}) has been in uninterruptible sleep for 1 s"
            assert f"Error: this host is not fit to run workers: {who}: it " in stage.report(unfit)
            await stage.started(1, round_=run.round)
        (tmp_path / "finish").touch()
        assert await stage.cluster.programs[fit].ended(PATIENCE) == 0
