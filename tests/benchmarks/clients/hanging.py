"""A worker that lets its timer expire, in `reap`."""

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
"""Seconds after its deadline by which a worker must be dead."""


@dataclass(frozen=True, slots=True)
class HangOrder:
    """A request to the worker.

    Attributes:
        folder: for the file in which the worker reports that it hangs.
        after: seconds of its timer, at least; see `drawn`.
    """

    folder: str
    after: float


@dataclass(frozen=True, slots=True)
class Hanging:
    """A hung worker: its process id, and its deadline in seconds of CLOCK_MONOTONIC."""

    pid: int
    due: float


@dataclass(frozen=True, slots=True)
class TorchReapOrder:
    """A request to the peer.

    Attributes:
        kind: file or queue: torch's two; sigkill: without a timer, the process is killed at its deadline.
        count: number of hung workers, one after the other.
        after: seconds of each timer, at least; see `drawn`.
    """

    kind: str
    count: int
    after: float


@dataclass(frozen=True, slots=True)
class TorchReapResult:
    """Seconds from the deadline of each to its death."""

    late: list[float]


def drawn(after: float) -> float:
    """Return a random time up to twice as long, so that deadlines spread over a watchdog's polling interval."""
    return random.uniform(after, 2 * after)


def hang(order: HangOrder) -> None:
    """Write the file, and hang."""
    # The floor runs the same process without an agent.
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
