"""What the workers of these tests call."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path


class Box:
    """Something to return."""

    def __init__(self, content: object) -> None:
        self.content = content


class OneWay:
    """Something that can be pickled, and not be made anew."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        """As a number that is none."""
        return int, ("nothing",)


def tell(text: str, number: int) -> Box:
    """Which worker this is, and what it was given."""
    print(f"rank {os.environ['RANK']} was told {text}")  # noqa: T201
    return Box((int(os.environ["RANK"]), os.environ["WORLD_SIZE"], os.environ["ROLE_NAME"], text, number))


def fail_at_first() -> int:
    """Fails in the first attempt after one has returned, and returns how many there were."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and os.environ["RANK"] == "1":
        raise RuntimeError("once")
    return attempt


def fail(rank: int) -> None:
    """One raises, the others go on."""
    if int(os.environ["RANK"]) == rank:
        raise ValueError("no good")
    threading.Event().wait(60)


def leave(code: int) -> None:
    """Ends without returning."""
    sys.exit(code)


def return_lock() -> object:
    """Returns what can't be pickled."""
    return threading.Lock()


def return_one_way() -> object:
    """Returns what can't be loaded."""
    return OneWay()


def linger(folder: str) -> None:
    """Says that it is there, and which signals it has got, until it gets one that ends it."""

    def heard(number: int, _frame: object) -> None:
        Path(folder, f"{signal.Signals(number).name}.{os.environ['RANK']}").touch()
        if number in (signal.SIGINT, signal.SIGTERM):
            sys.exit(0)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, heard)
    Path(folder, f"ready.{os.environ['RANK']}").touch()
    while True:
        time.sleep(0.01)
