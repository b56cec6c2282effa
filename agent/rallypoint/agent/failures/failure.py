"""Why a worker failed: from how it ended and what it left behind to a report for people.

Best evidence first: the kernel's word that it killed it for want of memory, the error file (ours and torch's `record`
write the same), the last traceback in its standard error, and at last what the signal or exit code says.
"""

from __future__ import annotations

import enum
import json
import math
import os
import re
import signal
import time as clock
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rallypoint.agent.failures.core_dump import CoreDump
from rallypoint.agent.logs.files import read_end
from rallypoint.agent.logs.plan import WorkerLogs
from rallypoint.agent.spawner.protocol import WorkerExit

# ---- What an exit code or a signal by itself tells, in words.


UNRECOVERABLE = 93
"""Exit code of a worker that no restart can mend, as it says itself, and of a job that ended for that. NVIDIA's
resiliency extension has it too."""

_HINTS = {
    signal.SIGSEGV: ": native code touched memory that isn't its own",
    signal.SIGBUS: "; often /dev/shm is full, where data loaders keep tensors",
    signal.SIGABRT: ": native code gave up; its reason may be the last thing in the log",
    signal.SIGFPE: ": native code divided by zero",
    signal.SIGILL: ": native code was built for another processor",
    signal.SIGXCPU: ": its limit of processor time is used up (ulimit -t)",
    signal.SIGXFSZ: ": a file grew past the limit (ulimit -f)",
    signal.SIGTERM: "; something other than its agent asked it to stop",
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


def sentence(how: WorkerExit, *, own_code: bool = False) -> str:
    """Says what an exit code or signal by itself tells.

    Args:
        how: The end.
        own_code: Whether an exit code is what the program itself chose, since no shell is in between.
    """
    if how.inferred:
        return "killed because its spawner process died"
    if how.signal is not None:
        hint = _HINTS.get(signal.Signals(how.signal), "") if how.signal in _KNOWN else ""
        return f"killed by {signal_name(how.signal)} (signal {how.signal}){hint}"
    code = how.exit_code or 0
    if code == UNRECOVERABLE:
        return f"exited with code {code}: as it says, no restart can mend it"
    if code - 128 in _KNOWN and not own_code:
        return (
            f"exited with code {code}, a shell's word for: its child was killed by {signal_name(code - 128)}"
        )
    return f"exited with code {code}"


def short_end(exit_code: int) -> str:
    """How a worker ended, in two or three words; `exit_code` below zero is minus the signal's number."""
    if exit_code < 0:
        return f"killed by {signal_name(-exit_code)}"
    return f"exit code {exit_code}"


# ---- What a worker has written down of its failure: the error file of `record`, ours or torch's.


_LARGEST = 4 << 20  # bytes; what is longer is cut off, and then makes no sense


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """A worker's own words.

    Attributes:
        message: what was raised; empty if it does not say.
        traceback: where; empty likewise.
        permanent: whether it says that no restart can mend it.
        written: when the file was written, in Unix seconds by the clock of its file system. Finer than the timestamp
            in torch's format, which counts whole seconds, but no finer than the kernel's tick of some milliseconds.
        raised_at: when it was raised, in monotonic seconds of the host; None in a file of torch's.
    """

    message: str
    traceback: str
    permanent: bool
    written: float
    raised_at: float | None


def read_error_file(path: Path) -> ErrorRecord | None:
    """Reads an error file; None if there is nothing, or nothing that makes sense."""
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


# ---- Finds the traceback that ended a program in what it wrote to standard error.


_AFTER = 50  # lines: what follows the traceback of a program's end is a few words of atexit handlers

# torch.distributed puts "[rank3]: " before every line of an uncaught exception's traceback.
_RANK = re.compile(r"^\[rank\d+\]: ?")
_HEADER = re.compile(r"^(  \+ Exception Group )?Traceback \(most recent call last\):$")
_FATAL = re.compile(r"^Fatal Python error: ")
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


def final_traceback(text: str, *, at_end: bool) -> tuple[str, str] | None:
    """Finds the last traceback, with the exceptions it is chained to, or faulthandler's dump.

    Args:
        text: the end of a program's standard error.
        at_end: whether only one near the end of the text counts. A program that returned 1 most likely died of
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
    header = _last(lines, _HEADER)
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


def _last(lines: list[str], pattern: re.Pattern[str]) -> int | None:
    return next((at for at in range(len(lines) - 1, -1, -1) if pattern.match(lines[at])), None)


def _link_before(lines: list[str], header: int) -> int | None:
    """Where the traceback begins of which this one is the consequence."""
    if header < 2 or lines[header - 1] or lines[header - 2] not in _LINKS:
        return None
    return _last(lines[: header - 2], _HEADER)


MAX_TRACEBACK = 16 * 1024
"""Bytes of a traceback that are kept, from its end: the report travels in messages to every node."""

MAX_MESSAGE = 2 * 1024
"""Bytes of a message that are kept, from its beginning."""

COULD_NOT_START = 127
"""Exit code of a worker that never ran; what a shell says of a program it can't start."""

RAISED = 1
"""Exit code of a worker that has raised and not ended yet; what Python returns for an exception."""

UNWINDING = 60.0
"""Seconds that a worker may take from writing its error file to its end. Of one that goes on for longer, or is killed
by the kernel later, the exception is not the reason: it was caught."""

_TAIL = 64 * 1024  # bytes of stderr.log that are searched
_LAST_LINES = 10


class FailureKind(enum.Enum):
    """What kind of end a worker had; the names are those of the protocol."""

    UNSPECIFIED = "unknown"
    EXCEPTION = "exception"
    EXIT_CODE = "exit_code"
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out_of_memory"
    HUNG = "hung"
    NOT_STARTED = "not_started"
    PORT_TAKEN = "port_taken"


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker's failure, complete enough to mend it.

    Attributes:
        local_rank: its place among the workers of its host.
        rank: its place in the round.
        role: its role.
        host: name of its host.
        pid: its process id; 0 if it was never started.
        exit_code: what it returned; minus the signal's number if a signal ended it; RAISED if it had not ended yet.
        time: when it failed, in Unix seconds by its host's clock.
        message: what happened, in one line; at most MAX_MESSAGE bytes.
        traceback: its traceback, or where there is none the last lines of its standard error; at most
            MAX_TRACEBACK bytes, the end kept.
        log_file: path of its standard error on its host; empty if there is none.
        kind: what kind of end it had.
        permanent: whether no restart can mend it, as the worker itself says.
        core_file: path of its core dump on its host; empty if there is none that is known.
        node: name of its node in the run; empty until the run has taken the failure.
        at: when it failed, in monotonic seconds of this host; None for a failure on another one.
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
    kind: FailureKind = FailureKind.UNSPECIFIED
    permanent: bool = False
    core_file: str = ""
    node: str = field(default="", compare=False)
    at: float | None = field(default=None, compare=False)

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it; None if it returned."""
        return signal_name(-self.exit_code) if self.exit_code < 0 else None


def earliest(failures: Iterable[WorkerFailure]) -> WorkerFailure | None:
    """The failure of this host's that came first, by its monotonic clock; None of none."""
    return min(failures, key=lambda failure: failure.at or 0.0, default=None)


def describe_failure(
    how: WorkerExit,
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
    """Finds out why a worker failed. Reads at most a few megabytes; never raises for what it finds there.

    Args:
        how: its end.
        logs: its files, if it has any.
        rank: its place in the round.
        role: its role.
        host: name of this host.
        since: when it was started, in monotonic seconds.
        starved: that the kernel killed it for want of memory, in a sentence; None if it is not known to have.
        besides: what else happened meanwhile, to be added to the message; may be empty.
        core: what is known of its core dump; None if its end leaves none.
        own_code: whether its exit code is what it chose itself, since no shell is in between.
    """
    story = read_error_file(logs.error_file) if logs is not None else None
    tail = _read_tail(logs.stderr) if logs is not None else ""
    message, traceback, at, time = sentence(how, own_code=own_code), "", how.at, how.time
    kind = FailureKind.SIGNAL if how.signal is not None else FailureKind.EXIT_CODE
    if story is not None:
        raised_at, raised = _moment(story, since, how.at, how.time)
        if starved is not None and how.at - raised_at > UNWINDING:
            story = None
    if story is not None:
        kind = FailureKind.EXCEPTION
        message, traceback = story.message or message, story.traceback
        # A peer that fails of the consequences may be gone before the first to fail has finished unwinding.
        at, time = raised_at, raised
    elif starved is not None:
        kind, message = FailureKind.OUT_OF_MEMORY, starved
    elif (found := final_traceback(tail, at_end=how.exit_code != 1)) is not None:
        message, traceback = found
        kind = kind if how.signal is not None else FailureKind.EXCEPTION
    if core is not None and kind is FailureKind.SIGNAL:
        message += core.hint
    if kind is not FailureKind.EXCEPTION or how.signal is None:
        message += besides
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
        kind=kind,
        permanent=how.exit_code == UNRECOVERABLE or (story is not None and story.permanent),
        core_file=core.file if core is not None else "",
        at=at,
    )


def names_taken_address(failure: WorkerFailure) -> bool:
    """Whether a worker failed since an address was in use, as it says itself: torch, Python and others say it so."""
    said = f"{failure.message}\n{failure.traceback}".lower()
    return failure.exit_code > 0 and ("eaddrinuse" in said or "address already in use" in said)


def failure_of_port(failure: WorkerFailure, port: int, started_at: float) -> WorkerFailure:
    """The failure of a worker that could not bind MASTER_PORT, since another program took it.

    Args:
        failure: what is known of it.
        port: MASTER_PORT.
        started_at: when the workers were started, in monotonic seconds: what peers fail of is a consequence.
    """
    message = (
        f"another program of this host took MASTER_PORT {port} before the workers bound it: {failure.message}"
    )
    return replace(failure, message=_head(message), kind=FailureKind.PORT_TAKEN, at=started_at)


def failure_under_way(
    story: ErrorRecord,
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
    """The failure of a worker that has raised, and has not come to its end by itself.

    Args:
        story: what it says.
        logs: its files.
        local_rank: its place among the workers of this host.
        pid: its process.
        rank: its place in the round.
        role: its role.
        host: name of this host.
        since: when it was started, in monotonic seconds.
        now: in monotonic seconds.
        time: the same moment in Unix seconds.
    """
    raised_at, raised = _moment(story, since, now, time)
    return WorkerFailure(
        local_rank=local_rank,
        rank=rank,
        role=role,
        host=host,
        pid=pid,
        exit_code=UNRECOVERABLE if story.permanent else RAISED,
        time=raised,
        message=_head(story.message),
        traceback=_tail(story.traceback),
        log_file=str(logs.stderr),
        kind=FailureKind.EXCEPTION,
        permanent=story.permanent,
        at=raised_at,
    )


def _moment(story: ErrorRecord, since: float, at: float, time: float) -> tuple[float, float]:
    """When it raised, in monotonic and in Unix seconds.

    What the worker says itself is exact. The time of the file may be that of a file server, whose clock is another:
    what lies before the worker's start or past its end counts for nothing, and the end is when it failed.

    Args:
        story: what it says.
        since: when it was started, in monotonic seconds.
        at: when it ended, likewise.
        time: the same moment in Unix seconds.
    """
    for raised_at in (story.raised_at, at - (time - story.written)):
        if raised_at is not None and since <= raised_at <= at:
            return raised_at, time - (at - raised_at)
    return at, time


def failure_to_start(
    message: str,
    *,
    rank: int,
    role: str,
    host: str,
    local_rank: int = 0,
    time: float | None = None,
    at: float | None = None,
) -> WorkerFailure:
    """A worker that could not be started at all.

    Args:
        message: why, in one line.
        rank: its place in the round.
        role: its role.
        host: name of this host.
        local_rank: its place among the workers of this host.
        time: when, in Unix seconds; None for now.
        at: the same in monotonic seconds; None for now.
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
        kind=FailureKind.NOT_STARTED,
        at=clock.monotonic() if at is None else at,
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
        kind=FailureKind.HUNG,
        at=clock.monotonic(),
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
        return read_end(path, _TAIL).decode("utf-8", "replace")
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
