"""Whether a signal that somebody passes on would be the end of the process that gets it."""

from __future__ import annotations

import signal
from pathlib import Path

# All that a program can block through its C library, which keeps the lowest two or three of the real-time signals to
# itself: those it blocks too, with all others, for as long as it forks or makes a thread.
_EVERY = sum(
    1 << (number - 1)
    for number in (*range(1, 32), *range(35, 65))
    if number not in (signal.SIGKILL, signal.SIGSTOP)
)
_OF_THE_LIBRARY = 1 << 31 | 1 << 32
_LOOKS = 50


def would_end(pid: int, number: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process neither handles, ignores nor blocks a signal whose default is to kill.

    A scheduler warns a job by a signal as soon as it likes. A worker that is still importing has no handler yet, and
    a shell around the trainer never has one: the warning must not be what ends them.

    Args:
        pid: which process.
        number: which signal.
        proc: where the kernel shows its processes.
    """
    bit = 1 << (number - 1)
    process = proc / str(pid)
    status = _status(process)
    if not status:
        return False  # it is gone, and nothing will reach it
    if (int(status["SigCgt"], 16) | int(status["SigIgn"], 16)) & bit:
        return False
    # One thread that does not block it is enough for it to be taken.
    return not int(status["SigBlk"], 16) & bit or not all(
        _blocks(thread, bit) for thread in process.glob("task/*")
    )


def _blocks(thread: Path, bit: int) -> bool:
    """Whether a thread blocks a signal for good, or is gone.

    Who forks blocks all signals for a moment, and gets what came when it is over: the C library does it, and shells
    do it as well. Who blocks all of them to wait for one (dumb-init does it) sleeps meanwhile, and forks don't.
    """
    for _ in range(_LOOKS):
        status = _status(thread)
        if not status:
            return True
        blocked = int(status["SigBlk"], 16)
        if blocked & _EVERY != _EVERY:
            return bool(blocked & bit)
        if not blocked & _OF_THE_LIBRARY and status["State"].startswith("S"):
            return True
    return False  # it forks a large process, or one after the other


def _status(folder: Path) -> dict[str, str]:
    try:
        lines = folder.joinpath("status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
