"""A worker that says that it has started, and then does as it is told: obedient_worker.py FOLDER ORDER [RANK].

Orders: `wait` until FOLDER/finish exists; `raise`, `hang` or `ignore-interrupt`, where the worker of that rank does
so in round 1, and all others wait.
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
    """A line of JSON, all at once."""
    sys.stdout.write(
        json.dumps({"event": event, "rank": RANK, "round": ROUND, "pid": os.getpid(), **fields}) + "\n"
    )
    sys.stdout.flush()


def wait() -> None:
    """Until the test lets it finish."""
    while not (FOLDER / "finish").exists():
        time.sleep(0.02)


def load(batch: int) -> None:
    """Something to find in a traceback."""
    raise ValueError(f"batch {batch} is empty")


def main() -> None:
    """Do as told."""
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
