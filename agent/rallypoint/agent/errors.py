"""Why a worker failed: from how it ended and what it left behind to a report for people.

Best evidence first: the error file (ours and torch's `record` write the same), else the last traceback in its
standard error, else what the signal or exit code says.
"""

from __future__ import annotations

import json
import os
import signal
import time as clock
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import NamedTuple

from rallypoint.agent.logs import WorkerLogs
from rallypoint.agent.spawn_protocol import WorkerExit
from rallypoint.agent.tracebacks import final_traceback

MAX_TRACEBACK = 16 * 1024
"""Bytes of a traceback that are kept, from its end: the report travels in messages to every node."""

MAX_MESSAGE = 2 * 1024
"""Bytes of a message that are kept, from its beginning."""

_TAIL = 64 * 1024  # bytes of stderr.log that are searched
_MAX_ERROR_FILE = 4 << 20
_LAST_LINES = 10

COULD_NOT_START = 127
"""Exit code of a worker that never ran; what a shell says of a program it can't start."""

_SIGNAL_HINTS = {
    signal.SIGKILL: "; if nobody sent it, the kernel's OOM killer may have: see dmesg",
    signal.SIGSEGV: ": native code touched memory that isn't its own",
    signal.SIGBUS: "; often /dev/shm is full, where data loaders keep tensors",
    signal.SIGABRT: ": native code gave up; its reason may be the last thing in the log",
    signal.SIGFPE: ": native code divided by zero",
    signal.SIGILL: ": native code was built for another processor",
    signal.SIGXCPU: ": its limit of processor time is used up (ulimit -t)",
    signal.SIGXFSZ: ": a file grew past the limit (ulimit -f)",
    signal.SIGTERM: "; something other than its agent asked it to stop",
}


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker's failure, complete enough to mend it.

    Attributes:
        local_rank: its place among the workers of its host.
        rank: its place in the round.
        role: its role.
        host: name of its host.
        pid: its process id; 0 if it was never started.
        exit_code: what it returned; minus the signal's number if a signal ended it.
        time: when it failed, in Unix seconds by its host's clock.
        message: what happened, in one line; at most MAX_MESSAGE bytes.
        traceback: its traceback, or where there is none the last lines of its standard error; at most
            MAX_TRACEBACK bytes, the end kept.
        log_file: path of its standard error on its host; empty if there is none.
    """

    local_rank: int
    rank: int
    role: str
    host: str
    pid: int
    exit_code: int
    time: float
    message: str
    traceback: str = ""
    log_file: str = ""

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it; None if it returned."""
        return signal_name(-self.exit_code) if self.exit_code < 0 else None


def describe_failure(
    how: WorkerExit, logs: WorkerLogs | None, *, rank: int, role: str, host: str
) -> WorkerFailure:
    """Finds out why a worker failed. Reads at most a few megabytes; never raises for what it finds there.

    Args:
        how: its end.
        logs: its files, if it has any.
        rank: its place in the round.
        role: its role.
        host: name of this host.
    """
    told = _read_error_file(logs.error_file) if logs is not None else None
    tail = _read_tail(logs.stderr) if logs is not None else ""
    message, traceback, time = sentence(how), "", how.time
    if told is not None:
        message, traceback = told.message or message, told.traceback
        # A peer that fails of the consequences may be gone before the first to fail has finished unwinding.
        time = min(time, told.time)
    elif (found := final_traceback(tail, at_end=how.exit_code != 1)) is not None:
        message, traceback = found
    if not traceback:
        traceback = "\n".join(tail.rstrip().splitlines()[-_LAST_LINES:])
    if logs is not None and _is_full(logs.stderr.parent):
        # A worker dies of that at its next print, and can't write down why.
        message += f"; no space is left for its logs in {logs.stderr.parent}"
    return WorkerFailure(
        local_rank=how.local_rank,
        rank=rank,
        role=role,
        host=host,
        pid=how.pid,
        exit_code=how.exit_code if how.exit_code is not None else -(how.signal or 0),
        time=time,
        message=_head(message),
        traceback=_tail(traceback),
        log_file=str(logs.stderr) if logs is not None else "",
    )


def failure_to_start(
    message: str, *, rank: int, role: str, host: str, local_rank: int = 0, time: float | None = None
) -> WorkerFailure:
    """A worker that could not be started at all.

    Args:
        message: why, in one line.
        rank: its place in the round.
        role: its role.
        host: name of this host.
        local_rank: its place among the workers of this host.
        time: when, in Unix seconds; None for now.
    """
    return WorkerFailure(
        local_rank=local_rank,
        rank=rank,
        role=role,
        host=host,
        pid=0,
        exit_code=COULD_NOT_START,
        time=clock.time() if time is None else time,
        message=_head(message),
    )


