"""A Python process that hangs in the requested way, like a worker with a timer: hung_process.py PIPE WAY.

PIPE: the pipe for stacks, written at STACK_SIGNAL; empty: no stacks are written. WAY: `lock`, `gil`, `stopped`,
`computing`, `pool` (the main thread sleeps while another computes), `silent` (catches the signal, writes nothing).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMIN + 7


@contextlib.contextmanager
def hung(pipe: Path | None, way: str, *options: str) -> Iterator[int]:
    """Start a process and wait until it is about to hang; yield its PID, and kill it afterwards."""
    command = [sys.executable, *options, __file__, str(pipe or ""), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


def wait_in_a_lock() -> None:
    """Wait for ever for a lock that this thread holds."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def compute() -> None:
    """Compute for ever."""
    while True:
        pass


def hold_the_gil() -> None:
    """Sleep in C without releasing the GIL."""
    ctypes.PyDLL(None).sleep(3600)


def stop() -> None:
    """Stop this process, as a debugger or a batch system that suspends jobs would do."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)


def sleep_beside_a_pool() -> None:
    """Sleep in the main thread while another thread computes."""
    threading.Thread(target=compute, daemon=True).start()
    time.sleep(3600)


def _main() -> None:
    pipe, way = sys.argv[1:]
    if way == "silent":
        signal.signal(STACK_SIGNAL, lambda _number, _frame: None)
    elif pipe:
        faulthandler.register(STACK_SIGNAL, file=os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), all_threads=True)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    ways = {"gil": hold_the_gil, "stopped": stop, "computing": compute, "pool": sleep_beside_a_pool}
    ways.get(way, wait_in_a_lock)()


if __name__ == "__main__":
    _main()
