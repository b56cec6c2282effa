"""Diagnostics of a hang are collected in time in spite of failures, and start with the most important fact."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from agent.hung_process import hung
from rallypoint.agent.hangs import diagnostics as diagnostics_module
from rallypoint.agent.hangs import python_stacks
from rallypoint.agent.hangs.diagnostics import (
    Diagnostics,
    InspectedProcess,
    PythonStacks,
    collect_diagnostics,
    in_background,
)
from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.hangs.kernel_stacks import ProcessLook, Thread, inspect_process
from rallypoint.agent.hangs.python_stacks import StackPipe
from support.waiting import PATIENCE, until

HANG = HungWorker("1@3", "step", after=60.0, late_by=0.01, pid=7, cpu_seconds=10.0)
MAIN = Thread(7, "trainer", "S", "futex_do_wait", "futex", ("futex_do_wait+0x1/0x2",), 3.0)
STACKS = PythonStacks(
    'Current thread 0x7f (most recent call first):\n  File "/a/t.py", line 31 in step', "as asked"
)


def found(cpu: float = 10.2, main: Thread = MAIN, *others: Thread, hang: HungWorker = HANG) -> Diagnostics:
    """Build the diagnostics of a process as the kernel describes it."""
    threads = (main, *others)
    return Diagnostics(hang, 2, [ProcessLook(7, cpu, threads, len(threads))], {7: STACKS})


@contextmanager
def suspects(*pids: int) -> Iterator[Sequence[InspectedProcess]]:
    """Open the processes with a pidfd each."""
    with ExitStack() as stack:
        pinned = [InspectedProcess(pid, os.pidfd_open(pid)) for pid in pids]
        for suspect in pinned:
            stack.callback(os.close, suspect.pidfd)
        yield pinned


# ---- the text


def test_the_first_line_has_the_worker_the_place_and_the_wait() -> None:
    """One sentence has all that a person needs at night."""
    assert found().summary == (
        "rank 2, process 7, hangs in 'step', which may take 60 s: it waits for a lock or another thread, "
        "in step (t.py:31); it used 0.2 s of processor time in the 60.0 s since it began"
    )
    assert found().text.splitlines()[0] == found().summary


@pytest.mark.parametrize(
    ("cpu", "state", "says"),
    [
        (69.0, "R", ": it computes, in"),
        (69.0, "S", ": other threads compute while its main thread waits for a lock or another thread, in"),
        (
            30.0,
            "S",
            ": it waits for a lock or another thread at the moment, and computed for a part of the time, in",
        ),
        (30.0, "R", ": it computes at the moment, in"),
        (10.0, "T", ": it was stopped by a signal, in"),
        (10.0, "t", ": it was stopped by a debugger, in"),
        (
            10.0,
            "D",
            ": it is in uninterruptible sleep: it waits for a lock or another thread (futex_do_wait), "
            "system call futex, in step",
        ),
    ],
)
def test_waiting_is_distinguished_from_computing(cpu: float, state: str, says: str) -> None:
    """The processor time since the scope began, and the current state, make the difference."""
    assert says in found(cpu, replace(MAIN, state=state)).summary


def test_a_thread_in_uninterruptible_sleep_is_named_although_the_main_thread_is_not() -> None:
    """This thread prevents the end of the process."""
    stuck = replace(MAIN, tid=9, name="writer", state="D")
    assert "its thread 9 (writer) is in uninterruptible sleep: it waits" in found(10.2, MAIN, stuck).summary


def test_without_a_first_figure_no_processor_time_is_reported() -> None:
    """The timer was set directly at the service, by an unknown process."""
    summary = found(hang=replace(HANG, cpu_seconds=None)).summary
    assert summary.endswith(": its main thread waits for a lock or another thread, in step (t.py:31)")


def test_with_nothing_found_only_the_hang_is_reported() -> None:
    """The process may be gone."""
    evidence = Diagnostics(replace(HANG, pid=0), 2)
    assert evidence.text == "rank 2 hangs in 'step', which may take 60 s"


def test_the_text_has_the_stacks_before_the_kernel_s_data() -> None:
    """It lists the missing parts."""
    evidence = found()
    evidence.gaps.append("the moon")
    places = [
        evidence.text.index(part) for part in (STACKS.text, "Missing: the moon.", "main thread 7 (trainer)")
    ]
    assert places == sorted(places)


# ---- the collection


async def test_holder_and_worker_are_both_examined(pipe: StackPipe) -> None:
    """A child of the worker may hold the timer, while the worker waits for it."""
    with hung(pipe.path, "gil") as child, hung(pipe.path, "lock") as worker, suspects(child, worker) as asked:
        await until(
            lambda: all((look := inspect_process(pid)) and look.main.call for pid in (child, worker)),
            "both to hang",
        )
        evidence = Diagnostics(replace(HANG, pid=child, cpu_seconds=0.0), 2)
        await collect_diagnostics(evidence, asked, pipe, PATIENCE)
    assert [look.pid for look in evidence.process_looks] == [child, worker]
    assert "hold_the_gil" in evidence.stacks[child].text
    assert "wait_in_a_lock" in evidence.stacks[worker].text
    assert evidence.gaps == []
    assert "in hold_the_gil (hung_process.py:" in evidence.summary


async def test_a_process_without_a_handler_is_not_signalled(pipe: StackPipe, no_py_spy: None) -> None:
    """The signal would kill it; the text lists the missing stacks."""
    with hung(None, "lock") as pid, suspects(pid) as asked:
        evidence = Diagnostics(replace(HANG, pid=pid), 2)
        await collect_diagnostics(evidence, asked, pipe, PATIENCE)
        look = inspect_process(pid)
        assert look is not None
        assert look.main.state != "Z"
    assert evidence.stacks == {}
    assert "has not used rallypoint.timer" in evidence.text


async def test_py_spy_helps_where_the_process_is_silent(
    pipe: StackPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process does not reply to the signal, so py-spy is tried next."""

    async def spy(pid: int) -> str:
        return f"stacks of {pid}"

    monkeypatch.setattr(diagnostics_module, "spy", spy)
    monkeypatch.setattr(python_stacks, "FIRST_OUTPUT_TIMEOUT", 0.05)
    with hung(pipe.path, "silent") as pid, suspects(pid) as asked:
        evidence = Diagnostics(replace(HANG, pid=pid), 2)
        await collect_diagnostics(evidence, asked, pipe, PATIENCE)
    assert evidence.stacks[pid] == PythonStacks(f"stacks of {pid}", "by py-spy")


