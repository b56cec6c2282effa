"""Wait statuses and failed steps are translated into values for the agent and text for people."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest

from rallypoint.agent.spawner.protocol import WorkerSpec, infer_exit, read_exit, read_failure, spawn_request

SPEC = WorkerSpec(2, ["train"], {"PATH": "/bin"}, Path("/work"), Path("/logs/out"), Path("/logs/err"))


def exited(status: int) -> dict[str, float]:
    return {"pid": 5, "status": status, "at": 1.5, "time": 2.5, "user": 0.5, "system": 0.25, "max_rss": 4096}


@pytest.mark.parametrize(
    ("status", "exit_code", "number"),
    [(0, 0, None), (7 << 8, 7, None), (9, None, signal.SIGKILL), (11 | 0x80, None, signal.SIGSEGV)],
)
def test_wait_statuses(status: int, exit_code: int | None, number: int | None) -> None:
    """Exit codes and signals are distinguished, with and without a core dump."""
    how = read_exit(2, exited(status))
    assert (how.local_rank, how.pid, how.exit_code, how.signal) == (2, 5, exit_code, number)
    assert (how.at, how.time, how.user_seconds, how.system_seconds, how.max_rss) == (
        1.5,
        2.5,
        0.5,
        0.25,
        4096,
    )
    assert how.succeeded is (status == 0)
    assert how.core_dumped is bool(status & 0x80)


def test_an_inferred_end_is_no_success() -> None:
    """An exit without a wait status counts as a kill."""
    how = infer_exit(1, 5, at=1.0, time=2.0)
    assert (how.signal, how.inferred, how.succeeded) == (signal.SIGKILL, True, False)


def test_requests_are_json_with_any_bytes() -> None:
    """Undecodable bytes are sent as lone surrogates, which JSON can escape, and arrive unchanged."""
    odd = os.fsdecode(b"\xff\x80")
    request = spawn_request(7, WorkerSpec(0, [odd], {odd: odd}, Path(odd)))
    back = json.loads(json.dumps(request))
    assert back == request
    assert back["argv"][0].encode("utf-8", "surrogateescape") == b"\xff\x80"
    assert (back["stdout"], back["stderr"]) == (None, None)


@pytest.mark.parametrize(
    ("step", "number", "text", "expected"),
    [
        (
            "fork",
            errno.EAGAIN,
            "",
            "no process can be made (Resource temporarily unavailable); raise the limit",
        ),
        ("cwd", errno.ENOENT, "", "cannot enter its working directory '/work' (No such file or directory)"),
        ("stderr", errno.ENOSPC, "", "cannot open its log file '/logs/err' (No space left on device)"),
        ("program", errno.ENOENT, "", "no program 'train' in PATH=/bin; check its name"),
        ("program", errno.EACCES, "", "no executable program 'train' in PATH=/bin; check"),
        ("program", errno.ENOMEM, "", "cannot run 'train' (Cannot allocate memory)"),
        ("program", 0, "embedded null byte", "cannot run 'train' (embedded null byte)"),
        ("session", errno.EPERM, "", "session: Operation not permitted"),
    ],
)
def test_failed_steps_are_explained(step: str, number: int, text: str, expected: str) -> None:
    """The error has the failed step, its object, and a remedy if there is one."""
    error = read_failure(SPEC, {"step": step, "errno": number, "text": text})
    assert str(error).startswith(f"cannot start worker 2: {expected}")
    assert "\n" not in str(error)
    assert error.local_rank == 2
