"""A drain of a host: workers are warned and get a grace period, and no node waits in vain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.job.test_job import Bench
from agent.job.test_job import bench as bench  # noqa: PLC0414  # a fixture
from rallypoint.agent.core import core
from rallypoint.agent.job.drain import Drain, all_saved
from rallypoint.agent.job.result import SUCCEEDED, JobResult
from rallypoint.agent.spawner.protocol import WorkerExit
from rallypoint.agent.workers.group import Worker
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.waiting import PATIENCE, until

WAITS = "touch $1/started.$RANK; while [ ! -e $1/go ]; do sleep 0.02; done"
SAVES = """
    touch $1/started.$RANK
    while [ ! -e $RALLYPOINT_NOTICE ]; do sleep 0.02; done
    cp $RALLYPOINT_NOTICE $1/copy.$RANK
    mv $1/copy.$RANK $1/notice.$RANK
    while [ ! -e $1/save.$RANK ]; do sleep 0.02; done
    echo $RANK > $RALLYPOINT_NOTICE.saved
    sleep 600
"""


def worker(rank: int, exit_code: int | None = None) -> Worker:
    """A worker of this host; without an exit code it runs."""
    ended = None if exit_code is None else WorkerExit(0, 1, exit_code, None, at=0.0, time=0.0)
    return Worker(0, rank, 1, 0.0, ended)


def test_all_have_saved_when_each_that_runs_has_and_the_others_succeeded() -> None:
    """If none runs any more, the last exit determines the result."""
    runs, done, failed = worker(4), worker(5, 0), worker(6, 1)
    assert all_saved([runs], {4})
    assert all_saved([runs, done], {4})
    assert not all_saved([runs, worker(7)], {4})
    assert not all_saved([runs, failed], {4})
    assert not all_saved([done], {5})
    assert not all_saved([], {4})


@pytest.fixture
async def drain(tmp_path: Path) -> AsyncIterator[tuple[Drain, list[core.Event]]]:
    """A drain in a folder of its own, and its events."""
    told: list[core.Event] = []
    drain = Drain(told.append)
    assert drain.set_up(tmp_path) == {"RALLYPOINT_NOTICE": str(tmp_path / "notice")}
    yield drain, told
    drain.close()


async def test_a_second_drain_can_only_hurry(drain: tuple[Drain, list[core.Event]], tmp_path: Path) -> None:
    """Workers that read the notice again find the earlier deadline; the first reason stays."""
    drained, told = drain
    drained.begin(60.0, "maintenance")
    drained.warn(list)
    first = drained.now
    assert first is not None
    drained.begin(90.0, "later")
    assert drained.now == first
    drained.begin(30.0, "sooner")
    assert drained.now is not None
    assert first.monotonic - drained.now.monotonic == pytest.approx(30, abs=10)
    notice = json.loads((tmp_path / "notice").read_text())
    assert (notice["reason"], notice["deadline"]) == ("maintenance", drained.now.monotonic)
    assert told == [core.DrainRequested("drained: maintenance")]
    drained.begin(0.0, "now")
    await until(lambda: len(told) == 2, "the end of the grace")
    assert told[1] == core.DrainOver("the grace period of 0 s has ended")


async def test_repeated_and_invalid_saves_are_not_counted(
    drain: tuple[Drain, list[core.Event]], tmp_path: Path
) -> None:
    """Every process with write access to the folder can write anything."""
    drained, told = drain
    drained.begin(60.0, "maintenance")
    drained.warn(lambda: [worker(0), worker(1)])
    pipe = os.open(tmp_path / "notice.saved", os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(pipe, b"0\n0\nnonsense\n99999999999999999999\n-1\n")
        await asyncio.sleep(0)
        assert not any(isinstance(event, core.DrainOver) for event in told)
        os.write(pipe, b"1\n")
        await until(lambda: len(told) > 1, "the word of the second")
    finally:
        os.close(pipe)
    assert told[1:] == [core.DrainOver("its workers saved their state")]


async def test_workers_that_save_let_their_host_leave_and_the_other_goes_on(bench: Bench) -> None:
    """The notice has the reason and the deadline; the run gets the departure, and no restart is used up."""
    drained = bench.job(SAVES, "a", nodes=(1, 2))
    stays = bench.job(WAITS, "b", nodes=(1, 2))
    running = [bench.start(drained), bench.start(stays)]
    await until(lambda: len(list(bench.folder.glob("started.*"))) == 4, "all workers")
    await until(lambda: len(drained.workers) == 2, "its workers to be known")
    drained.drain(PATIENCE, "maintenance at 10:00")
    assert drained.draining is not None
    assert drained.draining.deadline == pytest.approx(time.time() + PATIENCE, abs=10)
    base = drained.workers[0].rank
    await bench.has(f"notice.{base}")
    notice = json.loads(bench.read(f"notice.{base}"))
    assert notice["reason"] == "maintenance at 10:00"
    assert notice["deadline"] == drained.draining.monotonic
    (bench.folder / f"save.{base}").touch()
    assert not running[0].done()
    (bench.folder / f"save.{base + 1}").touch()
    why = "drained: maintenance at 10:00 (its workers saved their state)"
    assert await asyncio.wait_for(running[0], PATIENCE) == JobResult(143, f"left the run: {why}")
    await until(lambda: stays.state.started == 2, "the round without it")
    assert (await bench.state()).restart_count == 0
    assert (await bench.state()).last_round_end.detail == f"node a left: {why}"
    (bench.folder / "go").touch()
    assert (await asyncio.wait_for(running[1], PATIENCE)).exit_code == SUCCEEDED


async def test_the_end_of_the_last_that_has_not_saved_is_noticed(bench: Bench) -> None:
    """One worker has saved and waits; the other has nothing to save, and ends."""
    script = """
        touch $1/started.$RANK
        while [ ! -e $RALLYPOINT_NOTICE ]; do sleep 0.02; done
        [ $RANK = 0 ] && echo 0 > $RALLYPOINT_NOTICE.saved && touch $1/saved && sleep 600
        while [ ! -e $1/go ]; do sleep 0.02; done
    """
    job = bench.job(script)
    running = bench.start(job)
    await until(lambda: len(job.workers) == 2, "both workers")
    job.drain(PATIENCE, "maintenance")
    await bench.has("saved")
    (bench.folder / "go").touch()
    result = await asyncio.wait_for(running, PATIENCE)
    assert result.detail == "left the run: drained: maintenance (its workers saved their state)"


async def test_workers_that_never_answer_have_their_time_and_no_more(bench: Bench) -> None:
    """They don't read the notice."""
    job = bench.job(WAITS)
    running = bench.start(job)
    await bench.has("started.1")
    began = time.monotonic()
    job.drain(0.3, "maintenance")
    result = await asyncio.wait_for(running, PATIENCE)
    assert result == JobResult(
        143, "left the run: drained: maintenance (the grace period of 0.3 s has ended)"
    )
    assert time.monotonic() - began >= 0.3


