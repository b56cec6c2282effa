"""A worker that reports metrics; rank 1 of the first round fails when a file `fail` exists, others end at `finish`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rallypoint.worker.metrics import put, timed


@timed(name="step")
def step() -> None:
    """Return at once."""


def main(folder: Path) -> None:
    """Report metrics, then wait for the test's files in `folder`."""
    step()
    put("loss", 0.25)
    first = os.environ["RALLYPOINT_ROUND"] == "1"
    (folder / f"up.{os.environ['RALLYPOINT_ROUND']}.{os.environ['RANK']}").touch()
    while not (folder / ("fail" if first else "finish")).exists():
        time.sleep(0.01)
    if first:
        if os.environ["RANK"] == "1":
            sys.exit(3)
        time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
