"""The cost of entering and leaving a guarded block: back to back, after a sleep, and during a computation.

One module for all, since the measurement is the same for our timers, for empty blocks, and for torch.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

INTERVAL = 0.001
"""Seconds from one paced block to the next."""

_WARM_UP = 100  # blocks that are not counted: connections, caches
_DATA = bytes(range(256)) * 64  # input of the computation; small enough that one step takes microseconds


@dataclass(frozen=True, slots=True)
class BlocksOrder:
    """A request to measure blocks.

    Attributes:
        kind: kind of timer, if there are several.
        blocks: number of blocks back to back.
        paced: number of paced blocks.
        answer: the file for the result: an object of BlockCost by scope and pace, as in "default.slept".
    """

    kind: str
    blocks: int
    paced: int
    answer: str


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds for one block: median, 99th percentile, longest. And the number of blocks that raised an error."""

    median: float
    p99: float
    longest: float
    raised: float


def _at_once(due: float) -> None:
    return


def _sleep(due: float) -> None:
    time.sleep(max(0.0, due - time.perf_counter()))


def _compute(due: float) -> None:
    checksum = 0
    while time.perf_counter() < due:
        checksum = zlib.crc32(_DATA, checksum)


PACES: Mapping[str, Callable[[float], None]] = {
    "back-to-back": _at_once,
    "slept": _sleep,
    "computed": _compute,
}


def cost_of(block: Callable[[], None], count: int, pace: Callable[[float], None]) -> BlockCost:
    """Run a block `count` times; one that raises is counted, not timed."""
    clock = time.perf_counter_ns
    taken: list[int] = []
    raised = 0
    due = time.perf_counter()
    for _ in range(count):
        due += INTERVAL
        pace(due)
        began = clock()
        try:
            block()
        except OSError:
            raised += 1
        else:
            taken.append(clock() - began)
    taken.sort()
    if not taken:
        raise SystemExit(f"all of {count} blocks raised an error")
    return BlockCost(
        statistics.median(taken) / 1e9, taken[int(len(taken) * 0.99)] / 1e9, taken[-1] / 1e9, raised
    )


def costs_of(blocks: Mapping[str, Callable[[], None]], order: BlocksOrder) -> dict[str, BlockCost]:
    """Measure some blocks at all paces, in turns."""
    for block in blocks.values():
        cost_of(block, _WARM_UP, _sleep)
    return {
        f"{name}.{pace}": cost_of(block, order.blocks if pace == "back-to-back" else order.paced, PACES[pace])
        for pace in PACES
        for name, block in blocks.items()
    }


def write_costs(answer: str, costs: Mapping[str, BlockCost]) -> None:
    """Write the results to a file, atomically."""
    place = Path(answer)
    draft = place.with_suffix(".draft")
    draft.write_text(json.dumps({name: asdict(cost) for name, cost in costs.items()}))
    os.replace(draft, place)


def read_costs(answer: Path) -> dict[str, BlockCost]:
    """Read the file of `write_costs`."""
    return {name: BlockCost(**cost) for name, cost in json.loads(answer.read_text()).items()}
