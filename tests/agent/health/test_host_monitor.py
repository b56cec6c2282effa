"""A job leaves an unhealthy host, is drained before an announced maintenance, and no helper process outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.job.test_job import Bench
from agent.job.test_job import bench as bench  # noqa: PLC0414  # a fixture
from rallypoint.agent.config.job import Peer
from rallypoint.agent.job.result import SUCCEEDED, UNFIT
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.endpoint import SettingError
from support.waiting import PATIENCE, until


@pytest.fixture
def check(bench: Bench) -> Callable[[str], tuple[str, ...]]:
    """A function that makes a check of a shell script, which runs in the test's folder."""

    def make(script: str) -> tuple[str, ...]:
        path = bench.folder / "check"
        path.write_text(f"#!/bin/sh\ncd {bench.folder}\n{script}\n")
        path.chmod(0o755)
        return (f"command:{path}",)

    return make


async def test_a_sick_host_leaves_before_anything_is_started(
    bench: Bench, check: Callable[[str], tuple[str, ...]]
) -> None:
    """The run gets the reason, and forms its round without this host."""
    sick = bench.job("touch $1/ran", "a", nodes=(1, 2), health_checks=check("echo fan broken; exit 1"))
    result = await bench.run(sick)
    assert result.exit_code == UNFIT
    path = bench.folder / "check"
    assert f"this host is not fit to run workers: command:{path}: fan broken (exit code 1)" in result.detail
    assert not (bench.folder / "ran").exists()
    assert (await bench.run(bench.job("exit 0", "b", nodes=(1, 2)))).exit_code == SUCCEEDED


async def test_a_host_on_which_a_worker_failed_is_checked_before_it_goes_on(
    bench: Bench, check: Callable[[str], tuple[str, ...]]
) -> None:
    """A healthy host takes part in the next round; an unhealthy one leaves it to the others."""
    script = "echo x >> looks; [ ! -e sick ]"
    fails = "[ $RALLYPOINT_ROUND = 1 ] && [ $RANK = 0 ] && exit 1; touch $1/up.$RALLYPOINT_ROUND; sleep 600"
    job = bench.job(fails, restarts=5, health_checks=check(script))
    running = bench.start(job)
    await bench.has("up.2")
    assert bench.read("looks") == "x\nx\n"
    (bench.folder / "sick").touch()
    await until(lambda: len(job.workers) == 2, "both workers to be known")
    os.kill(job.workers[0].pid, signal.SIGKILL)
    assert (await asyncio.wait_for(running, PATIENCE)).exit_code == UNFIT
    assert (await bench.state()).phase == pb.PHASE_JOINABLE


async def test_a_stop_request_does_not_wait_for_a_check(
    bench: Bench, check: Callable[[str], tuple[str, ...]]
) -> None:
    """The check does not outlive the job (the bench checks that)."""
    settings = pb.RunSettings(min_nodes=1, max_nodes=1)
    settings.confirm_timeout.FromSeconds(900)
    checks = check("touch looking; sleep 600")
    job = bench.job("exit 0", settings=settings, health_checks=checks, health_timeout=500.0)
    running = bench.start(job)
    await bench.has("looking")
    job.request_stop("got SIGTERM")
    assert (await asyncio.wait_for(running, PATIENCE)).exit_code == 143


async def test_an_announced_maintenance_drains_the_host(bench: Bench) -> None:
    """The program's first line is the reason, and workers read it."""
    script = """
        touch $1/started.$RANK
        while [ ! -e $RALLYPOINT_NOTICE ]; do sleep 0.02; done
        echo $RANK > $RALLYPOINT_NOTICE.saved
        sleep 600
    """
    watch = ("sh", "-c", f"while [ ! -e {bench.folder}/announced ]; do sleep 0.02; done; echo TERMINATE")
    job = bench.job(script, maintenance_command=watch)
    running = bench.start(job)
    await bench.has("started.1")
    assert job.draining is None
    (bench.folder / "announced").touch()
    result = await asyncio.wait_for(running, PATIENCE)
    assert result.detail == "left the run: drained: TERMINATE (its workers saved their state)"


async def test_the_watch_for_maintenance_survives_a_round_and_not_the_job(bench: Bench) -> None:
    """The sweep that ends a round's workers spares it."""
    watch = ("sh", "-c", f"echo $$ >> {bench.folder}/watch; sleep 600; exit 1")
    fails = """
        while [ ! -s $1/watch ]; do sleep 0.02; done
        [ $RALLYPOINT_ROUND = 1 ] && exit 1
        touch $1/again
        while [ ! -e $1/go ]; do sleep 0.02; done
    """
    job = bench.job(fails, restarts=1, maintenance_command=watch)
    running = bench.start(job)
    await bench.has("again")
    (pid,) = (int(line) for line in bench.read("watch").split())
    os.kill(pid, 0)
    (bench.folder / "go").touch()
    assert (await asyncio.wait_for(running, PATIENCE)).exit_code == SUCCEEDED
    await until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the watch")


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"health_checks": ("dsk:2%",)}, "there is no health check 'dsk:2%'"),
        (
            {"health_checks": ("disk:0%",), "health_timeout": 60.0},
            "is not below the run's confirm_timeout of 60 s",
        ),
        ({"maintenance_command": ("/none",)}, "the maintenance command can't be run: '/none' does not exist"),
        (
            {"environment": {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "soon"}},
            "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT='soon' is not a number",
        ),
    ],
)
async def test_an_unusable_setting_is_an_error_before_the_job_joins(
    bench: Bench, more: dict[str, Any], error: str
) -> None:
    """An unchecked host is worse than no host if its user believes that it is checked."""
    job = bench.job("exit 0", rendezvous=Peer("127.0.0.1:1"), **more)
    with pytest.raises(SettingError, match=error):
        await bench.run(job)
