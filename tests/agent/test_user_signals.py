"""A signal is fatal to whoever does nothing about it, and to nobody else."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from rallypoint.agent.user_signals import would_end


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
def test_the_kernel_knows_whom_a_signal_would_end(preparation: str, fatal: bool) -> None:
    """Handled, ignored or blocked: it lives; another signal's handler is none."""
    program = f"import signal; {preparation}; print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert would_end(process.pid, signal.SIGUSR1) is fatal
        process.kill()
    assert not would_end(process.pid, signal.SIGUSR1), "nothing ends whoever is gone"