async def test_workers_that_finish_within_their_time_have_succeeded(bench: Bench) -> None:
    """On the only host, that is the run's success."""
    job = bench.job(WAITS)
    running = bench.start(job)
    await bench.has("started.1")
    job.drain(None, "maintenance")
    (bench.folder / "go").touch()
    result = await asyncio.wait_for(running, PATIENCE)
    assert result.exit_code == SUCCEEDED
    assert (await bench.state()).run_end.outcome == pb.OUTCOME_SUCCEEDED


async def test_a_host_whose_workers_finished_does_not_wait_for_those_of_others(bench: Bench) -> None:
    """The others' round goes on unchanged, and their success is the run's."""
    settings = pb.RunSettings(min_nodes=2, max_nodes=2)
    done = bench.job("touch $1/done; exit 0", "a", settings=settings)
    waits = bench.job(WAITS, "b", settings=settings)
    running = [bench.start(done), bench.start(waits)]
    await until(lambda: bool(done.state.succeeded), "the first host's success")
    assert not running[0].done()
    done.drain(60.0, "maintenance")
    result = await asyncio.wait_for(running[0], PATIENCE)
    assert result == JobResult(
        SUCCEEDED, "the workers here succeeded; this host left afterwards: drained: maintenance"
    )
    assert not running[1].done()
    (bench.folder / "go").touch()
    assert await asyncio.wait_for(running[1], PATIENCE) == JobResult(
        SUCCEEDED, "all 4 workers of round 1 succeeded"
    )


