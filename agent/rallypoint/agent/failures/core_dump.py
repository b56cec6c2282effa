"""Where the kernel has put a core dump, or how to get one the next time."""

from __future__ import annotations

import glob
import os
import re
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rallypoint.agent.spawner.protocol import WorkerExit

_PATTERN = Path("/proc/sys/kernel/core_pattern")
_ADDS_PID = Path("/proc/sys/kernel/core_uses_pid")

_DUMPING = {
    signal.SIGQUIT,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGSEGV,
    signal.SIGXCPU,
    signal.SIGXFSZ,
    signal.SIGSYS,
}
"""Signals that end a process with a core dump (signal(7))."""


@dataclass(frozen=True, slots=True)
class CoreDump:
    """What is known of a core dump.

    Attributes:
        file: its path; empty if there is none, or none that is known.
        hint: what to add to the sentence that says how the worker ended; may be empty.
    """

    file: str = ""
    hint: str = ""


def find_core_dump(
    how: WorkerExit, *, cwd: Path, rlimits: Mapping[str, tuple[int, int]], started: float
) -> CoreDump | None:
    """Looks for the core dump of a worker; None if it did not end in a way that leaves one.

    Args:
        how: its end.
        cwd: where it was started.
        rlimits: the limits it was started with, beside those of this process.
        started: when, in Unix seconds: an older file is another's.
    """
    if how.signal not in _DUMPING:
        return None
    pattern = _read(_PATTERN)
    limit = rlimits["core"][0] if "core" in rlimits else resource.getrlimit(resource.RLIMIT_CORE)[0]
    return judge(
        pattern,
        how,
        cwd=cwd,
        limit=limit,
        adds_pid=_read(_ADDS_PID) == "1",
        newest=lambda wildcard: _newest(wildcard, started),
    )


def judge(
    pattern: str,
    how: WorkerExit,
    *,
    cwd: Path,
    limit: int,
    adds_pid: bool,
    newest: Callable[[str], str],
) -> CoreDump:
    """Says where a core dump is, or why there is none; core(5) has the rules.

    Args:
        pattern: what the kernel makes names of, /proc/sys/kernel/core_pattern.
        how: the worker's end.
        cwd: where it was started.
        limit: its limit of the size of cores; below zero there is none.
        adds_pid: whether the kernel adds the process id to names without it.
        newest: the newest file that matches a wildcard; empty if none does.
    """
    if pattern.startswith("|"):
        program = os.path.basename(pattern[1:].split(maxsplit=1)[0]) if pattern[1:].strip() else "a program"
        if program == "systemd-coredump":
            return CoreDump(
                hint=f"; for its core dump: coredumpctl info {how.pid}" if how.core_dumped else ""
            )
        return CoreDump(hint=f"; its core dump went to {program}" if how.core_dumped else "")
    if how.core_dumped:
        wildcard = _wildcard(pattern, how, adds_pid)
        if not wildcard.startswith("/"):
            wildcard = os.path.join(glob.escape(str(cwd)), wildcard)
        file = newest(wildcard)
        return CoreDump(file, "" if file else f"; it left a core dump, by core_pattern {pattern!r}")
    if limit == 0:
        return CoreDump(hint="; for a core dump, run with --rlimit core=-1")
    if not pattern:
        return CoreDump(hint="; for a core dump, set kernel.core_pattern, which is empty")
    return CoreDump(hint=f"; it left no core dump: could it write one by core_pattern {pattern!r}?")


def _wildcard(pattern: str, how: WorkerExit, adds_pid: bool) -> str:
    """What matches the names that the kernel makes of a pattern for this process."""
    # The rest needs the process, which is gone, or may be the number of another pid namespace.
    known = {"%": "%", "p": str(how.pid), "s": str(how.signal), "h": socket.gethostname()}
    parts: list[str] = []
    for literal, letter in re.findall(r"([^%]*)(?:%(.?))?", pattern):
        parts.append(glob.escape(literal))
        if letter:
            parts.append(glob.escape(known[letter]) if letter in known else "*")
    if adds_pid and "%p" not in pattern:
        parts.append(f".{how.pid}")
    return "".join(parts)


def _newest(wildcard: str, since: float) -> str:
    found: list[tuple[float, str]] = []
    for path in glob.iglob(wildcard):
        try:
            found.append((os.stat(path).st_mtime, path))
        except OSError:
            continue
    # A second of grace: the time of a file may be of a coarser clock.
    return max((each for each in found if each[0] >= since - 1.0), default=(0.0, ""))[1]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
