"""Workers run with the requested limits, processors and signals, as the workers themselves report."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import OPEN_FILES, SpawnError, WorkerExit, WorkerSpec
from rallypoint.agent.workers.processes import WorkerProcesses
from support.spawning import spawn_one
from support.waiting import PATIENCE, until

ENVIRONMENT = {"PATH": os.environ["PATH"]}


@pytest.fixture
async def spawner() -> AsyncIterator[Spawner]:
    async with Spawner.start() as spawner:
        yield spawner


async def output_of(spawner: Spawner, spec: WorkerSpec) -> str:
    """Run a worker to its end; return its output."""
    assert spec.stdout is not None
    exits: list[WorkerExit] = []
    await spawn_one(spawner, spec, exits.append)
    await until(lambda: bool(exits), "the worker's end")
    assert exits[0].succeeded
    return spec.stdout.read_text()


async def test_a_worker_has_its_limits_and_the_agent_keeps_its_own(spawner: Spawner, tmp_path: Path) -> None:
    """Soft and hard, -1 for no limit; a limit that is not set is the one that the agent was started with."""
    program = "import resource as r; print([r.getrlimit(n) for n in (r.RLIMIT_CORE, r.RLIMIT_NOFILE, r.RLIMIT_CPU)])"
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = {"core": (0, 0), "cpu": (-1, -1)}
    spec = WorkerSpec(
        0, [sys.executable, "-c", program], ENVIRONMENT, stdout=tmp_path / "out", rlimits=limits
    )
    assert await output_of(spawner, spec) == f"[(0, 0), {OPEN_FILES}, (-1, -1)]\n"
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


AGENT = """
import asyncio, os, resource
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import WorkerSpec
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.serving.server import Server

async def main():
    started = [Spawner.start()]
    server = Server(ServerOptions(), services=[])
    await server.start()
    print(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
    for spawner in (*started, Spawner.start()):
        for limits in ({}, {"nofile": (40, 50)}):
            ended = asyncio.Event()
            command = ["sh", "-c", "echo $(ulimit -Sn; ulimit -Hn)"]
            spawner.submit([WorkerSpec(0, command, os.environ, rlimits=limits)], lambda _: ended.set())
            await ended.wait()
        await spawner.close()
    await server.stop()

asyncio.run(main())
"""


def test_workers_have_the_limit_of_open_files_that_the_agent_began_with() -> None:
    """The agent serves with the hard limit; workers of earlier and later spawners have the agent's initial limit."""
    command = f'ulimit -Sn 512; ulimit -Hn 5000; exec {sys.executable} -c "$0"'
    shown = subprocess.run(
        ["sh", "-c", command, AGENT], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert shown.stdout.splitlines() == ["(5000, 5000)", *["512 5000", "40 50"] * 2]


async def test_few_descriptors_are_no_trouble_for_the_start(spawner: Spawner, tmp_path: Path) -> None:
    """Limits apply from exec on: the steps before it need more descriptors than the worker."""
    spec = WorkerSpec(
        0, ["sh", "-c", "ulimit -n"], ENVIRONMENT, stdout=tmp_path / "out", rlimits={"nofile": (5, 5)}
    )
    assert await output_of(spawner, spec) == "5\n"


async def test_a_limit_that_can_not_be_set_is_reported(spawner: Spawner) -> None:
    """The failure to start is one line: which limit, and a remedy."""
    most = (1 << 40, 1 << 40)  # more than fs.nr_open allows, also for root
    spec = WorkerSpec(4, ["true"], ENVIRONMENT, rlimits={"nofile": most})
    with pytest.raises(SpawnError) as caught:
        await spawn_one(spawner, spec, lambda how: None)
    found = (
        rf"^cannot start worker 4: cannot set its limit nofile to {most[0]}:{most[1]} \(.*hard limit is \d+\)"
    )
    assert re.match(found, str(caught.value))
    assert "raise the agent's own (ulimit -H)" in str(caught.value)


async def test_a_worker_runs_where_it_is_bound_and_so_do_its_threads(
    spawner: Spawner, tmp_path: Path
) -> None:
    """The mask is set before the program's first instruction; other workers have the agent's."""
    chosen = frozenset({max(os.sched_getaffinity(0))})
    program = """
import os, threading
masks = [os.sched_getaffinity(0)]
thread = threading.Thread(target=lambda: masks.append(os.sched_getaffinity(0)))
thread.start()
thread.join()
print(masks)
"""
    argv = [sys.executable, "-c", program]
    bound = WorkerSpec(0, argv, ENVIRONMENT, stdout=tmp_path / "bound", cpus=chosen)
    free = WorkerSpec(1, argv, ENVIRONMENT, stdout=tmp_path / "free")
    assert await output_of(spawner, bound) == f"{[set(chosen)] * 2}\n"
    assert await output_of(spawner, free) == f"{[os.sched_getaffinity(0)] * 2}\n"


async def test_missing_processors_are_reported(spawner: Spawner) -> None:
    """The failure to start is one line."""
    spec = WorkerSpec(0, ["true"], ENVIRONMENT, cpus=frozenset({4000, 4001, 4003}))
    with pytest.raises(
        SpawnError, match=r"cannot bind it to the processors 4000-4001,4003 \(Invalid argument\)"
    ):
        await spawn_one(spawner, spec, lambda how: None)


async def test_a_signal_goes_only_to_the_chosen_workers(spawner: Spawner, tmp_path: Path) -> None:
    """Only the chosen workers of a group get it."""
    program = f"""
import signal, os, pathlib, time
rank = os.environ["LOCAL_RANK"]
signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path("{tmp_path}", f"heard.{{rank}}").touch())
pathlib.Path("{tmp_path}", f"ready.{{rank}}").touch()
while True:
    time.sleep(0.01)  # not pause(): the handler may have its turn before it
"""
    group = WorkerProcesses(spawner, lambda how: None)
    argv = [sys.executable, "-c", program]
    await group.start([WorkerSpec(rank, argv, {**ENVIRONMENT, "LOCAL_RANK": str(rank)}) for rank in range(2)])
    try:
        await until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "both workers")
        group.send_signal(signal.SIGUSR1, only=[1])
        await until((tmp_path / "heard.1").exists, "the signal")
        await asyncio.sleep(0)
        assert not (tmp_path / "heard.0").exists()
    finally:
        await group.stop(signal.SIGKILL, 0.0)
