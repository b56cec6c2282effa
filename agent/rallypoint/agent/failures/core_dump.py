"""Search for a worker's core dump, with advice how to get one the next time."""

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
from rallypoint.rpc.text import text_in

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
    """Result of the search for a core dump.

    Attributes:
        file: its path; empty if there is none, or it is unknown.
        hint: addition to the sentence about the worker's end; may be empty.
    """

    file: str = ""
    hint: str = ""


def find_core_dump(
    exit_: WorkerExit, *, cwd: Path, rlimits: Mapping[str, tuple[int, int]], started: float
) -> CoreDump | None:
    """Look for the core dump of a worker; None if it did not end in a way that leaves one.

    Args:
        rlimits: its resource limits, where they differ from those of this process.
        started: when it was started, in Unix seconds: an older file belongs to another process.
    """
    if exit_.signal not in _DUMPING:
        return None
    pattern = text_in(_PATTERN)
    limit = rlimits["core"][0] if "core" in rlimits else resource.getrlimit(resource.RLIMIT_CORE)[0]
    return judge(
        pattern,
        exit_,
        cwd=cwd,
        limit=limit,
        adds_pid=text_in(_ADDS_PID) == "1",
        newest=lambda wildcard: _newest(wildcard, started),
    )


def judge(
    pattern: str, exit_: WorkerExit, *, cwd: Path, limit: int, adds_pid: bool, newest: Callable[[str], str]
) -> CoreDump:
    """Return the path of a core dump, or the reason why there is none; core(5) has the rules.

    Args:
        pattern: the kernel's pattern for names of core dumps, /proc/sys/kernel/core_pattern.
        limit: its limit of the size of cores; below zero: no limit.
        adds_pid: True if the kernel adds the process id to names without it.
        newest: returns the newest file that matches a wildcard; empty if none does.
    """
    if pattern.startswith("|"):
        program = os.path.basename(pattern[1:].split(maxsplit=1)[0]) if pattern[1:].strip() else "a program"
        if program == "systemd-coredump":
            return CoreDump(
                hint=f"; for its core dump: coredumpctl info {exit_.pid}" if exit_.core_dumped else ""
            )
        return CoreDump(hint=f"; its core dump went to {program}" if exit_.core_dumped else "")
    if exit_.core_dumped:
        wildcard = _wildcard(pattern, exit_, adds_pid)
        if not wildcard.startswith("/"):
            wildcard = os.path.join(glob.escape(str(cwd)), wildcard)
        file = newest(wildcard)
        return CoreDump(
            file, "" if file else f"; it left a core dump that was not found (core_pattern {pattern!r})"
        )
    if limit == 0:
        return CoreDump(hint="; for a core dump, run with --rlimit core=-1")
    if not pattern:
        return CoreDump(hint="; for a core dump, set kernel.core_pattern, which is empty")
    return CoreDump(hint=f"; it left no core dump: check that it can write to core_pattern {pattern!r}")


def _wildcard(pattern: str, exit_: WorkerExit, adds_pid: bool) -> str:
    """A wildcard that matches the names that the kernel makes from a pattern for this process."""
    # The other letters need the process, which is gone, or may be its number in another pid namespace.
    known = {"%": "%", "p": str(exit_.pid), "s": str(exit_.signal), "h": socket.gethostname()}
    parts: list[str] = []
    for literal, letter in re.findall(r"([^%]*)(?:%(.?))?", pattern):
        parts.append(glob.escape(literal))
        if letter:
            parts.append(glob.escape(known[letter]) if letter in known else "*")
    if adds_pid and "%p" not in pattern:
        parts.append(f".{exit_.pid}")
    return "".join(parts)


def _newest(wildcard: str, since: float) -> str:
    found: list[tuple[float, str]] = []
    for path in glob.iglob(wildcard):
        try:
            found.append((os.stat(path).st_mtime, path))
        except OSError:
            continue
    # One second of tolerance: the time of a file may come from a coarser clock.
    return max((each for each in found if each[0] >= since - 1.0), default=(0.0, ""))[1]
