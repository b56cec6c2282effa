"""A failure report has the worker, the time, the exit and the reason, from the best available source."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rallypoint.agent.failures.core_dump import CoreDump
from rallypoint.agent.failures.failure import (
    MAX_MESSAGE,
    MAX_TRACEBACK,
    UNWINDING,
    WorkerFailure,
    describe_failure,
    failure_of_port,
    failure_to_end,
    failure_to_start,
    names_taken_address,
    sentence,
)
from rallypoint.agent.logs.plan import WorkerLogs
from rallypoint.agent.spawner.protocol import WorkerExit
from rallypoint.rendezvous.core.state import FailureKind

ENDED = 1_800_000_000.0
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in main\nValueError: bad'


@pytest.fixture
def logs(tmp_path: Path) -> WorkerLogs:
    logs = WorkerLogs(tmp_path / "stdout.log", tmp_path / "stderr.log", tmp_path / "error.json")
    logs.stdout.touch()
    logs.stderr.touch()
    return logs


def ended(exit_code: int | None = 1, number: int | None = None, *, inferred: bool = False) -> WorkerExit:
    return WorkerExit(1, 4242, exit_code, number, at=5.0, time=ENDED, inferred=inferred)


def describe(how: WorkerExit, logs: WorkerLogs | None) -> WorkerFailure:
    return describe_failure(how, logs, rank=3, role="trainer", host="node2")


def write_error_file(logs: WorkerLogs, content: object, written: float = ENDED - 1.5) -> None:
    logs.error_file.write_text(content if isinstance(content, str) else json.dumps(content))
    os.utime(logs.error_file, (written, written))


def test_the_error_file_is_the_best_source(logs: WorkerLogs) -> None:
    """Message, traceback and the time of the exception, instead of the time of the exit, come from `record`."""
    extra = {"py_callstack": TRACEBACK + "\n", "timestamp": "1799999998"}
    write_error_file(logs, {"message": {"message": "ValueError: bad", "extraInfo": extra}})
    logs.stderr.write_text("Traceback (most recent call last):\n  File x\nOSError: of a later handler\n")
    assert describe(ended(), logs) == WorkerFailure(
        local_rank=1,
        rank=3,
        role="trainer",
        host="node2",
        pid=4242,
        exit_code=1,
        time=ENDED - 1.5,
        message="ValueError: bad",
        traceback=TRACEBACK,
        log_file=str(logs.stderr),
        kind=FailureKind.EXCEPTION,
    )


def test_the_failure_time_is_the_worker_s_or_the_file_s_within_its_life(logs: WorkerLogs) -> None:
    """The clock of a file server or a container may differ: a time outside the worker's life is ignored."""

    def moment(monotonic: object, written: float, since: float = 2.0) -> tuple[float | None, float]:
        ours = {"monotonic": monotonic}
        write_error_file(logs, {"message": {"message": "bad", "extraInfo": {"rallypoint": ours}}}, written)
        failure = describe_failure(ended(), logs, rank=3, role="trainer", host="node2", since=since)
        return failure.at, failure.time

    assert moment(4.75, ENDED - 1.5) == (4.75, ENDED - 0.25)
    assert moment(None, ENDED - 1.5) == (3.5, ENDED - 1.5)
    assert moment(1.75, ENDED - 1.5) == (3.5, ENDED - 1.5)
    assert moment(5.5, ENDED - 1.5) == (3.5, ENDED - 1.5)
    assert moment(None, ENDED - 3600) == (5.0, ENDED)
    assert moment(None, ENDED + 3600) == (5.0, ENDED)


def test_each_end_has_its_kind(logs: WorkerLogs) -> None:
    """It is an exit code, a signal, an exception in the log or the error file, or a lack of memory."""
    assert describe(ended(3), logs).kind is FailureKind.EXIT_CODE
    assert describe(ended(None, 11), logs).kind is FailureKind.SIGNAL
    logs.stderr.write_text(TRACEBACK)
    assert describe(ended(1), logs).kind is FailureKind.EXCEPTION
    assert describe(ended(None, 11), logs).kind is FailureKind.SIGNAL
    write_error_file(logs, {"message": "bad"})
    assert describe(ended(None, 6), logs).kind is FailureKind.EXCEPTION
    never = failure_to_start("no program", rank=1, role="default", host="h")
    assert never.kind is FailureKind.NOT_STARTED
    hung = failure_to_end("it hangs", pid=7, rank=3, role="trainer", host="n", local_rank=1)
    assert hung.kind is FailureKind.HUNG


