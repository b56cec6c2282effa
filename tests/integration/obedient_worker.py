"""A worker that reports its start, and then follows an order: obedient_worker.py FOLDER ORDER [RANK].

Orders: `wait` until FOLDER/finish exists; `raise`, `hang` or `ignore-interrupt`: the worker of that rank does this
in round 1, and all others wait.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

STARTED_AT = time.time()
FOLDER, ORDER = Path(sys.argv[1]), sys.argv[2]
RANK, ROUND = int(os.environ["RANK"]), int(os.environ["RALLYPOINT_ROUND"])
MEANT = ROUND == 1 and sys.argv[3:] in ([], [str(RANK)])
OURS = ("RALLYPOINT_", "TORCHELASTIC_")


def say(event: str, **fields: Any) -> None:
    """Print a line of JSON in one write."""
    sys.stdout.write(
        json.dumps({"event": event, "rank": RANK, "round": ROUND, "pid": os.getpid(), **fields}) + "\n"
    )
    sys.stdout.flush()


def wait() -> None:
    """Wait until the test creates the file `finish`."""
    while not (FOLDER / "finish").exists():
        time.sleep(0.02)


def load(batch: int) -> None:
    """Raise an error with a traceback that a test can find."""
    raise ValueError(f"batch {batch} is empty")


def main() -> None:
    """Follow the order."""
    if ORDER == "ignore-interrupt" and MEANT:
        signal.signal(signal.SIGINT, lambda *_: say("ignored"))
    say("started", at=STARTED_AT, environment=dict(os.environ))
    if ORDER == "raise" and MEANT:
        load(7)
    if ORDER == "hang" and MEANT:
        from rallypoint.timer import expires

        with expires(after=0.5, scope="step"):
            time.sleep(3600)
    try:
        wait()
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(1)


main()
