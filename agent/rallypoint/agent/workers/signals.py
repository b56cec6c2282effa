"""Predicts if a signal that the agent passes on would kill the process that gets it."""

from __future__ import annotations

import signal
from pathlib import Path

from rallypoint.rpc.text import text_in

# All signals that a program can block through its C library. The library reserves the lowest two or three real-time
# signals for itself; it blocks those too, with all others, while it forks or makes a thread.
_BLOCKABLE = sum(
    1 << (number - 1)
    for number in (*range(1, 32), *range(35, 65))
    if number not in (signal.SIGKILL, signal.SIGSTOP)
)
_LIBRARY_SIGNALS = 1 << 31 | 1 << 32
_MAX_READS = 50


def would_end(pid: int, number: int, proc: Path = Path("/proc")) -> bool:
    """True if a process neither handles, ignores nor blocks a signal whose default is to kill.

    A scheduler may send its warning signal at any time. A worker that is still importing has no handler yet, and a
    shell around the trainer never has one: the warning must not kill them.

    Args:
        proc: mount point of procfs.
    """
    bit = 1 << (number - 1)
    process = proc / str(pid)
    status = _status(process)
    if not status:
        return False  # the process is gone
    if (int(status["SigCgt"], 16) | int(status["SigIgn"], 16)) & bit:
        return False
    # The kernel delivers it if at least one thread does not block it.
    return not int(status["SigBlk"], 16) & bit or not all(
        _blocks(thread, bit) for thread in process.glob("task/*")
    )


def _blocks(thread: Path, bit: int) -> bool:
    """True if a thread blocks a signal permanently, or is gone.

    A fork blocks all signals for a moment and delivers them afterwards (the C library does it, and shells too). A
    program that blocks all signals to wait for one (dumb-init) sleeps meanwhile; a forking one does not.
    """
    for _ in range(_MAX_READS):
        status = _status(thread)
        if not status:
            return True
        blocked = int(status["SigBlk"], 16)
        if blocked & _BLOCKABLE != _BLOCKABLE:
            return bool(blocked & bit)
        if not blocked & _LIBRARY_SIGNALS and status["State"].startswith("S"):
            return True
    return False  # it forks a large process, or forks repeatedly


def _status(folder: Path) -> dict[str, str]:
    lines = text_in(folder / "status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
