"""A worker that lets its timer run out, in `reap`."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rallypoint.timer import configure, expires

DEATH = 30.0
"""Seconds after its deadline by which a worker has to be dead."""


@dataclass(frozen=True, slots=True)
class HangOrder:
    """What to do.

    Attributes:
        folder: where to say who hangs, in a file for each process.
        after: seconds that it may take, at least; see `drawn`.
    """

    folder: str
    after: float


@dataclass(frozen=True, slots=True)
class Hanging:
    """Who hangs: its process id, and its deadline in seconds of CLOCK_MONOTONIC."""

    pid: int
    due: float


@dataclass(frozen=True, slots=True)
class TorchReapOrder:
    """What the peer is to do.

    Attributes:
        kind: file or queue: torch's two; sigkill: nobody watches, the process is killed at its deadline.
        count: how many workers hang, one after the other.
        after: seconds that each may take, at least; see `drawn`.
    """

    kind: str
    count: int
    after: float


@dataclass(frozen=True, slots=True)
class TorchReapResult:
    """Seconds from the deadline of each to its death."""

    late: list[float]


def drawn(after: float) -> float:
    """Up to twice as long: who looks at intervals must not be met at the same point of them each time."""
    return random.uniform(after, 2 * after)


def hang(order: HangOrder) -> None:
    """Say so, and hang."""
    # The floor kills the same process, and no agent guards that one.
    configure(required=False)
    after = drawn(order.after)
    began = time.monotonic()
    with expires(after=after, scope="hang"):
        place = Path(order.folder, f"{os.getpid()}.json")
        draft = place.with_suffix(".draft")
        draft.write_text(json.dumps({"pid": os.getpid(), "due": began + after}))
        os.replace(draft, place)
        time.sleep(3600)


if __name__ == "__main__":
    hang(HangOrder(**json.loads(sys.argv[1])))