async def test_workers_that_catch_the_signal_get_it(bench: Bench) -> None:
    """The others do not get it: it would kill them."""
    # The worker without a handler starts no program while it waits: at that moment a shell blocks all signals.
    script = """
        [ $LOCAL_RANK = 1 ] && : > $1/started.$RANK && read line < $1/pipe && exit 0
        trap 'touch $1/warned' USR1
        : > $1/started.$RANK
        while [ ! -e $1/go ]; do sleep 0.02; done
    """
    os.mkfifo(bench.folder / "pipe")
    job = bench.job(script, warn_signal=signal.SIGUSR1)
    running = bench.start(job)
    await bench.has("started.0")
    await bench.has("started.1")
    await until(lambda: len(job.workers) == 2, "both workers to be known")
    job.drain(PATIENCE, "maintenance")
    await bench.has("warned")
    (bench.folder / "go").touch()
    pipe = os.open(bench.folder / "pipe", os.O_RDWR)
    os.write(pipe, b"go\n")
    assert (await asyncio.wait_for(running, PATIENCE)).exit_code == SUCCEEDED
    os.close(pipe)


async def test_a_worker_that_fails_meanwhile_uses_up_no_restart(bench: Bench) -> None:
    """The run is not closed as failed, although no restart is allowed."""
    job = bench.job("touch $1/started.$RANK; while [ ! -e $1/go ]; do sleep 0.02; done; exit 5")
    running = bench.start(job)
    await bench.has("started.1")
    job.drain(PATIENCE, "maintenance")
    await until(lambda: job.state.draining is not None, "the core to hear of it")
    (bench.folder / "go").touch()
    result = await asyncio.wait_for(running, PATIENCE)
    assert (result.exit_code, "(one of its workers failed meanwhile)" in result.detail) == (143, True)
    assert (await bench.state()).phase == pb.PHASE_JOINABLE


async def test_sigterm_while_draining_leaves_now(bench: Bench) -> None:
    """A sender of SIGTERM does not wait for the grace period."""
    job = bench.job(WAITS)
    running = bench.start(job)
    await bench.has("started.1")
    job.drain(PATIENCE, "maintenance")
    job.request_stop("got SIGTERM")
    assert await asyncio.wait_for(running, PATIENCE) == JobResult(143, "left the run: got SIGTERM")
    job.drain(1.0, "too late")


async def test_a_host_that_waits_for_others_leaves_at_once(bench: Bench) -> None:
    """It has no worker to warn, and would take part in a round only to leave it."""
    job = bench.job("exit 0", nodes=(2, 2))
    running = bench.start(job)
    await until(lambda: hasattr(job, "_membership") and bool(job._membership.lease), "it to be in")
    job.drain(PATIENCE, "maintenance")
    assert await asyncio.wait_for(running, PATIENCE) == JobResult(143, "left the run: drained: maintenance")


async def test_a_job_may_be_drained_before_it_has_begun(bench: Bench) -> None:
    """A daemon has accepted the job, and is drained."""
    job = bench.job("exit 0", nodes=(2, 2))
    job.drain(PATIENCE, "maintenance")
    assert (await bench.run(job)).exit_code == 143
