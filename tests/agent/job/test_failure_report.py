"""The report of a failure has all that a person needs to fix it, and lists the failures after it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta, timezone

from agent.fake_job import VALUE_ERROR
from rallypoint.agent.failures.failure import WorkerFailure, failure_to_start
from rallypoint.agent.job.report import render

CET = timezone(timedelta(hours=1), "CET")
FAILURE = replace(
    VALUE_ERROR,
    traceback='Traceback (most recent call last):\n  File "train.py", line 3, in main\nValueError: bad \x1b[31m\x9b',
    at=5.0,
)


def test_the_report_has_all_that_a_person_needs() -> None:
    """Rank, host, PID, exit code, time with zone, reason, log file, traceback; and no escape sequences."""
    assert (
        render(FAILURE, CET)
        == """\
  rank       3 (local rank 1, role trainer)
  host       node2
  pid        4242
  exit code  1
  time       2027-01-15 08:59:59.750 CET (UTC+0100)
  reason     ValueError: bad
  log        /logs/1/stderr.log

  Traceback (most recent call last):
    File "train.py", line 3, in main
  ValueError: bad ?[31m?"""
    )


def test_reports_of_signals_and_of_workers_that_never_ran() -> None:
    """A signal and its core dump are named; a worker that never started has no PID and no log file."""
    killed = render(replace(FAILURE, exit_code=-11, core_file="/cores/core.4242"))
    assert "exit code  killed by SIGSEGV (signal 11)" in killed
    assert "core dump  /cores/core.4242" in killed
    never = render(failure_to_start("no program 'x'", rank=1, role="default", host="h"))
    assert "pid        never started" in never
    assert "reason     no program 'x'" in never
    assert "log " not in never
    assert "core dump" not in never


def other(rank: int, **more: object) -> WorkerFailure:
    """Another failure, 50 ms later."""
    return replace(FAILURE, rank=rank, at=5.05, **more)  # type: ignore[arg-type]


def test_later_failures_are_one_line() -> None:
    """It has the end of each, and the delay if both times are from one clock."""
    assert "failed after it" not in render(FAILURE)
    one = render(FAILURE, others=[other(2)])
    assert "\n\n  1 more worker failed after it: rank 2 (exit code 1, +0.050 s)\n\n  Traceback" in one
    two = render(FAILURE, others=[other(0, exit_code=-6), other(2, pid=0)])
    expected = "2 more workers failed after it: rank 0 (killed by SIGABRT, +0.050 s), rank 2 (never started, +0.050 s)"
    assert f"\n\n  {expected}\n" in two


def test_between_two_hosts_no_clocks_are_compared() -> None:
    """The line names the host of the later failures."""
    elsewhere = replace(FAILURE, at=None)
    told = render(elsewhere, others=[other(0, host="node1")])
    assert "\n\n  1 more worker failed after it on node1: rank 0 (exit code 1)\n" in told


def test_of_many_some_are_named() -> None:
    """A host may have hundreds."""
    told = render(FAILURE, others=[other(rank) for rank in range(10, 30)])
    assert "20 more workers failed after it: rank 10 (" in told
    assert told.count(", +0.050 s)") == 8
    assert ", +0.050 s) and 12 more\n" in told
