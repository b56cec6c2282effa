"""The reason for which a worker failed, found from its exit, its files and the kernel, for a report to people.

The most reliable source comes first: the kernel's record that it killed the worker (out of memory), the error file (our
`record` and torch's write the same), the last traceback in its standard error, and last the signal or exit code.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import sys
import time as clock
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rallypoint.agent.failures.core_dump import CoreDump
from rallypoint.agent.logs.files import read_end
from rallypoint.agent.logs.plan import ERROR_FILE, WorkerLogs
from rallypoint.agent.spawner.protocol import WorkerExit
from rallypoint.rendezvous.core.state import FailureKind
from rallypoint.rpc.text import clip, clip_start

# ---- Meaning of an exit code or a signal, as text.


UNRECOVERABLE = 93
"""Exit code by which a worker reports an error that a restart can't fix, and of a job that ended because of one.
NVIDIA's resiliency extension uses it too."""

_HINTS = {
    signal.SIGSEGV: ": native code accessed invalid memory",
    signal.SIGBUS: "; often /dev/shm is full, where data loaders keep tensors",
    signal.SIGABRT: ": native code aborted; the reason may be at the end of the log",
    signal.SIGFPE: ": native code divided by zero",
    signal.SIGILL: ": native code was built for another processor",
    signal.SIGXCPU: ": its limit of processor time is used up (ulimit -t)",
    signal.SIGXFSZ: ": a file grew past the limit (ulimit -f)",
    signal.SIGTERM: "; another process sent it, not the agent",
}
_KNOWN = {int(number) for number in signal.valid_signals()} & {int(number) for number in signal.Signals}


def signal_name(number: int) -> str:
    """The name of a signal; its number as text if it has none."""
    if signal.SIGRTMIN <= number <= signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def sentence(exit_: WorkerExit, *, own_code: bool = False) -> str:
    """Describe an exit by its code or signal alone.

    Args:
        own_code: True if the program itself chose the exit code: no shell is in between.
    """
    if exit_.inferred:
        return "killed because its spawner process died"
    if exit_.signal is not None:
        hint = _HINTS.get(signal.Signals(exit_.signal), "") if exit_.signal in _KNOWN else ""
        return f"killed by {signal_name(exit_.signal)} (signal {exit_.signal}){hint}"
    code = exit_.exit_code or 0
    if code == UNRECOVERABLE:
        return f"exited with code {code} (unrecoverable error, not restarted)"
    if code - 128 in _KNOWN and not own_code:
        return f"exited with code {code} (from a shell: its child was killed by {signal_name(code - 128)})"
    return f"exited with code {code}"


def short_end(exit_code: int) -> str:
    """Describe an exit in two or three words; an `exit_code` below zero is minus the signal's number."""
    if exit_code < 0:
        return f"killed by {signal_name(-exit_code)}"
    return f"exit code {exit_code}"


# ---- The error file that a worker writes when it fails: by `record`, ours or torch's.


_LARGEST = 4 << 20  # bytes; a longer file is cut off, and then is not valid JSON


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """Content of a worker's error file.

    Attributes:
        message: the exception; empty if the file has none.
        traceback: its traceback; empty likewise.
        permanent: True if the worker reports that a restart can't fix it.
        written: when the file was written, in Unix seconds by the clock of its file system. Finer than the timestamp
            in torch's format, which counts whole seconds, but no finer than the kernel's tick of some milliseconds.
        raised_at: when it was raised, in monotonic seconds of the host; None in a file of torch.
    """

    message: str
    traceback: str
    permanent: bool
    written: float
    raised_at: float | None


