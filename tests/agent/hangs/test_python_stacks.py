"""Python stacks of a process are collected without its help in any kind of hang, the most important thread first."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from agent.hung_process import STACK_SIGNAL, hung
from rallypoint.agent.hangs import python_stacks
from rallypoint.agent.hangs.kernel_stacks import inspect_process
from rallypoint.agent.hangs.python_stacks import (
    StackPipe,
    in_order,
    innermost,
    last_dump,
    looks_like_stacks,
    spy,
)
from rallypoint.timer.worker import process as stacks
from support.waiting import PATIENCE, until

HELPER = """\
Thread 0x00007f16b7b7e6c0 (most recent call first):
  File "/lib/threading.py", line 982 in run
"""
LOADER = """\
Thread 0x00007f16b837f6c0 (most recent call first):
  File "/app/data.py", line 12 in load
  File "/app/train.py", line 40 in fetch
"""
MAIN = """\
Current thread 0x00007f16b9130b80 (most recent call first):
  File "/app/train.py", line 31 in step
"""
DUMP = f"{HELPER}\n{LOADER}\n{MAIN}"


async def ask(pipe: StackPipe, pid: int, *, resume: bool = False) -> str:
    """Request the stacks of a process; return its reply."""
    said: list[bytes] = []
    pidfd = os.pidfd_open(pid)
    try:
        await pipe.request_stacks(pidfd, resume=resume, output=said)
    finally:
        os.close(pidfd)
    return b"".join(said).decode()


def test_the_signal_is_the_workers() -> None:
    """The worker and the agent use the same one."""
    assert stacks.STACK_SIGNAL == STACK_SIGNAL


@pytest.mark.parametrize(
    ("way", "function"),
    [
        ("lock", "wait_in_a_lock"),
        ("gil", "hold_the_gil"),
        ("computing", "compute"),
        ("pool", "sleep_beside_a_pool"),
    ],
)
async def test_a_process_writes_its_stacks_in_any_kind_of_hang(
    pipe: StackPipe, way: str, function: str
) -> None:
    """faulthandler needs neither the GIL nor a system call that ends."""
    with hung(pipe.path, way) as pid:
        await until(lambda: _is_in(pid, way), "it to hang")
        stacks = await ask(pipe, pid)
        assert looks_like_stacks(stacks)
        assert f"in {function}" in stacks


def _is_in(pid: int, way: str) -> bool:
    look = inspect_process(pid)
    assert look is not None
    busy = max(thread.cpu_seconds for thread in look.threads) > 0.1
    return busy if way in ("computing", "pool") else look.main.state == "S" and bool(look.main.call)


async def test_a_stopped_process_is_resumed_to_write_its_stacks(pipe: StackPipe) -> None:
    """The signal is pending until it runs again, and is then handled first."""
    with hung(pipe.path, "stopped") as pid:
        await until(lambda: bool((look := inspect_process(pid)) and look.stopped), "it to be stopped")
        assert "in stop" in await ask(pipe, pid, resume=True)


async def test_a_silent_process_is_not_waited_for_long(
    pipe: StackPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is needed for other methods."""
    monkeypatch.setattr(python_stacks, "FIRST_OUTPUT_TIMEOUT", 0.05)
    with hung(pipe.path, "silent") as pid:
        assert await asyncio.wait_for(ask(pipe, pid), PATIENCE) == ""


