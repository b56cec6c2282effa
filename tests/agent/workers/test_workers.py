"""The workers of a round start together or not at all, and a stop leaves no process, even if workers resist."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import SpawnError, WorkerExit, WorkerSpec
from rallypoint.agent.workers.processes import WorkerProcesses
from support.processes import all_there, fresh_marker, gone, living, stubborn
from support.waiting import PATIENCE, until

SLEEPERS = [WorkerSpec(rank, ["sleep", "60"], {"PATH": os.environ["PATH"]}) for rank in range(4)]


@pytest.fixture
async def spawner() -> AsyncIterator[Spawner]:
    async with Spawner.start() as spawner:
        yield spawner


def python(program: str, local_rank: int = 0, *arguments: str) -> WorkerSpec:
    environment = {**os.environ, "LOCAL_RANK": str(local_rank)}
    return WorkerSpec(local_rank, [sys.executable, "-c", program, *arguments], environment)


IGNORES_SIGTERM = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler misses one that comes just before a pause
open(sys.argv[1], "w").close()
while True:
    signal.pause()
"""


async def test_a_killed_worker_is_reported_at_once_and_the_rest_stopped(spawner: Spawner) -> None:
    """After SIGKILL of one of four its exit arrives; the stop ends the others by the signal, and kills none."""
    exits: list[WorkerExit] = []
    group = WorkerProcesses(spawner, exits.append)
    await group.start(SLEEPERS)
    pids = group.pids
    assert sorted(pids) == [0, 1, 2, 3]
    os.kill(pids[2], signal.SIGKILL)
    await until(lambda: bool(exits), "the worker's end")
    assert [(how.local_rank, how.pid, how.signal, how.during_stop) for how in exits] == [
        (2, pids[2], signal.SIGKILL, False)
    ]
    assert sorted(group.pids) == [0, 1, 3]
    report = await group.stop()
    assert (report.killed, report.left) == ((), ())
    assert [(how.signal, how.during_stop) for how in exits[1:]] == [(signal.SIGTERM, True)] * 3
    assert group.pids == {}