def failure_to_end(
    message: str, *, pid: int, rank: int, role: str, host: str, local_rank: int
) -> WorkerFailure:
    """A worker that SIGKILL did not end; it has failed all the same, from now on.

    Args:
        message: why it was killed, and what it waits for.
        pid: its process.
        rank: its place in the round.
        role: its role.
        host: name of this host.
        local_rank: its place among the workers of this host.
    """
    return WorkerFailure(
        local_rank=local_rank,
        rank=rank,
        role=role,
        host=host,
        pid=pid,
        exit_code=-signal.SIGKILL,
        time=clock.time(),
        message=_head(message),
    )


def signal_name(number: int) -> str:
    """The name of a signal; its number as text if it has none."""
    if signal.SIGRTMIN <= number <= signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def sentence(how: WorkerExit) -> str:
    """Says what an exit code or signal by itself tells."""
    if how.inferred:
        return "killed because its spawner process died"
    if how.signal is not None:
        hint = _SIGNAL_HINTS.get(signal.Signals(how.signal), "") if how.signal in _KNOWN else ""
        return f"killed by {signal_name(how.signal)} (signal {how.signal}){hint}"
    code = how.exit_code or 0
    if code - 128 in _KNOWN:
        return (
            f"exited with code {code}, a shell's word for: its child was killed by {signal_name(code - 128)}"
        )
    return f"exited with code {code}"


_KNOWN = {int(number) for number in signal.valid_signals()} & {int(number) for number in signal.Signals}


def render(failure: WorkerFailure, zone: tzinfo | None = None) -> str:
    """Makes the report that a person reads at the end of a run.

    Args:
        failure: what to report.
        zone: time zone to show the time in; None for this host's.
    """
    when = datetime.fromtimestamp(failure.time, UTC).astimezone(zone)
    how = (
        f"killed by {failure.signal_name} (signal {-failure.exit_code})"
        if failure.exit_code < 0
        else str(failure.exit_code)
    )
    rows = [
        ("rank", f"{failure.rank} (local rank {failure.local_rank}, role {failure.role})"),
        ("host", failure.host),
        ("pid", str(failure.pid) if failure.pid else "never started"),
        ("exit code", how),
        ("time", f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03} {when:%Z (UTC%z)}"),
        ("reason", failure.message),
    ]
    if failure.log_file:
        rows.append(("log", failure.log_file))
    report = "\n".join(f"  {name:<9}  {value}" for name, value in rows)
    if failure.traceback:
        report += "\n\n" + "\n".join(f"  {line}".rstrip() for line in failure.traceback.splitlines())
    return report.translate(_HARMLESS)


# A log may hold escape sequences; in a report they would only move the reader's cursor about.
_HARMLESS = {code: "?" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}


class _Told(NamedTuple):
    message: str
    traceback: str
    time: float


def _read_error_file(path: Path) -> _Told | None:
    """Reads what `record` wrote; None if there is nothing, or nothing that makes sense."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(_MAX_ERROR_FILE))
            # Finer than the file's own timestamp, which counts whole seconds.
            written = os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError, RecursionError):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):
        return _Told(message, "", written)
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    callstack = extra.get("py_callstack") if isinstance(extra, dict) else None
    text = message.get("message")
    return _Told(
        text if isinstance(text, str) else "",
        callstack.rstrip() if isinstance(callstack, str) else "",
        written,
    )


def _is_full(folder: Path) -> bool:
    try:
        place = os.statvfs(folder)
    except OSError:
        return False
    # Some file systems don't count, and report nothing at all.
    return (place.f_blocks > 0 and place.f_bavail == 0) or (place.f_files > 0 and place.f_favail == 0)


def _read_tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            return file.read(_TAIL).decode("utf-8", "replace")
    except OSError:
        return ""


def _head(message: str) -> str:
    raw = " ".join(message.splitlines()).strip().encode("utf-8", "replace")  # lone surrogates can't travel
    if len(raw) <= MAX_MESSAGE:
        return raw.decode()
    return raw[: MAX_MESSAGE - 3].decode("utf-8", "ignore") + "..."


def _tail(text: str) -> str:
    raw = text.encode("utf-8", "replace")
    if len(raw) <= MAX_TRACEBACK:
        return raw.decode()
    mark = "...\n"
    return mark + raw[len(mark) - MAX_TRACEBACK :].decode("utf-8", "ignore")
