"""A worker whose timer expired is examined, gets its chosen signal, and is killed; each step has a time limit."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.hung_process import hung
from rallypoint.agent.failures.failure import MAX_TRACEBACK, WorkerFailure
from rallypoint.agent.hangs import diagnostics as diagnostics_module
from rallypoint.agent.hangs import reaper as reaping_module
from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.hangs.kernel_stacks import ProcessLook, Thread, caught_signals, inspect_process
from rallypoint.agent.hangs.python_stacks import StackPipe
from rallypoint.agent.hangs.reaper import HungProcess, Reaping, describe_left, hang_message, survivors_of
from rallypoint.agent.spawner.protocol import KillResult
from support.waiting import PATIENCE, until

FAILURE = WorkerFailure(1, 5, "trainer", "host", 7, -9, 1.0, "killed by SIGKILL", "the last lines")


class Kill:
    """A stand-in for the kill of a tree; it records if the process was still alive."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.found_alive: bool | None = None

    async def __call__(self) -> KillResult:
        """Kill the process."""
        look = inspect_process(self.pid)
        self.found_alive = look is not None and look.main.state != "Z"
        os.kill(self.pid, signal.SIGKILL)
        return KillResult(1, ())


def read(path: Path) -> str:
    """Return the content of a file."""
    return path.read_text()


