"""A worker that prints at a fixed rate, or as fast as it can: `flooding <order>`.

A line is `<rank> <number> <filler>`, so that a reader detects a line that is missing, double, cut or out of order.
Standard library only: torch's agent runs it too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_FILLER = b"the quick brown fox jumps over the lazy dog"


@dataclass(frozen=True, slots=True)
class FloodOrder:
    """A request to the worker.

    Attributes:
        folder: for its result, `<rank>.json`; the worker ends when a file `go` exists there.
        lines: number of lines to print.
        rate: lines per second; 0: as fast as it can.
        block: lines per write(2). Python's own buffer of standard output holds about 100 of this length.
    """

    folder: str
    lines: int
    rate: float = 0.0
    block: int = 100


@dataclass(frozen=True, slots=True)
class Flooded:
    """Start and end of a worker's output, in seconds of the host's monotonic clock."""

    began: float
    ended: float


def lines(rank: int, first: int, count: int) -> bytes:
    """Return the output of the worker with a rank: `count` lines from number `first` on."""
    return b"".join(b"%d %08d %b\n" % (rank, number, _FILLER) for number in range(first, first + count))


def flood(order: FloodOrder, rank: int) -> Flooded:
    """Print the lines; return the start and end times."""
    began = time.monotonic()
    for first in range(0, order.lines, order.block):
        if order.rate:
            time.sleep(max(0.0, began + first / order.rate - time.monotonic()))
        rest = memoryview(lines(rank, first, min(order.block, order.lines - first)))
        while rest:
            rest = rest[os.write(1, rest) :]
    return Flooded(began, time.monotonic())


def main() -> None:
    """Carry out the order in the first argument."""
    order = FloodOrder(**json.loads(sys.argv[1]))
    rank = int(os.environ["RANK"])
    flooded = flood(order, rank)
    place = Path(order.folder, f"{rank}.json")
    fresh = place.with_suffix(".new")
    fresh.write_text(json.dumps({"began": flooded.began, "ended": flooded.ended}))
    fresh.rename(place)
    while not Path(order.folder, "go").exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main()
