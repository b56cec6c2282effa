"""Lets the agent ask a worker where its threads are, even while it hangs."""

from __future__ import annotations

import fcntl
import os
import signal

STACKS_VARIABLE = "RALLYPOINT_STACKS"
"""The agent sets it for its workers: the path of a FIFO that it reads."""

STACK_SIGNAL = signal.SIGRTMIN + 7
"""At this signal a worker writes the Python stack of each of its threads into the FIFO."""

# The FIFO's descriptor, once it was tried: the handler holds on to it without counting it as in use.
_pipe: int | None = None
_NONE = -1
# A program that closes all descriptors doesn't know that the handler has this one. What it opens next gets the
# lowest numbers, so that the handler finds none of it at this one. The usual limit is 1,024.
_FAR = 900


def offer_stacks() -> None:
    """Has this process answer STACK_SIGNAL from now on. Once per process; harmless if it can't be done.

    A program that has a handler of its own for the signal, or ignores it, keeps that. A forked child goes on
    answering, into the same FIFO.
    """
    global _pipe  # noqa: PLW0603 - signal handlers are the process's, too
    path = os.environ.get(STACKS_VARIABLE)
    if _pipe is not None or not path:
        return
    _pipe = _NONE
    try:
        # Part of the interpreter, but not of every one.
        import faulthandler  # noqa: PLC0415

        if _is_free(STACK_SIGNAL):
            # Non-blocking: neither opening it nor writing stacks waits for an agent that doesn't read.
            _pipe = _moved_away(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            faulthandler.register(STACK_SIGNAL, file=_pipe, all_threads=True, chain=False)
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError):
        # Nobody reads the FIFO, or no files are left: the agent gets stacks elsewhere, or none.
        return


def _moved_away(descriptor: int) -> int:
    try:
        far = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FAR)
    except OSError:
        # This process may not have so many.
        return descriptor
    os.close(descriptor)
    return far


def _is_free(number: int) -> bool:
    """Whether a signal has its default action, by the kernel's word: C code has handlers Python can't see."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigIgn:", "SigCgt:"))]
    return not any(mask >> number - 1 & 1 for mask in masks)