@contextmanager
def start(*command: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process; kill it afterwards, unless it has ended."""
    with subprocess.Popen(command, **more) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Reaping]:
    """A function that makes the reaping of a process."""

    def make_reaping(
        pid: int,
        *,
        chosen: int | None = 0,
        holder: int = 0,
        timeout: float = PATIENCE,
        pipe: StackPipe | None = None,
        is_ours: Callable[[int], bool] = lambda _pid: True,
    ) -> Reaping:
        stderr = tmp_path / "stderr.log"
        stderr.touch()
        victim = HungProcess(pid, 5, stderr, tmp_path / "hang.txt", pipe, is_ours)
        return Reaping(HungWorker("1@3", "step", 2.0, 0.01, holder, chosen, 0.0), victim, timeout)

    return make_reaping


def test_the_message_names_scope_deadline_and_lateness() -> None:
    """It also has the source of a learned timeout: people must be able to judge it."""
    hang = HungWorker("1@3", "step", after=2.0, late_by=0.0123)
    assert hang_message(hang) == "it did not leave 'step' within 2 s (found 0.012 s later)"
    learned = HungWorker("1@3", "step", after=61.5, late_by=0.0123, learned_from=40)
    assert hang_message(learned) == (
        "it did not leave 'step' within 61.5 s, as learned from 40 completions (found 0.012 s later)"
    )


async def test_diagnostics_are_in_the_file_and_the_report(
    make: Callable[..., Reaping], tmp_path: Path
) -> None:
    """The file has all of it, for each hang of a worker; the report has its path."""
    pipe = StackPipe.make(tmp_path / "stacks")
    with hung(pipe.path, "lock") as pid:
        await until(lambda: bool((look := inspect_process(pid)) and look.main.call), "it to hang")
        reaping = make(pid, pipe=pipe)
        await reaping.examine()
        await make(pid, pipe=pipe, chosen=None).examine()
    pipe.close()
    text = read(tmp_path / "hang.txt")
    assert text.count("it did not leave 'step' within 2 s") == 2
    assert text.count("in wait_in_a_lock\n") == 2
    charged = reaping.case.complete_failure(FAILURE)
    assert charged.message == hang_message(reaping.hang)
    assert "in wait_in_a_lock\n" in charged.traceback
    assert charged.traceback.endswith(f"All of it: {tmp_path / 'hang.txt'}")
    assert reaping.case.figures["evidence"] == str(tmp_path / "hang.txt")


async def test_without_time_for_diagnostics_there_are_none(
    make: Callable[..., Reaping], tmp_path: Path
) -> None:
    """The kill comes at once; the report has the worker's own last output."""
    with hung(None, "lock") as pid:
        reaping = make(pid, timeout=0.0)
        await reaping.examine()
        kill = Kill(pid)
        await reaping.end(kill)
    assert kill.found_alive
    assert not (tmp_path / "hang.txt").exists()
    charged = reaping.case.complete_failure(FAILURE)
    assert (charged.message, charged.traceback) == (hang_message(reaping.hang), "the last lines")
    assert reaping.case.figures == {"reason": charged.message}


async def test_a_report_has_the_beginning_of_long_diagnostics(
    make: Callable[..., Reaping], tmp_path: Path
) -> None:
    """It is sent to every node; the most important part comes first."""
    with hung(None, "lock") as pid:
        reaping = make(pid)
        await reaping.examine()
    assert reaping.case.diagnostics is not None
    reaping.case.diagnostics.gaps.append("é" * MAX_TRACEBACK)
    text = reaping.case.complete_failure(FAILURE).traceback
    assert len(text.encode()) <= MAX_TRACEBACK
    assert text.startswith("rank 5, process")
    assert text.endswith(f"\n...\n\nAll of it: {tmp_path / 'hang.txt'}")


async def test_the_chosen_signal_comes_first_and_is_waited_for(
    make: Callable[..., Reaping], tmp_path: Path, no_py_spy: None
) -> None:
    """A worker that ends because of it has time for that, up to a limit; then its tree is killed."""
    program = f"""if True:
        import signal, sys, time
        def end(number, frame):
            open({str(tmp_path / "heard")!r}, "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        while True:
            time.sleep(0.01)
    """
    with start(sys.executable, "-c", program) as process:
        await until(lambda: signal.SIGTERM in caught_signals(process.pid), "the handler")
        reaping = make(process.pid, chosen=signal.SIGTERM)
        kill = Kill(process.pid)
        await reaping.end(kill)
        assert not kill.found_alive
    assert (tmp_path / "heard").exists()
    assert reaping.case.to_be_killed


async def test_a_worker_that_ignores_the_chosen_signal_is_killed(
    make: Callable[..., Reaping], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is limited."""
    monkeypatch.setattr(reaping_module, "SIGNAL_TIMEOUT", 0.05)
    with start("sh", "-c", 'trap "" TERM; exec sleep 600') as process:
        await until(lambda: _runs(process.pid, "sleep"), "it to ignore the signal")
        kill = Kill(process.pid)
        await asyncio.wait_for(make(process.pid, chosen=signal.SIGTERM).end(kill), PATIENCE)
        assert kill.found_alive


def _runs(pid: int, name: str) -> bool:
    look = inspect_process(pid)
    return look is not None and look.main.name == name


async def test_a_stopped_process_gets_the_chosen_signal(
    make: Callable[..., Reaping], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is resumed first, since a stopped process handles no signal."""
    monkeypatch.setattr(reaping_module, "SIGNAL_TIMEOUT", 20.0)
    with start("sh", "-c", "kill -STOP $$; exec sleep 600") as process:
        await until(lambda: bool((look := inspect_process(process.pid)) and look.stopped), "it to be stopped")
        kill = Kill(process.pid)
        await make(process.pid, chosen=signal.SIGTERM).end(kill)
        assert not kill.found_alive


async def test_as_the_last_resort_a_process_writes_its_stacks_as_it_dies(
    make: Callable[..., Reaping], tmp_path: Path, no_py_spy: None
) -> None:
    """It gets SIGABRT and writes to its log; earlier dumps in there are ignored, and no core is written."""
    log = tmp_path / "stderr.log"
    log.write_text("Fatal Python error: of a child, long ago\n")
    program = "import ctypes\ndef hold_the_gil():\n    ctypes.PyDLL(None).sleep(60)\nhold_the_gil()\n"
    (tmp_path / "program.py").write_text(program)
    with ExitStack() as stack, log.open("a") as stderr:
        # The limit for core files is as high as this machine allows.
        shell = 'ulimit -c $(ulimit -Hc); exec "$@"'
        command = ["sh", "-c", shell, "-", sys.executable, "-X", "faulthandler", "program.py"]
        process = stack.enter_context(start(*command, stderr=stderr, cwd=tmp_path))
        await until(lambda: _sleeps(process.pid), "it to hang")
        reaping = make(process.pid)
        await reaping.examine()
        assert reaping.case.diagnostics is not None
        assert reaping.case.diagnostics.stacks == {}
        kill = Kill(process.pid)
        await reaping.end(kill)
        assert not kill.found_alive
        assert process.wait() == -signal.SIGABRT
    assert "in hold_the_gil" in read(tmp_path / "hang.txt")
    text = reaping.case.complete_failure(FAILURE).traceback
    assert text.splitlines()[0].endswith(", in hold_the_gil (program.py:3)")
    assert "written when SIGABRT ended it" in text
    assert "long ago" not in text
    assert "Missing: " not in text
    assert set(os.listdir(tmp_path)) == {"stderr.log", "hang.txt", "program.py"}


def _sleeps(pid: int) -> bool:
    look = inspect_process(pid)
    return look is not None and "nanosleep" in look.main.call


@pytest.mark.parametrize("chosen", [0, None])
async def test_without_a_handler_or_a_kill_no_sigabrt_is_sent(
    make: Callable[..., Reaping], no_py_spy: None, chosen: int | None
) -> None:
    """The signal would leave a core and no stacks."""
    with start("sleep", "60") as process:
        reaping = make(process.pid, chosen=chosen)
        await reaping.examine()
        if chosen is not None:
            kill = Kill(process.pid)
            await reaping.end(kill)
            assert kill.found_alive
        else:
            await until(lambda: _sleeps(process.pid), "it to sleep on")


async def test_a_reused_pid_gets_no_signal(make: Callable[..., Reaping], no_py_spy: None) -> None:
    """The worker has ended, and the kernel has reused its PID."""
    with hung(None, "lock") as stranger:
        reaping = make(stranger, chosen=signal.SIGTERM, is_ours=lambda _pid: False)
        await reaping.examine()

        async def kill() -> KillResult:
            return KillResult(0, ())

        await reaping.end(kill)
        look = inspect_process(stranger)
        assert look is not None
        assert look.main.state != "Z"
    assert reaping.case.diagnostics is not None
    assert reaping.case.diagnostics.process_looks == []


async def test_a_file_that_cannot_be_written_costs_no_kill(
    make: Callable[..., Reaping], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, or hangs and so caused the worker's hang; the report still has the diagnostics."""
    monkeypatch.setattr(reaping_module, "LOOK_TIMEOUT", 0.05)
    (tmp_path / "hang.txt").mkdir()
    with hung(None, "lock") as pid:
        refused = make(pid)
        await refused.examine()
        (tmp_path / "hang.txt").rmdir()
        os.mkfifo(tmp_path / "hang.txt")  # an open for writing waits for a reader, and there is none
        stuck = make(pid)
        await asyncio.wait_for(stuck.examine(), PATIENCE)
    for reaping in (refused, stuck):
        assert reaping.case.file is None
        assert reaping.case.complete_failure(FAILURE).traceback.startswith("rank 5, process")
        assert reaping.case.figures["evidence"] == "could not be written"
    with (tmp_path / "hang.txt").open():
        pass  # releases the waiting thread


async def test_a_process_that_outlived_sigkill_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for its sleep is the problem to solve."""
    stuck = Thread(7, "trainer", "D", "folio_wait_bit_common", "write of /data/x (descriptor 3)")
    looks = {
        7: ProcessLook(7, 0.0, (stuck,), 1),
        8: ProcessLook(8, 0.0, (Thread(8, "sh", "R"),), 1),
        **dict.fromkeys(range(9, 13)),
    }
    monkeypatch.setattr(reaping_module, "inspect_process", looks.get)
    assert await describe_left([7]) == (
        "process of workers outlived SIGKILL: 7 (trainer) is in uninterruptible sleep: it waits for a disk "
        "(folio_wait_bit_common, write of /data/x (descriptor 3))"
    )
    assert (await describe_left([8, 9, 10, 11, 12])).startswith(
        "processes of workers outlived SIGKILL: 8 (sh) is running; 9; 10; 11 and 1 more"
    )


async def test_the_description_does_not_wait_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of /proc may need a lock that the process holds."""
    release = threading.Event()
    monkeypatch.setattr(reaping_module, "LOOK_TIMEOUT", 0.05)
    monkeypatch.setattr(reaping_module, "inspect_process", lambda _pid: release.wait(4 * PATIENCE))
    assert await asyncio.wait_for(describe_left([7]), PATIENCE) == "process of workers outlived SIGKILL: 7"
    release.set()


async def test_looking_and_writing_share_one_bound(
    make: Callable[..., Reaping], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hang in one leaves the other its part; the restart waits for both together."""

    async def spy(_pid: int) -> str:
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(diagnostics_module, "spy", spy)
    monkeypatch.setattr(reaping_module, "_COLLECTING", 0.02)
    with hung(None, "lock") as pid:
        reaping = make(pid, timeout=100.0)
        await asyncio.wait_for(reaping.examine(), PATIENCE)
    assert "longer than 2 s" in read(tmp_path / "hang.txt")
    assert f"Kernel state of process {pid}" in read(tmp_path / "hang.txt")


async def test_a_dying_process_in_a_short_kernel_wait_has_not_outlived_sigkill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This can happen to a dying process, on a busy machine."""
    with start("sleep", "60") as dying:
        asleep = ProcessLook(dying.pid, 0.0, (Thread(dying.pid, "sleep", "D"),), 1)

        def look(_pid: int) -> ProcessLook:
            dying.kill()
            return asleep

        monkeypatch.setattr(reaping_module, "inspect_process", look)
        assert await asyncio.wait_for(survivors_of([dying.pid]), PATIENCE) == ()


async def test_a_process_that_dies_slowly_has_not_outlived_sigkill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel frees its memory for a while; a process in uninterruptible sleep is not waited for."""
    with start("sleep", "60") as slow, start("sleep", "60") as stuck, start("sleep", "60") as dead:
        monkeypatch.setattr(reaping_module, "SLOW_DEATH", 4 * PATIENCE)
        dead.kill()
        asleep = ProcessLook(stuck.pid, 0.0, (Thread(stuck.pid, "sleep", "D"),), 1)
        looks = {stuck.pid: asleep}
        monkeypatch.setattr(
            reaping_module, "inspect_process", lambda pid: looks.get(pid) or inspect_process(pid)
        )
        asyncio.get_running_loop().call_later(0.2, slow.kill)
        assert await asyncio.wait_for(survivors_of([slow.pid, stuck.pid, dead.pid]), PATIENCE) == (stuck.pid,)
        monkeypatch.setattr(reaping_module, "SLOW_DEATH", 0.05)
        looks.clear()
        assert await survivors_of([stuck.pid]) == (stuck.pid,)