def test_an_oom_kill_is_reported_unless_the_worker_had_just_raised(logs: WorkerLogs) -> None:
    """An older exception was caught: it did not end the worker."""
    starved = "killed by the kernel OOM killer (SIGKILL): the host had no memory left"

    def told(raised_before: float) -> WorkerFailure:
        write_error_file(logs, {"message": "bad"}, written=ENDED - raised_before)
        how = WorkerExit(1, 4242, None, 9, at=500.0, time=ENDED)
        return describe_failure(how, logs, rank=3, role="trainer", host="node2", starved=starved)

    assert (told(1.0).kind, told(1.0).message) == (FailureKind.EXCEPTION, "bad")
    late = told(UNWINDING + 1)
    assert (late.kind, late.message, late.at) == (FailureKind.OUT_OF_MEMORY, starved, 500.0)


def test_code_93_and_a_permanent_error_file_are_permanent(logs: WorkerLogs) -> None:
    """Each of them is enough."""
    assert not describe(ended(1), logs).permanent
    assert describe(ended(93), logs).permanent
    assert describe(ended(93), logs).message == "exited with code 93 (unrecoverable error, not restarted)"
    ours = {"permanent": True}
    write_error_file(logs, {"message": {"message": "bad", "extraInfo": {"rallypoint": ours}}})
    assert describe(ended(1), logs).permanent


def test_a_core_dump_is_mentioned_only_without_an_exception(logs: WorkerLogs) -> None:
    """It adds nothing to an exception's message; the path is still in the report."""
    core = CoreDump("/cores/core.4242", "; hint")

    def told() -> WorkerFailure:
        return describe_failure(
            ended(None, 6), logs, rank=3, role="trainer", host="node2", core=core, besides="; besides"
        )

    assert told().message.endswith("at the end of the log; hint; besides")
    assert told().core_file == "/cores/core.4242"
    write_error_file(logs, {"message": "bad"})
    assert (told().message, told().core_file) == ("bad", "/cores/core.4242")
    assert (
        describe_failure(ended(1), logs, rank=3, role="trainer", host="node2", besides="; besides").message
        == "bad; besides"
    )


@pytest.mark.parametrize("content", ["{", '{"message": {"message": 7}}'])
def test_a_malformed_error_file_is_tolerated(logs: WorkerLogs, content: str) -> None:
    """Invalid content is ignored or replaced; nothing is raised."""
    write_error_file(logs, content)
    assert describe(ended(5), logs).message == "exited with code 5"


def test_without_an_error_file_the_log_is_used(logs: WorkerLogs) -> None:
    """The report has the last traceback in standard error, after any amount of other output."""
    logs.stderr.write_bytes(b"\xff noise\n" * 50_000 + TRACEBACK.encode() + b"\n")
    failure = describe(ended(), logs)
    assert (failure.message, failure.traceback) == ("ValueError: bad", TRACEBACK)


def test_without_a_traceback_the_last_lines_are_shown(logs: WorkerLogs) -> None:
    """A program's usage error is in its last lines, not in a traceback."""
    logs.stderr.write_text("".join(f"line {at}\n" for at in range(30)) + "error: unknown --lr\n\n")
    failure = describe(ended(2), logs)
    assert failure.message == "exited with code 2"
    assert failure.traceback.splitlines()[-1] == "error: unknown --lr"
    assert len(failure.traceback.splitlines()) == 10


def test_a_traceback_of_long_ago_does_not_explain_a_kill(logs: WorkerLogs) -> None:
    """With SIGKILL an hour after a logged exception, the signal is the reason."""
    logs.stderr.write_text(TRACEBACK + "\n" + "step\n" * 1000)
    assert describe(ended(None, signal.SIGKILL), logs).message.startswith("killed by SIGKILL")


@pytest.mark.parametrize("full", [{"f_bavail": 0}, {"f_favail": 0}], ids=str)
def test_a_full_disk_is_reported(
    logs: WorkerLogs, monkeypatch: pytest.MonkeyPatch, full: dict[str, int]
) -> None:
    """A worker that can't print dies because of it, and can't write the reason: its log ends in the middle."""
    counts = {"f_blocks": 10, "f_bavail": 5, "f_files": 10, "f_favail": 5}
    for number, expected in ((counts, False), ({**counts, **full}, True), (dict.fromkeys(counts, 0), False)):
        monkeypatch.setattr(os, "statvfs", lambda _, number=number: SimpleNamespace(**number))
        told = describe(ended(), logs).message
        assert ("no space is left for its logs in" in told) is expected