async def test_earlier_output_is_not_taken_for_the_reply(pipe: StackPipe) -> None:
    """Another process may have requested stacks from a child of the worker."""
    writer = os.open(pipe.path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(writer, b"old news")
    os.close(writer)
    with hung(pipe.path, "lock") as pid:
        assert "old news" not in await ask(pipe, pid)


async def test_more_than_enough_is_cut_off(pipe: StackPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that writes for ever neither blocks the agent nor fills its memory."""
    monkeypatch.setattr(python_stacks, "MOST_BYTES", 1000)
    writer = os.open(pipe.path, os.O_WRONLY)
    with hung(pipe.path, "silent") as pid:
        asking = asyncio.create_task(ask(pipe, pid))
        while not asking.done():
            await asyncio.sleep(0)
            os.write(writer, b"x" * 600)
            await asyncio.sleep(0.01)
        assert await asking == "x" * 1000
    os.close(writer)


async def test_an_ended_process_has_no_stacks(pipe: StackPipe) -> None:
    """It was killed a moment ago."""
    with hung(pipe.path, "lock") as pid:
        pidfd = os.pidfd_open(pid)
    said: list[bytes] = []
    await pipe.request_stacks(pidfd, resume=False, output=said)
    assert said == []
    os.close(pidfd)


async def test_a_pipe_may_be_closed_during_a_request(tmp_path: Path) -> None:
    """The round may end meanwhile; the descriptor may then belong to another file, and must not be read."""
    pipe = StackPipe.make(tmp_path / "stacks")
    with hung(pipe.path, "lock") as pid:
        asking = asyncio.create_task(ask(pipe, pid))
        await asyncio.sleep(0)
        pipe.close()
        pipe.close()
        assert not pipe.path.exists()
        assert "hung_process.py" in await asking
        assert await ask(pipe, pid) == ""


def _py_spy(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


async def test_py_spy_is_called_for_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """py-spy does not pause it; its output is the stacks."""
    _py_spy(tmp_path, monkeypatch, 'echo "$@"')
    assert await spy(4711) == "dump --nonblocking --pid 4711"


async def test_output_of_a_failed_py_spy_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lack the permission, or not support this Python."""
    _py_spy(tmp_path, monkeypatch, "echo half; exit 1")
    assert await spy(4711) == ""
    monkeypatch.setattr(python_stacks, "_find_spy", lambda: str(tmp_path / "none"))
    assert await spy(4711) == ""
    monkeypatch.setattr(python_stacks, "_find_spy", lambda: None)
    assert await spy(4711) == ""


async def test_a_py_spy_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is left behind."""
    _py_spy(
        tmp_path,
        monkeypatch,
        f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 600",
    )
    asking = asyncio.create_task(spy(4711))
    await until((tmp_path / "pid").exists, "py-spy to run")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    pid = int((tmp_path / "pid").read_text())
    await until(lambda: inspect_process(pid) is None, "its end")
    await asyncio.sleep(0)  # the event loop processes its exit


def test_the_main_thread_comes_first() -> None:
    """faulthandler writes the oldest thread last."""
    assert in_order(DUMP, "step").split("\n\n") == [MAIN.strip(), LOADER.strip(), HELPER.strip()]


def test_a_thread_in_the_file_of_the_scope_comes_first() -> None:
    """The default scope is a call site: a thread in that file entered it."""
    assert in_order(DUMP, "/app/data.py#11").split("\n\n") == [LOADER.strip(), MAIN.strip(), HELPER.strip()]
    assert in_order(DUMP, "/app/train.py#30").split("\n\n")[0] == MAIN.strip()


def test_the_innermost_frame_is_named() -> None:
    """The formats of faulthandler and py-spy are both parsed."""
    assert innermost(in_order(DUMP, "step")) == "step (train.py:31)"
    assert (
        innermost('Thread 20 (idle): "MainThread"\n    step (app/train.py:31)\n    main (x.py:1)')
        == "step (train.py:31)"
    )
    assert innermost("nothing of the kind") == ""


def test_the_dump_of_a_dying_process_is_found_after_earlier_output(tmp_path: Path) -> None:
    """Only the text after the given offset counts."""
    log = tmp_path / "stderr.log"
    earlier = "Fatal Python error: of a child, long ago\n"
    log.write_text(f"{earlier}a warning\nFatal Python error: Aborted\n\n{DUMP}")
    found = last_dump(log, len(earlier))
    assert found.startswith("Fatal Python error: Aborted")
    assert "in step" in found
    assert last_dump(log, log.stat().st_size) == ""
    assert last_dump(tmp_path / "none", 0) == ""


async def test_a_request_ends_soon_after_the_last_output(pipe: StackPipe) -> None:
    """It is far from the time limit, which is for processes that don't reply."""
    with hung(pipe.path, "lock") as pid:
        began = time.monotonic()
        await ask(pipe, pid)
        assert python_stacks.QUIET <= time.monotonic() - began < python_stacks.FIRST_OUTPUT_TIMEOUT