@pytest.mark.parametrize("signal", [0, None])
async def test_a_stopped_process_is_resumed_only_if_it_is_to_be_killed(
    pipe: StackPipe, no_py_spy: None, signal: int | None
) -> None:
    """A client that wants only a report does not want to find it running."""
    with hung(pipe.path, "stopped") as pid, suspects(pid) as asked:
        await until(lambda: bool((look := inspect_process(pid)) and look.stopped), "it to be stopped")
        evidence = Diagnostics(replace(HANG, pid=pid, signal=signal), 2)
        await collect_diagnostics(evidence, asked, pipe, PATIENCE)
        look = inspect_process(pid)
        assert look is not None
        assert look.stopped == (signal is None)
    assert ("in stop" in evidence.text) == (signal == 0)
    assert "it was stopped by a signal" in evidence.summary


async def test_a_hanging_inspection_takes_no_longer_than_the_bound(
    pipe: StackPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a read of /proc may hang: the process may hold a lock that the read needs."""
    release = threading.Event()

    def hang(_pid: int) -> None:
        release.wait(4 * PATIENCE)

    monkeypatch.setattr(diagnostics_module, "inspect_process", hang)
    evidence = Diagnostics(HANG, 2)
    with suspects(os.getpid()) as asked:
        await asyncio.wait_for(collect_diagnostics(evidence, asked, pipe, 0.05), PATIENCE)
    release.set()
    assert "longer than 0.05 s" in evidence.text


async def test_stacks_collected_in_time_are_kept(pipe: StackPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit cancels the last method, and keeps the results of the ones before it."""

    timeout, bounds = asyncio.timeout, list[asyncio.Timeout]()

    def remember(seconds: float) -> asyncio.Timeout:
        bounds.append(timeout(seconds))
        return bounds[-1]

    async def spy(_pid: int) -> str:
        # Its time ends only now: on a slow machine the methods before may take any time.
        bounds[0].reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(asyncio, "timeout", remember)
    monkeypatch.setattr(diagnostics_module, "spy", spy)
    with hung(pipe.path, "lock") as first, hung(None, "lock") as second, suspects(first, second) as asked:
        evidence = Diagnostics(replace(HANG, pid=first), 2)
        await collect_diagnostics(evidence, asked, pipe, 3600.0)
    assert list(evidence.stacks) == [first]
    assert len(evidence.process_looks) == 2


async def test_a_failure_of_ours_is_a_gap_and_no_failure(
    pipe: StackPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is still killed."""

    def fail(_pid: int) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(diagnostics_module, "inspect_process", fail)
    evidence = Diagnostics(HANG, 2)
    with suspects(os.getpid()) as asked:
        await collect_diagnostics(evidence, asked, pipe, PATIENCE)
    assert "RuntimeError('no such thing')" in evidence.text


async def test_work_in_the_background_gives_its_result_or_its_error() -> None:
    """A caller that is cancelled does not wait for it."""
    assert await in_background(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_background(lambda: 1 // 0)
    release = threading.Event()
    waiting = asyncio.create_task(in_background(lambda: release.wait(PATIENCE)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
