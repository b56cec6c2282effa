"""A signal is reported as fatal exactly for processes with its default action."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rallypoint.agent.workers.signals import would_end


@pytest.mark.parametrize(
    ("preparation", "fatal"),
    [
        ("", True),
        ("signal.signal(signal.SIGUSR1, print)", False),
        ("signal.signal(signal.SIGUSR1, signal.SIG_IGN)", False),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])", False),
        ("signal.signal(signal.SIGUSR2, print)", True),
    ],
)
def test_the_kernel_shows_which_processes_a_signal_would_end(preparation: str, fatal: bool) -> None:
    """A process that handles, ignores or blocks it lives; a handler of another signal does not count."""
    program = f"import signal; {preparation}; print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert would_end(process.pid, signal.SIGUSR1) is fatal
        process.kill()
    assert not would_end(process.pid, signal.SIGUSR1), "nothing ends whoever is gone"


def status(folder: Path, *threads: int, caught: int = 0, state: str = "S (sleeping)") -> Path:
    """Write the kernel's status files of a process and its threads, with the signals that each thread blocks."""
    process = folder / "7"
    for number, blocked in enumerate(threads, 7):
        text = f"Name:\tworker\nState:\t{state}\nSigBlk:\t{blocked:016x}\nSigIgn:\t{0:016x}\nSigCgt:\t{caught:016x}\n"
        thread = process / "task" / str(number)
        thread.mkdir(parents=True)
        (thread / "status").write_text(text)
    (process / "status").write_text((process / "task/7/status").read_text())
    return folder


USR1 = 1 << (signal.SIGUSR1 - 1)
WHILE_FORKING = 0xFFFF_FFFF_FFFB_FEFF
BY_THE_PROGRAM = 0xFFFF_FFFE_7FFB_FEFF


@pytest.mark.parametrize(
    ("threads", "fatal"),
    [
        ((USR1, USR1), False),
        ((USR1, 0), True),
        ((0, USR1), True),
        # The C library blocks everything, its own two signals too, during a fork.
        ((WHILE_FORKING,), True),
        ((USR1, WHILE_FORKING), True),
        # A program can't: sigfillset(3) leaves those two out. A program that blocks the rest waits for signals.
        ((BY_THE_PROGRAM,), False),
    ],
)
def test_a_signal_is_blocked_if_every_thread_blocks_it_for_good(
    tmp_path: Path, threads: tuple[int, ...], fatal: bool
) -> None:
    """The kernel delivers it to any thread that does not block it; a block during a fork ends soon."""
    assert would_end(7, signal.SIGUSR1, proc=status(tmp_path, *threads)) is fatal


@pytest.mark.parametrize("state", ["R (running)", "D (disk sleep)"])
def test_a_shell_that_forks_does_not_block_for_good(tmp_path: Path, state: str) -> None:
    """It blocks all that a program can; during the fork it runs, or waits in the kernel until its child calls exec."""
    assert would_end(7, signal.SIGUSR1, proc=status(tmp_path, BY_THE_PROGRAM, state=state))


def test_a_handler_counts_also_for_a_blocked_signal(tmp_path: Path) -> None:
    """A worker that forks all the time gets the signals that it handles."""
    assert not would_end(7, signal.SIGUSR1, proc=status(tmp_path, WHILE_FORKING, caught=USR1))


def test_a_worker_in_the_middle_of_a_fork_is_checked_again(tmp_path: Path) -> None:
    """So a worker that blocks the signal permanently is not mistaken for one that the signal would end."""
    proc = status(tmp_path, WHILE_FORKING)
    looks = iter([WHILE_FORKING, USR1])

    class Forking(type(tmp_path)):  # type: ignore[misc]
        def read_text(self, *arguments: Any, **attributes: Any) -> str:
            if self.parent.name == "7" and self.parent.parent.name == "task":
                return f"State:\tR (running)\nSigBlk:\t{next(looks):016x}\n"
            return str(super().read_text(*arguments, **attributes))

    assert not would_end(7, signal.SIGUSR1, proc=Forking(proc))
