"""Hosts that are drained, or are unhealthy, leave a job that continues: real processes, from the command line."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT, clean_environment
from integration.scene import Scene, scene
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("leaving_worker.py")


def with_flags(stage: Scene, *flags: str, worker: Path = WORKER) -> None:
    """Let agents that start from now on have these flags, and a worker that saves."""
    stage.job = replace(stage.job, command=(*flags, str(worker), str(stage.folder)))


async def drain(stage: Scene, name: str, *arguments: str) -> str:
    """Drain an agent's host as an operator does; return the output of the command."""
    ready = await stage.cluster.programs[name].log.first(
        f"{name} to be ready", lambda line: line.event == "supervisor ready"
    )
    command = [str(RALLYPOINT), "agent", "drain", "--agent", str(ready.fields["supervisor"]), *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, env=clean_environment(), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 0
    return said.decode()


async def goes_on_without(stage: Scene, name: str, other: str, exit_code: int) -> pb.Run:
    """Wait until one agent has ended with `exit_code`, and the other's workers run in a round of their own."""
    assert await stage.cluster.programs[name].ended(PATIENCE) == exit_code, stage.report(name)
    run = await stage.becomes("a round without it", lambda run: run.round > 1 and run.phase == pb.PHASE_FINAL)
    assert run.world_size == 2
    await stage.started(2, round_=run.round)
    (stage.folder / "finish").touch()
    assert await stage.cluster.programs[other].ended(PATIENCE) == 0, stage.report(other)
    return run


@pytest.mark.slow
async def test_a_drained_host_leaves_once_its_workers_have_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves long before the end of its grace; only its own workers are notified, and no restart is used."""
    async with scene(tmp_path, monkeypatch, nodes="1:2", conf={"last_call_timeout": "5"}) as stage:
        with_flags(stage)
        await stage.start_agents("a", "b")
        await stage.started(4)
        ours = {worker.rank for worker in (await stage.cluster.get_job("a")).workers}
        said = await drain(stage, "a", "--grace", "600", "--reason", "rack 7 is serviced")
        assert "its workers are warned" in said
        saved = await stage.said("saved", 2)
        assert {fields["rank"] for fields in saved} == ours
        assert all(fields["reason"] == "rack 7 is serviced" for fields in saved)
        assert all(0 < fields["seconds_left"] <= 600 for fields in saved)
        run = await goes_on_without(stage, "a", "b", exit_code=143)
        assert run.restart_count == 0
        assert "drained: rack 7 is serviced (its workers saved their state)" in run.last_round_end.detail
        assert "Error: left the run: drained: rack 7 is serviced" in stage.report("a")


@pytest.mark.slow
async def test_an_announced_maintenance_does_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of the operator announces the maintenance; no request to the agent is needed."""
    async with scene(tmp_path, monkeypatch, nodes="1:2", conf={"last_call_timeout": "15"}) as stage:
        watch = tmp_path / "watch"
        watch.write_text(f"#!/bin/sh\nwhile [ ! -e {tmp_path}/$1 ]; do sleep 0.05; done; echo TERMINATE\n")
        watch.chmod(0o755)
        with_flags(stage, "--maintenance-command", f"{watch} never")
        await stage.start_agents("b")
        with_flags(stage, "--maintenance-command", f"{watch} announced", "--drain-timeout", "600")
        await stage.start_agents("a")
        await stage.started(4)
        (tmp_path / "announced").touch()
        assert len(await stage.said("saved", 2)) == 2
        run = await goes_on_without(stage, "a", "b", exit_code=143)
        assert "drained: TERMINATE" in run.last_round_end.detail


@pytest.mark.slow
async def test_a_host_that_turns_sick_leaves_when_a_worker_of_it_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure uses the job's one restart; the unhealthy host's agent ends with 3, and the other continues."""
    conf = {"last_call_timeout": "15"}
    async with scene(tmp_path, monkeypatch, nodes="1:2", max_restarts=1, conf=conf) as stage:
        with_flags(stage)
        await stage.start_agents("b")
        check = f"command:sh -c '[ ! -e {tmp_path}/sick ] || {{ echo fan 3 stands still; exit 1; }}'"
        with_flags(stage, "--health-check", "disk:0%", "--health-check", check)
        await stage.start_agents("a")
        await stage.started(4)
        (tmp_path / "sick").touch()
        (worker, _) = (await stage.cluster.get_job("a")).workers
        os.kill(worker.pid, 9)
        run = await goes_on_without(stage, "a", "b", exit_code=3)
        assert run.restart_count == 1
        assert f"this host is not fit to run workers: {check}: fan 3 stands still" in stage.report("a")


@pytest.mark.slow
async def test_the_watch_for_maintenance_dies_with_a_killed_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its child processes die too, even in another session."""
    async with scene(tmp_path, monkeypatch, nodes="1", workers=1) as stage:
        script = (
            f"setsid sh -c 'echo $$ > {tmp_path}/child; sleep 600' & echo $$ > {tmp_path}/watch; sleep 600"
        )
        (tmp_path / "script").write_text(script)
        with_flags(stage, "--maintenance-command", f"sh {tmp_path}/script")
        (agent,) = await stage.start_agents("a")
        pids: list[Path] = []
        for name in ("watch", "child"):
            file = tmp_path / name
            await until(lambda file=file: file.exists() and bool(file.read_text().strip()), name)  # type: ignore[misc]
            pids.append(Path("/proc") / file.read_text().strip())
        await agent.kill()
        await until(lambda: not any(pid.exists() for pid in pids), "the end of both")
