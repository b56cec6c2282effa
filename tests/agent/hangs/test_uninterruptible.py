"""A worker in one long uninterruptible sleep is found; one that often waits for its disk for a short time is not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rallypoint.agent.hangs import uninterruptible
from rallypoint.agent.hangs.uninterruptible import (
    TIMEOUT_VARIABLE,
    BlockedThread,
    StuckWatch,
    await_stuck,
    find_sleepers,
    uninterruptible_timeout,
)
from rallypoint.rpc.endpoint import SettingError
from support.waiting import PATIENCE

SLEEPS = BlockedThread(pid=7, tid=9, switches=100)
RAN = BlockedThread(pid=7, tid=9, switches=101)


def test_one_sleep_for_so_long_is_too_long() -> None:
    """The time counts from the first check that found it."""
    watch = StuckWatch(10.0)
    assert [watch.note([SLEEPS], now) for now in (100.0, 105.0, 109.9)] == [None, None, None]
    assert watch.note([SLEEPS], 110.0) == SLEEPS


def test_a_thread_that_ran_in_between_begins_another_sleep() -> None:
    """A worker that reads a slow disk is asleep at most checks."""
    watch = StuckWatch(10.0)
    assert [watch.note([each], now) for each, now in ((SLEEPS, 100.0), (RAN, 109.0), (RAN, 118.0))] == [
        None
    ] * 3
    assert watch.note([], 118.5) is None
    assert watch.note([RAN], 119.0) is None
    assert watch.note([RAN], 129.0) == RAN


@pytest.mark.parametrize(("timeout", "pause"), [(1.0, 0.5), (60.0, 5.0)])
def test_looks_are_frequent_enough_and_not_more(timeout: float, pause: float) -> None:
    """They have a cost, and must not be late by much."""
    assert StuckWatch(timeout).pause == pause


def test_torch_s_variable_sets_the_timeout() -> None:
    """Unset, 0 or negative disables the checks, as in torch. Other text is an error, unlike in torch."""
    assert uninterruptible_timeout({}) == 0
    assert uninterruptible_timeout({TIMEOUT_VARIABLE: ""}) == 0
    assert uninterruptible_timeout({TIMEOUT_VARIABLE: "-1"}) == 0
    assert uninterruptible_timeout({TIMEOUT_VARIABLE: "2.5"}) == 2.5
    with pytest.raises(SettingError, match="is not a number"):
        uninterruptible_timeout({TIMEOUT_VARIABLE: "long"})


def thread(proc: Path, pid: int, tid: int, state: str, switches: tuple[int, int]) -> None:
    """Write the /proc files of a thread; its name is chosen to mislead the parser."""
    folder = proc / str(pid) / "task" / str(tid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{tid} (a) D (b) {state} 1 1 1 0 -1")
    (folder / "status").write_text(
        f"Name:\ta\nvoluntary_ctxt_switches:\t{switches[0]}\nnonvoluntary_ctxt_switches:\t{switches[1]}\n"
    )


def test_any_thread_of_a_worker_counts(tmp_path: Path) -> None:
    """The training thread is not always the first; processes that have ended are ignored."""
    thread(tmp_path, 7, 7, "S", (5, 5))
    thread(tmp_path, 7, 9, "D", (60, 40))
    thread(tmp_path, 8, 8, "R", (5, 5))
    assert find_sleepers([7, 8, 99], tmp_path) == [SLEEPS]


async def test_the_sentence_names_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real sleep would need a disk that freezes: here, this process is reported as asleep."""
    me = BlockedThread(os.getpid(), os.getpid(), 1)
    monkeypatch.setattr(uninterruptible, "find_sleepers", lambda pids: [me] if os.getpid() in pids else [])
    told = await asyncio.wait_for(await_stuck(lambda: {3: os.getpid()}, 0.02), PATIENCE)
    assert told.startswith(
        f"worker of rank 3 (process {os.getpid()}) has been in uninterruptible sleep for 0.02 s"
    )