async def test_stubborn_workers_are_killed_at_the_timeout(spawner: Spawner, tmp_path: Path) -> None:
    """Workers and descendants that ignore SIGTERM are gone when stop returns, and the report names the workers."""
    with fresh_marker() as marker:
        exits: list[WorkerExit] = []
        group = WorkerProcesses(spawner, exits.append)
        specs = [
            WorkerSpec(rank, stubborn(marker, tmp_path), {**os.environ, "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
        await group.start([*specs, WorkerSpec(2, ["sleep", "60"], dict(os.environ))])
        await until(lambda: all_there(tmp_path, 2), "all parts of the stubborn workers")
        began = time.monotonic()
        report = await group.stop(timeout=0.3)
        assert gone(marker)
        assert time.monotonic() - began >= 0.3
        assert report.killed == (0, 1)
        assert report.left == ()
        ended = {how.local_rank: how.signal for how in exits}
        assert ended == {0: signal.SIGKILL, 1: signal.SIGKILL, 2: signal.SIGTERM}


async def test_a_kill_of_a_worker_ends_its_tree_and_no_other(spawner: Spawner, tmp_path: Path) -> None:
    """The watchdog's kill ends one worker with children and daemons; its neighbour's tree is untouched."""
    folders = [tmp_path / "0", tmp_path / "1"]
    with fresh_marker() as marker, fresh_marker() as neighbour:
        exits: list[WorkerExit] = []
        group = WorkerProcesses(spawner, exits.append)
        specs = []
        for rank, whose in enumerate((marker, neighbour)):
            folders[rank].mkdir()
            command = stubborn(whose, folders[rank])
            specs.append(WorkerSpec(rank, command, {**os.environ, "LOCAL_RANK": "0"}))
        await group.start(specs)
        await until(lambda: all(all_there(folder, 1) for folder in folders), "both trees")
        killed = await group.kill_worker(0)
        assert killed.left == ()
        assert [how.local_rank for how in exits] == [0]
        # The one that emptied its environment and left its session can't be distinguished from the neighbour's.
        assert len(living(marker)) <= 1
        assert len(living(neighbour)) >= 5
        await group.stop(timeout=0.0)
        assert gone(marker)
        assert gone(neighbour)


async def test_members_of_the_workers_group_are_given_time(spawner: Spawner, tmp_path: Path) -> None:
    """Example: a worker is a shell around the trainer. The trainer may finish its checkpoint after the shell's end."""
    checkpoint = tmp_path / "checkpoint"
    trainer = """
import signal, sys, time, os
def save(*_):
    while os.getppid() != int(sys.argv[2]): time.sleep(0.01)   # until the shell is gone
    open(sys.argv[1], "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, save)
open(sys.argv[1] + ".ready", "w").close()
while True: time.sleep(0.01)
"""
    assert spawner.pid is None
    shell = f"{sys.executable} -c '{trainer}' {checkpoint} $0; true"
    group = WorkerProcesses(spawner, lambda _how: None)
    await until(lambda: spawner.pid is not None, "the spawner")
    await group.start([WorkerSpec(0, ["sh", "-c", shell, str(spawner.pid)], dict(os.environ))])
    await until((tmp_path / "checkpoint.ready").exists, "the trainer")
    report = await group.stop()
    assert checkpoint.exists()
    assert report.killed == ()


async def test_a_suspended_worker_gets_the_signal(spawner: Spawner, tmp_path: Path) -> None:
    """A stopped (SIGSTOP) worker is continued, so that it can end normally."""
    program = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
open(sys.argv[1], "w").close()
while True: time.sleep(0.01)
"""
    ready = tmp_path / "ready"
    exits: list[WorkerExit] = []
    group = WorkerProcesses(spawner, exits.append)
    await group.start([python(program, 0, str(ready))])
    await until(ready.exists, "the worker")
    os.kill(group.pids[0], signal.SIGSTOP)
    report = await group.stop(timeout=PATIENCE)
    assert report.killed == ()
    assert [how.exit_code for how in exits] == [5]


async def test_a_second_stop_hurries_the_first(spawner: Spawner, tmp_path: Path) -> None:
    """A later call with a shorter timeout ends the wait of both; both get the same report."""
    ready = tmp_path / "ready"
    group = WorkerProcesses(spawner, lambda _how: None)
    await group.start([python(IGNORES_SIGTERM, 0, str(ready))])
    await until(ready.exists, "the worker")
    first = asyncio.create_task(group.stop(timeout=3600.0))
    done, _ = await asyncio.wait([first], timeout=0.1)
    assert not done
    second = await group.stop(timeout=0.0)
    assert await first is second
    assert second.killed == (0,)
    assert await group.stop(timeout=3600.0) is second


async def test_another_signal_of_a_second_stop_is_sent(spawner: Spawner, tmp_path: Path) -> None:
    """The worker ignores SIGTERM, but not the second stop's SIGINT: SIGKILL is not needed."""
    ready = tmp_path / "ready"
    exits: list[WorkerExit] = []
    group = WorkerProcesses(spawner, exits.append)
    await group.start([python(IGNORES_SIGTERM, 0, str(ready))])
    await until(ready.exists, "the worker")
    first = asyncio.create_task(group.stop())
    await asyncio.sleep(0)
    assert (await group.stop(signal.SIGINT)).killed == ()
    await first
    assert [how.signal for how in exits] == [signal.SIGINT]


async def test_a_cancelled_caller_does_not_cancel_the_stop(spawner: Spawner) -> None:
    """A caller that waits for a stop may be cancelled; the stop goes on."""
    group = WorkerProcesses(spawner, lambda _how: None)
    await group.start(SLEEPERS)
    caller = asyncio.create_task(group.stop())
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert (await group.stop()).left == ()
    assert group.pids == {}


async def test_a_stop_during_the_start_ends_what_was_started(spawner: Spawner) -> None:
    """With a stop before exec every worker ends, every exit is reported, and start returns."""
    exits: list[WorkerExit] = []
    group = WorkerProcesses(spawner, exits.append)
    starting = asyncio.create_task(group.start(SLEEPERS))
    await asyncio.sleep(0)
    report = await group.stop()
    await starting
    assert report.left == ()
    assert sorted(how.local_rank for how in exits) == [0, 1, 2, 3]
    assert all(how.during_stop for how in exits)


async def test_a_cancelled_start_leaves_workers_to_stop(spawner: Spawner) -> None:
    """Cancelling start loses no worker: stop still ends them."""
    exits: list[WorkerExit] = []
    group = WorkerProcesses(spawner, exits.append)
    starting = asyncio.create_task(group.start(SLEEPERS))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await group.stop()
    assert len(exits) == 4


async def test_a_worker_that_cannot_start_stops_the_others(spawner: Spawner) -> None:
    """All or none: the error names the worker, the others are gone, and the spawner accepts the next group."""
    exits: list[WorkerExit] = []
    group = WorkerProcesses(spawner, exits.append)
    with pytest.raises(SpawnError, match=r"worker 1: .*no-such-program") as caught:
        await group.start([SLEEPERS[0], WorkerSpec(1, ["no-such-program"], {}), SLEEPERS[2]])
    assert caught.value.local_rank == 1
    assert sorted(how.local_rank for how in exits) == [0, 2]
    assert all(how.during_stop for how in exits)
    successor = WorkerProcesses(spawner, lambda _how: None)
    await successor.start(SLEEPERS)
    await successor.stop()


async def test_stopping_nothing_is_immediate(spawner: Spawner) -> None:
    """An empty group, and one whose workers have all ended, stop without a wait."""
    empty = WorkerProcesses(spawner, lambda _how: None)
    assert (await empty.stop(timeout=3600.0)).killed == ()
    with pytest.raises(SpawnError, match="once"):
        await empty.start(SLEEPERS)
    exits: list[WorkerExit] = []
    finished = WorkerProcesses(spawner, exits.append)
    await finished.start([python("")])
    await until(lambda: bool(exits), "the worker's end")
    report = await finished.stop(timeout=3600.0)
    assert report.killed == ()
    assert not exits[0].during_stop


async def test_processes_left_by_a_finished_worker_are_killed(spawner: Spawner, tmp_path: Path) -> None:
    """The daemon outlives its worker, which has succeeded; stop kills it without a grace period."""
    with fresh_marker() as marker:
        program = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.write(write, b"x")
    while True: signal.pause()
os.read(read, 1)
"""
        exits: list[WorkerExit] = []
        group = WorkerProcesses(spawner, exits.append)
        await group.start([python(program, 0, marker)])
        await until(lambda: bool(exits), "the worker's end")
        assert len(living(marker)) == 1
        await group.stop(timeout=3600.0)
        assert gone(marker)


async def test_one_group_at_a_time(spawner: Spawner) -> None:
    """A spawner refuses a second group while it has one, since stopping either would end both."""
    group, intruder = WorkerProcesses(spawner, lambda _how: None), WorkerProcesses(spawner, lambda _how: None)
    await group.start(SLEEPERS)
    with pytest.raises(SpawnError, match="another needs a spawner of its own"):
        await intruder.start(SLEEPERS)
    assert (await intruder.stop()).left == ()
    assert len(group.pids) == 4
    await group.stop()


async def test_user_signals_reach_the_workers_only(spawner: Spawner, tmp_path: Path) -> None:
    """send_signal signals each worker, but not its children, which would die of a signal they don't expect."""
    program = """
import os, signal, sys, time
def told(*_): open(sys.argv[1], "w").close()
if os.fork() == 0:
    signal.pause()
signal.signal(signal.SIGUSR1, told)
open(sys.argv[1] + ".ready", "w").close()
while True: time.sleep(0.01)
"""
    with fresh_marker() as marker:
        told = tmp_path / "told"
        group = WorkerProcesses(spawner, lambda _how: None)
        await group.start([python(program, 0, str(told), marker)])
        await until((tmp_path / "told.ready").exists, "the worker")
        group.send_signal(signal.SIGUSR1)
        await until(told.exists, "the signal")
        assert len(living(marker)) == 2
        await group.stop()


class Copy:
    """A follower that only records the calls."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def start(self) -> None:
        self._notes.append("start")

    async def finish(self, timeout: float) -> bool:
        self._notes.append("finish")
        return True


async def test_output_is_copied_from_before_the_start_to_after_the_end(spawner: Spawner) -> None:
    """Copies start before the first worker and finish after the last end."""
    notes: list[str] = []
    group = WorkerProcesses(spawner, lambda _how: notes.append("exit"), [Copy(notes)])
    await group.start([python("")])
    await until(lambda: "exit" in notes, "the worker's end")
    await group.stop()
    assert notes == ["start", "exit", "finish"]


async def test_a_group_whose_spawner_dies_can_still_be_stopped() -> None:
    """Every worker has an exit, and stop returns with nothing left, although the spawner does not answer."""
    with fresh_marker() as marker:
        exits: list[WorkerExit] = []
        spawner = Spawner.start()
        group = WorkerProcesses(spawner, exits.append)
        await group.start([python("import signal; signal.pause()", rank, marker) for rank in range(2)])
        assert spawner.pid is not None
        os.kill(spawner.pid, signal.SIGKILL)
        report = await group.stop()
        assert gone(marker)
        assert report.left == ()
        assert sorted(how.local_rank for how in exits) == [0, 1]
        await spawner.close()
