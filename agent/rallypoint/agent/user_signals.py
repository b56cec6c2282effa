"""Whether a signal that somebody passes on would be the end of the process that gets it."""

from __future__ import annotations

from pathlib import Path


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
    try:
        lines = proc.joinpath(str(pid), "status").read_text().splitlines()
    except OSError:
        return False  # it is gone, and nothing will reach it
    masks = dict(line.split(":", 1) for line in lines if line.startswith(("SigCgt:", "SigIgn:", "SigBlk:")))
    return bool(masks) and not any(int(mask, 16) & bit for mask in masks.values())
