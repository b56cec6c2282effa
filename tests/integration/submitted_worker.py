"""A worker of a submitted job: says where it is, and then does as it is told."""

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
    """To standard output, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def stay() -> NoReturn:
    """Until somebody ends it."""
    Path(FOLDER, f"up.{RANK}.{RESTARTS}").touch()
    while True:
        time.sleep(60)


def save(number: int, frame: FrameType | None) -> NoReturn:
    """Takes a moment, and is done."""
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
    # So many numbers, one a line; the first attempt fails at the end of them.
    say("\n".join(f"{RESTARTS} {number}" for number in range(int(MORE[0]))))
    raise SystemExit(1 if RESTARTS == 0 else 0)