def read_error_file(path: Path) -> ErrorRecord | None:
    """Read an error file; None if there is none, or it is not valid."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(_LARGEST))
            written = os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError, RecursionError):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):
        return ErrorRecord(message, "", permanent=False, written=written, raised_at=None)
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    ours = extra.get("rallypoint")
    ours = ours if isinstance(ours, dict) else {}
    text, callstack, raised_at = message.get("message"), extra.get("py_callstack"), ours.get("monotonic")
    return ErrorRecord(
        message=text if isinstance(text, str) else "",
        traceback=callstack.rstrip() if isinstance(callstack, str) else "",
        permanent=ours.get("permanent") is True,
        written=written,
        raised_at=raised_at if isinstance(raised_at, float) and math.isfinite(raised_at) else None,
    )


def write_reply_file(path: str, failure: WorkerFailure | None, detail: str) -> None:
    """Write why a job failed to the file that its launcher's own TORCHELASTIC_ERROR_FILE names; report a failed write.

    As with torchrun, it is the error file of the worker that failed first, with the exit code added. If this host has
    no such file, the same is made from the failure itself.

    Args:
        path: the file; it is overwritten in place, because /dev/termination-log of a pod can't be replaced.
        failure: the first failure; None if it was not a worker's.
        detail: the end of the job in one sentence, for a job without a failure.
    """
    content: dict[str, Any] = {}
    if failure is not None and failure.error_file:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            content = json.loads(Path(failure.error_file).read_bytes())
    if not isinstance(content.get("message"), dict):
        content["message"] = {
            "message": failure.message if failure is not None else detail,
            "extraInfo": {
                "py_callstack": failure.traceback if failure is not None else "",
                "timestamp": str(int(failure.time if failure is not None else clock.time())),
            },
        }
    if failure is not None:
        content["message"]["errorCode"] = failure.exit_code
    try:
        Path(path).write_text(json.dumps(content), encoding="utf-8")
    except OSError as problem:
        sys.stderr.write(f"rallypoint: the error file {path} can't be written: {problem.strerror}\n")


# ---- Search for the traceback that ended a program, in its standard error.


_AFTER = 50  # lines: after the traceback that ends a program come at most a few lines of atexit handlers

# torch.distributed puts "[rank3]: " before every line of an uncaught exception's traceback.
_RANK = re.compile(r"^\[rank\d+\]: ?")
_HEADER = re.compile(r"^(  \+ Exception Group )?Traceback \(most recent call last\):$")
_FATAL = re.compile(r"^Fatal Python error: ")
# A script that Python can't compile has no frames, so its report has no header: it begins with the file and the line.
_NOT_COMPILED = re.compile(r'^  File ".+", line \d+$')
_SYNTAX_ERROR = re.compile(r"^(SyntaxError|IndentationError|TabError)\b")
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


def final_traceback(text: str, *, at_end: bool) -> tuple[str, str] | None:
    """Find the last traceback, with the exceptions it is chained to, or faulthandler's dump.

    Args:
        text: the end of a program's standard error.
        at_end: accept only a traceback near the end of the text. A program that returned 1 most likely died of
            its last exception; one that was killed may have logged it an hour ago.

    Returns:
        The exception's line and the whole block; None if there is none.
    """
    lines = [_RANK.sub("", line.rstrip("\r")) for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    fatal = _last(lines, _FATAL)
    if fatal is not None and len(lines) - fatal <= 10 * _AFTER:
        return lines[fatal], "\n".join(lines[fatal:])
    header = _last_header(lines)
    if header is None:
        return None
    exception = header + 1
    while exception < len(lines) and (not lines[exception] or lines[exception][0].isspace()):
        exception += 1
    group = lines[header].startswith(" ")
    last = exception
    if group:  # everything in a group is indented; its own exception comes after its own frames
        exception = next(
            (at for at in range(header + 1, len(lines)) if re.match(r"^  \| \S", lines[at])), exception
        )
        last = exception
        while last + 1 < len(lines) and lines[last + 1].startswith("  "):
            last += 1
    if exception >= len(lines) or (at_end and len(lines) - last > _AFTER):
        return None  # cut off, or too long ago
    # The exception's text may have more lines; as a rule none of them is empty.
    while last + 1 < len(lines) and lines[last + 1].strip() and last - exception < 10 * _AFTER:
        last += 1
    first = header
    while (earlier := _link_before(lines, first)) is not None:
        first = earlier
    return lines[exception].removeprefix("  | "), "\n".join(lines[first : last + 1])


def _last_header(lines: list[str]) -> int | None:
    header = _last(lines, _HEADER)
    end = _last(lines, _SYNTAX_ERROR)
    start = _last(lines[:end], _NOT_COMPILED) if end is not None else None
    if start is None or start < (header or 0):
        return header
    between = lines[start + 1 : end]
    # Below frames of a traceback, these lines are a part of it.
    below_frame = start > 0 and lines[start - 1].startswith(("    ", '  File "'))
    return header if below_frame or any(line[:1].strip() for line in between) else start


def _last(lines: list[str], pattern: re.Pattern[str]) -> int | None:
    return next((at for at in range(len(lines) - 1, -1, -1) if pattern.match(lines[at])), None)


def _link_before(lines: list[str], header: int) -> int | None:
    """Index of the header of the traceback that this one is chained to; None if there is none."""
    if header < 2 or lines[header - 1] or lines[header - 2] not in _LINKS:
        return None
    return _last(lines[: header - 2], _HEADER)


MAX_TRACEBACK = 16 * 1024
"""Bytes of a traceback that are kept, from its end: the report travels in messages to every node."""

MAX_MESSAGE = 2 * 1024
"""Bytes of a message that are kept, from its beginning."""

COULD_NOT_START = 127
"""Exit code of a worker that never ran; a shell returns it for a program that it can't start."""

