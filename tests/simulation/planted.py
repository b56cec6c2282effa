"""All planted bugs, by kind of simulation, and the search for a seed that finds one."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import pytest

from simulation.blocks import scenario
from simulation.host_plants import HOST_PLANTS
from simulation.plants import PLANTS, Plant
from simulation.replicas.plants import REPLICA_PLANTS
from simulation.seeds import Failed
from simulation.store_plants import STORE_PLANTS
from simulation.timers import plants as timer_plants

PLANTED: Mapping[str, Mapping[Plant, str]] = {
    "clusters": PLANTS | STORE_PLANTS | HOST_PLANTS["clusters"],
    "herds": HOST_PLANTS["herds"],
    "joiners": HOST_PLANTS["joiners"],
    "timers": timer_plants.PLANTS,
    "replicas": REPLICA_PLANTS,
}
"""By kind of simulation and plant: a pattern of the invariants that it breaks."""

# Seeds within which each is found. A seed of herds or joiners takes a hundred times as long as others.
_SEEDS = {"clusters": 2000, "herds": 20, "joiners": 20, "timers": 2000, "replicas": 2000}
# The target of make that replays a seed.
_REPLAY = {
    "clusters": "simulate",
    "herds": "simulate HERD=1",
    "joiners": "simulate JOINERS=1",
    "timers": "simulate-timers",
    "replicas": "simulate-replicas",
}
# The seed that last found a bug that few seeds find (`make planted`). A search begins there and continues from 0, so an
# outdated number costs only time.
_FOUND_AT: Mapping[str, Mapping[str, int]] = {
    "clusters": {
        "forget_restarts_in_a_checkpoint": 151,
        "keep_the_oldest_state": 371,
        "count_restarts_for_ever": 1471,
        "refuse_a_late_first_message": 47,
        "give_no_time_after_a_pause": 225,
        "put_failures_to_the_clock_of_leases": 371,
        "take_commits_for_pauses": 1650,
        "take_writes_of_every_round": 72,
        "judge_writes_by_durable_rounds": 22,
        "end_a_run_while_participants_are_silent": 182,
    },
    "replicas": {"believe_in_a_lease_for_ever": 59},
    "herds": {"give_no_time_after_a_pause": 2},
    "timers": {
        "measure_elapsed_before_connecting": 255,
        "keep_expiries_from_a_new_stream": 210,
        "skip_the_last_look": 220,
        "look_as_seldom_as_ever_after_a_pause": 654,
    },
}


@dataclass(frozen=True)
class Found:
    """A seed that finds a planted bug, and the duration of the search in seconds."""

    seed: int
    seconds: float


def search(kind: str, plant: Plant, *, afresh: bool = False) -> Found | None:
    """Plant a bug and play seeds until one fails; return None if none does.

    Args:
        kind: The kind of simulation.
        plant: The bug.
        afresh: Begin at 0 in any case.

    Raises:
        AssertionError: A seed fails by another invariant than those that the bug breaks, or its report does not name
            the command that replays it.
    """
    begun = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        seed, report = _first_failure(
            kind, _seeds(kind, None if afresh else _FOUND_AT.get(kind, {}).get(plant.__name__))
        )
    if seed is None:
        return None
    words = rf"({PLANTED[kind][plant]}).*\[seed {seed}\](?s:.*)make {_REPLAY[kind]} SEED={seed}$"
    assert re.search(words, report), f"{plant.__name__} breaks something else: {report}"
    return Found(seed, time.monotonic() - begun)


def _first_failure(kind: str, seeds: Iterator[int]) -> tuple[int | None, str]:
    for seed in seeds:
        try:
            scenario(kind, seed).play()
        except Failed as failure:
            return seed, str(failure)
    return None, ""


def _seeds(kind: str, first: int | None) -> Iterator[int]:
    return chain([] if first is None else [first], range(_SEEDS[kind]))


def search_by_name(kind: str, name: str) -> Found | None:
    """Search from 0 on for a bug named by its function, in a worker process."""
    return search(kind, next(plant for plant in PLANTED[kind] if plant.__name__ == name), afresh=True)
