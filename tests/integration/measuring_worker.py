"""A worker that measures itself; rank 1 of the first round fails when it is told to, all others end when they are."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rallypoint.worker.metrics import put, timed


@timed(name="step")
def step() -> None:
    """Takes no time at all."""


def main(folder: Path) -> None:
    """`folder`: where it is told what to do."""
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
