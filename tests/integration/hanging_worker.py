"""A worker that hangs inside of `expires`, in a chosen way: hanging_worker.py FOLDER WAY RANK AFTER [SIGNAL].

SIGNAL is the argument `signal` of `expires`, or `unguarded`: without `expires`, and without importing rallypoint.
In round 1, the worker of that rank hangs; all others, and all of later rounds, wait until FOLDER/finish exists.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER, WAY = Path(sys.argv[1]), sys.argv[2]
RANK, ROUND = int(os.environ["RANK"]), int(os.environ["RALLYPOINT_ROUND"])
MEANT = ROUND == 1 and int(sys.argv[3]) == RANK
AFTER = float(sys.argv[4])
SIGNAL = sys.argv[5] if len(sys.argv) > 5 else ""


def say(event: str, **fields: Any) -> None:
    """Print a line of JSON in one write."""
    line = {"event": event, "rank": RANK, "round": ROUND, "pid": os.getpid(), "at": time.time(), **fields}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def wait() -> None:
    """Wait until the test creates the file `finish`."""
    while not (FOLDER / "finish").exists():
        time.sleep(0.02)


def sleep_with_the_gil() -> None:
    """Sleep in C, like a library that does not release the GIL."""
    ctypes.PyDLL(None).sleep(3600)


def match_catastrophically() -> None:
    """Match a regular expression that backtracks forever, with the GIL held."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def wait_in_a_lock() -> None:
    """Deadlock."""
    lock = threading.Lock()
    with lock, lock:
        pass


def stop_itself() -> None:
    """Stop this process, as a batch system that suspends jobs does."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)


def sleep_beside_others() -> None:
    """Sleep while another thread computes, so that the process looks alive."""

    def compute() -> None:
        while True:
            sum(range(1000))

    threading.Thread(target=compute, daemon=True).start()
    time.sleep(3600)


def start_a_child() -> subprocess.Popen[bytes]:
    """Start a child in its own session, before the timer, which may be too short for that."""
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    say("child", child=child.pid)
    return child


def wait_for_a_child() -> None:
    """Wait for a child that does not end."""
    assert CHILD is not None
    CHILD.wait()


CHILD = start_a_child() if MEANT and WAY == "child" else None


def open_checkpoint() -> int:
    """Open a file on a disk, and wait until the test has frozen it."""
    checkpoint = os.open(FOLDER / "disk" / "checkpoint", os.O_WRONLY | os.O_CREAT)
    say("opened")
    while not (FOLDER / "frozen").exists():
        time.sleep(0.01)
    return checkpoint


def write_to_a_frozen_disk() -> None:
    """Block in the kernel, where no signal ends the write."""
    os.write(CHECKPOINT, b"x")


CHECKPOINT = open_checkpoint() if MEANT and WAY == "disk" else -1


WAYS: dict[str, Callable[[], None]] = {
    "gil": sleep_with_the_gil,
    "regex": match_catastrophically,
    "lock": wait_in_a_lock,
    "stop": stop_itself,
    "others": sleep_beside_others,
    "child": wait_for_a_child,
    "disk": write_to_a_frozen_disk,
}


def exit_on_sigterm(_number: int, _frame: object) -> None:
    """Report SIGTERM and exit, as a worker that writes a last checkpoint."""
    say("told to stop")
    sys.exit(1)


def hang() -> None:
    """Hang in the chosen way, after all workers have started: their start may take longer than the timer."""
    while len([*FOLDER.glob("started.1.*")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if SIGNAL == "unguarded":
        say("hanging", after=AFTER)
        WAYS[WAY]()
    else:
        from rallypoint.timer import expires

        begun = time.time()
        with expires(after=AFTER, scope="step", signal=int(SIGNAL) if SIGNAL else None):
            say("hanging", after=AFTER, at=begun)
            WAYS[WAY]()


def main() -> None:
    """Hang if this worker is the chosen one, then wait."""
    signal.signal(signal.SIGTERM, exit_on_sigterm)
    say("started")
    (FOLDER / f"started.{ROUND}.{RANK}").touch()
    if MEANT:
        hang()
    wait()


main()