def test_missing_logs_are_no_problem(tmp_path: Path) -> None:
    """Logs may have been removed, or never made: the exit code is used."""
    for logs in (None, WorkerLogs(tmp_path / "a", tmp_path / "b", tmp_path / "c")):
        failure = describe(ended(None, signal.SIGSEGV), logs)
        assert failure.exit_code == -signal.SIGSEGV
        assert failure.signal_name == "SIGSEGV"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (ended(3), "exited with code 3"),
        (ended(137), "exited with code 137 (from a shell: its child was killed by SIGKILL)"),
        (ended(255), "exited with code 255"),
        (ended(None, 9), "killed by SIGKILL (signal 9)"),
        (
            ended(None, 7),
            "killed by SIGBUS (signal 7); often /dev/shm is full, where data loaders keep tensors",
        ),
        (ended(None, 12), "killed by SIGUSR2 (signal 12)"),
        (ended(None, 40), f"killed by SIGRTMIN+{40 - signal.SIGRTMIN} (signal 40)"),
        (ended(None, 9, inferred=True), "killed because its spawner process died"),
    ],
)
def test_exit_codes_and_signals_are_described(how: WorkerExit, expected: str) -> None:
    """Each end is described by one sentence, with a hint if there is one."""
    assert sentence(how) == expected


def test_an_exit_code_that_is_the_programs_own_is_no_signal(logs: WorkerLogs) -> None:
    """A shell returns 128 + N for a child that signal N killed; for a Python function or program it is its own code."""
    assert sentence(ended(138), own_code=True) == "exited with code 138"
    assert sentence(ended(93), own_code=True).startswith("exited with code 93 (unrecoverable")
    failure = describe_failure(ended(137), logs, rank=3, role="trainer", host="node2", own_code=True)
    assert (failure.message, failure.exit_code, failure.kind) == (
        "exited with code 137",
        137,
        FailureKind.EXIT_CODE,
    )


@pytest.mark.parametrize(
    ("exit_code", "said", "expected"),
    [
        (1, "OSError: [Errno 98] Address already in use", True),
        (
            1,
            "torch.distributed.DistNetworkError: ... code: -98, name: EADDRINUSE, message: address already in use",
            True,
        ),
        (1, 'panicked: Os { code: 98, kind: AddrInUse, message: "Address already in use" }', True),
        (1, "ValueError: bad", False),
        (-6, "OSError: [Errno 98] Address already in use", False),
    ],
)
def test_an_address_in_use_is_found_in_a_failure(exit_code: int, said: str, expected: bool) -> None:
    """The text is in its message, or among its last lines."""
    failure = WorkerFailure(0, 0, "trainer", "node2", 4242, exit_code, ENDED, said)
    assert names_taken_address(failure) is expected
    assert names_taken_address(replace(failure, message="it broke", traceback=said)) is expected


def test_a_port_that_was_taken_comes_before_all_that_it_causes() -> None:
    """Peers fail because of it, perhaps before the worker that could not bind: it counts from the workers' start."""
    failure = WorkerFailure(0, 0, "trainer", "node2", 4242, 1, ENDED, "in use", at=50.0)
    taken = failure_of_port(failure, 61000, 40.0)
    assert (taken.kind, taken.at, taken.time) == (FailureKind.PORT_TAKEN, 40.0, ENDED)
    assert (
        taken.message
        == "another program of this host took MASTER_PORT 61000 before the workers bound it: in use"
    )


def test_message_and_traceback_are_bounded(logs: WorkerLogs) -> None:
    """A long traceback keeps its end, a long message its start, both valid text within their limits."""
    extra = {"py_callstack": "é" * 100_000 + "the end", "timestamp": "1"}
    write_error_file(logs, {"message": {"message": "begins " + "é" * 100_000, "extraInfo": extra}})
    failure = describe(ended(), logs)
    assert MAX_TRACEBACK - 8 <= len(failure.traceback.encode()) <= MAX_TRACEBACK
    assert failure.traceback.startswith("...\né")
    assert failure.traceback.endswith("the end")
    assert MAX_MESSAGE - 8 <= len(failure.message.encode()) <= MAX_MESSAGE
    assert failure.message.startswith("begins é")
    write_error_file(logs, {"message": "two\nlines \ud800"})
    assert describe(ended(), logs).message.startswith("two lines ")
    describe(ended(), logs).message.encode()


def test_a_worker_that_sigkill_did_not_end_has_failed_all_the_same() -> None:
    """No exit was reported; the report has the signal that was sent, and the reason why it had no effect."""
    failure = failure_to_end(
        "it hangs; it outlived\nSIGKILL", pid=7, rank=3, role="trainer", host="n", local_rank=1
    )
    assert (failure.message, failure.exit_code, failure.signal_name) == (
        "it hangs; it outlived SIGKILL",
        -9,
        "SIGKILL",
    )
    assert (failure.pid, failure.rank, failure.local_rank) == (7, 3, 1)