RAISED = 1
"""Exit code of a worker that has raised and not ended yet; Python returns it for an exception."""

UNWINDING = 60.0
"""Seconds that a worker may take from writing its error file to its end. If it runs longer, or the kernel kills it
later, the exception is not the reason: it was caught."""

_TAIL = 64 * 1024  # bytes of stderr.log that are searched
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # of terminals; Python 3.13 colours tracebacks
_LAST_LINES = 10


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker's failure, with all that an engineer needs to find its cause.

    Attributes:
        pid: its process id; 0 if it was never started.
        exit_code: its exit code; minus the signal's number if a signal ended it; RAISED if it had not ended yet.
        time: when it failed, in Unix seconds by its host's clock.
        message: the reason, in one line; at most MAX_MESSAGE bytes.
        traceback: its traceback, or if there is none the last lines of its standard error; at most
            MAX_TRACEBACK bytes, the end kept.
        log_file: path of its standard error on its host; empty if there is none.
        permanent: True if the worker itself reports that a restart can't fix it.
        core_file: path of its core dump on its host; empty if none is known.
        node: name of its node in the run; empty until the run has accepted the failure.
        at: when it failed, in monotonic seconds of this host; None for a failure on another host.
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
    kind: FailureKind = FailureKind.UNKNOWN
    permanent: bool = False
    core_file: str = ""
    node: str = field(default="", compare=False)
    at: float | None = field(default=None, compare=False)

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it; None if it returned."""
        return signal_name(-self.exit_code) if self.exit_code < 0 else None

    @property
    def error_file(self) -> str:
        """Path of the error file that gave its reason; empty if there is none, or it is on another host."""
        path = Path(self.log_file).with_name(ERROR_FILE) if self.log_file else None
        if self.kind is FailureKind.EXCEPTION and path is not None and read_error_file(path) is not None:
            return str(path)
        return ""


def earliest(failures: Iterable[WorkerFailure]) -> WorkerFailure | None:
    """The earliest of failures on this host, by its monotonic clock; None if there are none."""
    return min(failures, key=lambda failure: failure.at or 0.0, default=None)


def describe_failure(
    exit_: WorkerExit,
    logs: WorkerLogs | None,
    *,
    rank: int,
    role: str,
    host: str,
    since: float = 0.0,
    starved: str | None = None,
    besides: str = "",
    core: CoreDump | None = None,
    own_code: bool = False,
) -> WorkerFailure:
    """Find out why a worker failed. Reads at most a few megabytes; never raises because of the content of its files.

    Args: as in WorkerFailure, and
        exit_: its exit.
        logs: its files, if it has any.
        since: when it was started, in monotonic seconds.
        starved: sentence that the kernel killed it (out of memory); None if nothing shows that.
        besides: text about other events to be added to the message; may be empty.
        core: result of the search for its core dump; None if its exit leaves none.
        own_code: True if it chose its exit code itself: no shell is in between.
    """
    record = read_error_file(logs.error_file) if logs is not None else None
    tail = _read_tail(logs.stderr) if logs is not None else ""
    message, traceback, at, time = sentence(exit_, own_code=own_code), "", exit_.at, exit_.time
    kind = FailureKind.SIGNAL if exit_.signal is not None else FailureKind.EXIT_CODE
    if record is not None:
        raised_at, raised = _moment(record, since, exit_.at, exit_.time)
        if starved is not None and exit_.at - raised_at > UNWINDING:
            record = None
    if record is not None:
        kind = FailureKind.EXCEPTION
        message, traceback = record.message or message, record.traceback
        # A peer that fails as a consequence may end before the first worker to fail has finished unwinding.
        at, time = raised_at, raised
    elif starved is not None:
        kind, message = FailureKind.OUT_OF_MEMORY, starved
    elif (found := final_traceback(tail, at_end=exit_.exit_code != 1)) is not None:
        message, traceback = found
        kind = kind if exit_.signal is not None else FailureKind.EXCEPTION
    if core is not None and kind is FailureKind.SIGNAL:
        message += core.hint
    if kind is not FailureKind.EXCEPTION or exit_.signal is None:
        message += besides
    if not traceback:
        traceback = "\n".join(tail.rstrip().splitlines()[-_LAST_LINES:])
    if logs is not None and _is_full(logs.stderr.parent):
        # A worker fails at its next print then, and can't write the reason.
        message += f"; no space is left for its logs in {logs.stderr.parent}"
    return WorkerFailure(
        local_rank=exit_.local_rank,
        rank=rank,
        role=role,
        host=host,
        pid=exit_.pid,
        exit_code=exit_.exit_code if exit_.exit_code is not None else -(exit_.signal or 0),
        time=time,
        message=_head(message),
        traceback=_tail(traceback),
        log_file=str(logs.stderr) if logs is not None else "",
        kind=kind,
        permanent=exit_.exit_code == UNRECOVERABLE or (record is not None and record.permanent),
        core_file=core.file if core is not None else "",
        at=at,
    )


def names_taken_address(failure: WorkerFailure) -> bool:
    """True if a worker failed because an address was in use, by its own message: torch, Python and others use these."""
    text = f"{failure.message}\n{failure.traceback}".lower()
    return failure.exit_code > 0 and ("eaddrinuse" in text or "address already in use" in text)


def failure_of_port(failure: WorkerFailure, port: int, started_at: float) -> WorkerFailure:
    """The failure of a worker that could not bind MASTER_PORT, because another program took it.

    Args:
        started_at: when the workers were started, in monotonic seconds; as the time of this failure, it makes the
            failures of peers consequences.
    """
    message = (
        f"another program of this host took MASTER_PORT {port} before the workers bound it: {failure.message}"
    )
    return replace(failure, message=_head(message), kind=FailureKind.PORT_TAKEN, at=started_at)


def failure_under_way(
    record: ErrorRecord,
    logs: WorkerLogs,
    *,
    local_rank: int,
    pid: int,
    rank: int,
    role: str,
    host: str,
    since: float,
    now: float,
    time: float,
) -> WorkerFailure:
    """The failure of a worker that has raised, and has not ended by itself.

    Args: as in WorkerFailure, and
        record: its error file.
        logs: its files.
        since: when it was started, in monotonic seconds.
        now: in monotonic seconds.
        time: the same moment in Unix seconds.
    """
    raised_at, raised = _moment(record, since, now, time)
    return WorkerFailure(
        local_rank=local_rank,
        rank=rank,
        role=role,
        host=host,
        pid=pid,
        exit_code=UNRECOVERABLE if record.permanent else RAISED,
        time=raised,
        message=_head(record.message),
        traceback=_tail(record.traceback),
        log_file=str(logs.stderr),
        kind=FailureKind.EXCEPTION,
        permanent=record.permanent,
        at=raised_at,
    )


def _moment(record: ErrorRecord, since: float, at: float, time: float) -> tuple[float, float]:
    """When it raised, in monotonic and in Unix seconds.

    The worker's own time is exact. The file's time may come from the clock of a file server: a time before the worker's
    start or after its end is ignored, and then its end is the time of the failure.

    Args:
        since: when it was started, in monotonic seconds.
        at: when it ended, likewise.
        time: the same moment in Unix seconds.
    """
    for raised_at in (record.raised_at, at - (time - record.written)):
        if raised_at is not None and since <= raised_at <= at:
            return raised_at, time - (at - raised_at)
    return at, time


def failure_to_start(message: str, *, rank: int, role: str, host: str, local_rank: int = 0) -> WorkerFailure:
    """The failure of a worker that could not be started; its time is now. The arguments are those of WorkerFailure."""
    return WorkerFailure(
        local_rank=local_rank,
        rank=rank,
        role=role,
        host=host,
        pid=0,
        exit_code=COULD_NOT_START,
        time=clock.time(),
        message=_head(message),
        kind=FailureKind.NOT_STARTED,
        at=clock.monotonic(),
    )


def failure_to_end(
    message: str, *, pid: int, rank: int, role: str, host: str, local_rank: int
) -> WorkerFailure:
    """The failure of a worker that SIGKILL did not end; its time is now.

    `message`: why it was killed, and the resource that it waits for. The other arguments are those of WorkerFailure.
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
        kind=FailureKind.HUNG,
        at=clock.monotonic(),
    )


def _is_full(folder: Path) -> bool:
    try:
        usage = os.statvfs(folder)
    except OSError:
        return False
    # Some file systems don't count blocks or files, and report 0.
    return (usage.f_blocks > 0 and usage.f_bavail == 0) or (usage.f_files > 0 and usage.f_favail == 0)


def _read_tail(path: Path) -> str:
    try:
        return _ESCAPES.sub("", read_end(path, _TAIL).decode("utf-8", "replace"))
    except OSError:
        return ""


def _head(message: str) -> str:
    return clip(" ".join(message.splitlines()).strip(), MAX_MESSAGE, "...")


def _tail(text: str) -> str:
    return clip_start(text, MAX_TRACEBACK, "...\n")
