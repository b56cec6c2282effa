"""Workers that are forks of the spawner are started, watched, distinguished and killed as programs are."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent.forked_work import work
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import SpawnError, WorkerExit, WorkerSpec
from rallypoint.agent.spawner.spawner import descendants, read_process
from rallypoint.agent.spawner.start import start_forkserver
from rallypoint.agent.workers.processes import WorkerProcesses
from rallypoint.worker.call import load_results, save_call
from support.spawning import spawn_one
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.integration


def spec(folder: Path, local_rank: int = 0, **more: Any) -> WorkerSpec:
    environment = {
        "PATH": os.environ["PATH"],
        "LOCAL_RANK": str(local_rank),
        "RANK": str(local_rank),
        "RALLYPOINT_ROUND": "1",
    }
    return WorkerSpec(local_rank, ["work"], environment, call=True, stdout=folder / "out", **more)


@pytest.fixture
async def how(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Spawner]:
    """A spawner whose workers run the behaviour that the test's parameter names."""
    save_call(tmp_path, work, [str(tmp_path), request.param])
    async with Spawner(start_forkserver(tmp_path)) as spawner:
        yield spawner


async def end_of(spawner: Spawner, spec: WorkerSpec) -> WorkerExit:
    exits: list[WorkerExit] = []
    worker = spawner.submit([spec], exits.append)
    await spawner.wait_started(worker)
    await until(lambda: bool(exits), "the worker's end")
    return exits[0]


@pytest.mark.parametrize("how", ["describe"], indirect=True)
async def test_a_fork_has_what_a_program_would_have(how: Spawner, tmp_path: Path) -> None:
    """Its own environment, session, signal handlers and streams; the only other descriptor is the lock of its call."""
    (tmp_path / "there").mkdir()
    ended = await end_of(how, spec(tmp_path, cwd=tmp_path / "there"))
    assert ended.succeeded
    found = load_results(tmp_path, [0])[0]
    own = {"PATH", "LOCAL_RANK", "RANK", "RALLYPOINT_ROUND", "RALLYPOINT_SPAWN_ID"}
    assert set(found["environment"]) == own
    assert found["shown"] == f"RALLYPOINT_SPAWN_ID={how.pid}.1"
    assert found["descriptors"] == ["0", "1", "2", str(tmp_path / "running")]
    assert found["leader"]
    assert found["interrupt"]
    assert found["cwd"] == str(tmp_path / "there")
    assert (tmp_path / "out").read_text() == "printed\n"


@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("raise", 1)], indirect=["how"])
async def test_the_end_of_a_fork_is_its_own(how: Spawner, code: int, tmp_path: Path) -> None:
    """Its exit code is reported, it has no result, and the next worker is a new process."""
    for _ in range(2):
        assert (await end_of(how, spec(tmp_path))).exit_code == code
    assert not (tmp_path / "1.0").exists()


@pytest.mark.parametrize("how", ["linger"], indirect=True)
async def test_a_daemon_of_a_fork_dies_with_it_and_no_neighbours(how: Spawner, tmp_path: Path) -> None:
    """Without exec a daemon shows its spawner's environment, except for the mark that identifies its worker."""
    workers = how.submit([spec(tmp_path, 0), spec(tmp_path, 1)], lambda how: None)
    await how.wait_started(workers)
    names = ["main.0", "daemon.0", "main.1", "daemon.1"]
    await until(lambda: all((tmp_path / name).exists() for name in names), "both workers and their daemons")
    pids = {name: int((tmp_path / name).read_text()) for name in names}
    killed = await how.kill(workers[0])
    assert (killed.count, killed.left) == (2, ())
    # A dead process may not be reaped yet.
    found = {name: read_process(pids[name]) for name in names}
    assert [name for name, process in found.items() if process and not process.dead] == ["main.1", "daemon.1"]
    swept = await how.sweep()
    assert swept.left == ()
    assert read_process(pids["daemon.1"]) is None


async def test_a_failed_load_is_reported_for_each_worker(tmp_path: Path) -> None:
    """A call whose module does not exist is a failure to start, with the reason."""
    (tmp_path / "call").write_bytes(pickle.dumps({}) + b"cno_such_module\nwork\n.")
    async with Spawner(start_forkserver(tmp_path)) as spawner:
        for local_rank in range(2):
            with pytest.raises(
                SpawnError, match="cannot load the function that it calls: ModuleNotFoundError: No module"
            ):
                await spawn_one(spawner, spec(tmp_path, local_rank), lambda how: None)


async def test_a_stop_does_not_wait_for_imports(tmp_path: Path) -> None:
    """Loading the function may take minutes; a stop meanwhile ends the workers at once, and reports no exits."""
    (tmp_path / "call").write_bytes(pickle.dumps({}) + b"ctime\nsleep\n(I3600\ntR.")
    async with Spawner(start_forkserver(tmp_path)) as spawner:
        exits: list[WorkerExit] = []
        group = WorkerProcesses(spawner, exits.append)
        starting = asyncio.create_task(group.start([spec(tmp_path)]))
        await until(lambda: spawner.pid is None and bool(descendants(os.getpid())), "the spawner's process")
        await asyncio.sleep(0)
        report = await group.stop(signal.SIGTERM, 1800.0)
        assert report.left == ()
        with pytest.raises(SpawnError, match="died before it was started"):
            await starting
        assert exits == []
        assert spawner.dead


async def test_a_spawner_of_programs_makes_no_calls(tmp_path: Path) -> None:
    """Such a request is refused with the reason."""
    async with Spawner.start() as spawner:
        with pytest.raises(SpawnError, match="this spawner starts programs only"):
            await spawn_one(spawner, spec(tmp_path), lambda how: None)


def test_a_fork_of_this_process_calls_what_it_has(tmp_path: Path) -> None:
    """Nothing is pickled: a closure works, and its globals are as they were at the fork."""
    program = """
import asyncio, os
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.start import fork_spawner
from rallypoint.agent.spawner.protocol import SpawnError, WorkerSpec

secret = object()
state = "before"

def call():
    os.write(1, f"{state} {secret is kept}\\n".encode())
    return 5

kept = secret
process = fork_spawner(call)
state = "after"

async def main():
    over = asyncio.Event()
    async with Spawner(process) as spawner:
        spawner.submit([WorkerSpec(0, ["call"], {}, call=True)], lambda how: (print(how.exit_code), over.set()))
        await over.wait()
    try:
        spawner.renew()
    except SpawnError as error:
        print(error)

asyncio.run(main())
"""
    ran = subprocess.run(
        [sys.executable, "-u", "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert ran.stderr == ""
    first, second, third = ran.stdout.splitlines()
    assert (first, second) == ("before True", "5")
    assert "a fork of the launching process at its start" in third
