"""What an exit code or a signal by itself tells, in words."""

from __future__ import annotations

import signal

from rallypoint.agent.spawn_protocol import WorkerExit

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
