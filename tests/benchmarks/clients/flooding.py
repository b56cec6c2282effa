"""A worker that prints at a pace: `flooding <order>`, or as many lines as it can.

A line is `<rank> <number> <filler>`, so that whoever reads the file can tell whether one is missing, double, cut or
out of order. Standard library only: torch's agent runs it too.
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
    """What a worker is told.

    Attributes:
        folder: where it says when it was done, as `<rank>.json`; it goes on living until `go` is there.
        lines: how many it prints.
        rate: lines a second; 0: as many as it can.
        block: lines in a write(2). Python's own buffer of standard output has about 100 of this length.
    """

    folder: str
    lines: int
    rate: float = 0.0
    block: int = 100


@dataclass(frozen=True, slots=True)
class Flooded:
    """When a worker printed, in seconds of the host's monotonic clock."""

    began: float
    ended: float


def lines(rank: int, first: int, count: int) -> bytes:
    """What the worker of a rank prints: `count` lines from number `first` on."""
    return b"".join(b"%d %08d %b\n" % (rank, number, _FILLER) for number in range(first, first + count))


def flood(order: FloodOrder, rank: int) -> Flooded:
    """Prints; returns when."""
    began = time.monotonic()
    for first in range(0, order.lines, order.block):
        if order.rate:
            time.sleep(max(0.0, began + first / order.rate - time.monotonic()))
        rest = memoryview(lines(rank, first, min(order.block, order.lines - first)))
        while rest:
            rest = rest[os.write(1, rest) :]
    return Flooded(began, time.monotonic())


def main() -> None:
    """Does what the command line says."""
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
