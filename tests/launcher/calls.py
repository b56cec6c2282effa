"""Functions that the workers of these tests call."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path


class Box:
    """A value to return."""

    def __init__(self, content: object) -> None:
        self.content = content


class OneWay:
    """An object that can be pickled but not unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        """Pickle as a number that can't be parsed."""
        return int, ("nothing",)


def tell(text: str, number: int) -> Box:
    """Print the text; return the worker's ranks and the arguments."""
    print(f"rank {os.environ['RANK']} was told {text}")  # noqa: T201
    return Box((int(os.environ["RANK"]), os.environ["WORLD_SIZE"], os.environ["ROLE_NAME"], text, number))


def fail_at_first() -> int:
    """Fail at rank 1 of the first attempt, in which rank 0 returns; return the number of restarts."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and os.environ["RANK"] == "1":
        raise RuntimeError("once")
    return attempt


def fail(rank: int) -> None:
    """Raise in one worker; the others go on."""
    if int(os.environ["RANK"]) == rank:
        raise ValueError("no good")
    threading.Event().wait(60)


def leave(code: int) -> None:
    """Exit without returning."""
    sys.exit(code)


def return_lock() -> object:
    """Return an object that can't be pickled."""
    return threading.Lock()


def return_one_way() -> object:
    """Return an object that can't be unpickled."""
    return OneWay()


def linger(folder: str) -> None:
    """Create a file for the start and for each signal, until a signal ends the process."""

    def heard(number: int, _frame: object) -> None:
        Path(folder, f"{signal.Signals(number).name}.{os.environ['RANK']}").touch()
        if number in (signal.SIGINT, signal.SIGTERM):
            sys.exit(0)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, heard)
    Path(folder, f"ready.{os.environ['RANK']}").touch()
    while True:
        time.sleep(0.01)
