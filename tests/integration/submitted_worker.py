"""A worker of a submitted job: prints its rank and folder, and then follows an order."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

FOLDER, ORDER, *MORE = sys.argv[1:]
RANK = os.environ["RANK"]
RESTARTS = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def say(text: str) -> None:
    """Print a line to standard output, and flush it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def stay() -> NoReturn:
    """Wait for a signal."""
    Path(FOLDER, f"up.{RANK}.{RESTARTS}").touch()
    while True:
        time.sleep(60)


def save(number: int, frame: FrameType | None) -> NoReturn:
    """Save, which takes a moment, and exit."""
    say(f"rank {RANK} saves")
    time.sleep(0.2)
    Path(FOLDER, f"saved.{RANK}").touch()
    raise SystemExit(0)


say(f"rank {RANK} of {os.environ['WORLD_SIZE']} in {os.getcwd()} with {os.environ.get('FLAVOUR')}")
if ORDER == "save":
    signal.signal(signal.SIGTERM, save)
    stay()
elif ORDER == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stay()
elif ORDER == "wait":
    stay()
elif ORDER == "wait-for":
    Path(FOLDER, f"up.{RANK}.{RESTARTS}").touch()
    while not Path(FOLDER, MORE[0]).exists():
        time.sleep(0.01)
elif ORDER == "fail-once" and RESTARTS == 0 and RANK == "1":
    raise ValueError("the first attempt is never good")
elif ORDER == "fail" and RANK == "1":
    raise ValueError("it will never be good")
elif ORDER == "count":
    # Print that many numbers, one per line; the first attempt fails afterwards.
    say("\n".join(f"{RESTARTS} {number}" for number in range(int(MORE[0]))))
    raise SystemExit(1 if RESTARTS == 0 else 0)
