"""Bugs planted in the product are found: this proves that the referee's checks can fail."""

from __future__ import annotations

import pytest

from simulation.planted import PLANTED, search
from simulation.plants import Plant

# The bugs that `make test` searches for, by kind of simulation; `make test-slow` searches for the others.
QUICK = {
    "clusters": {
        "lose_a_value_in_a_crash",
        "take_a_failed_commit_for_durable",
        "forget_round_numbers_in_a_crash",
        "take_writes_under_every_lease",
        "restart_what_cant_be_mended",
    },
    "herds": {"give_no_time_after_a_pause"},
    "joiners": set[str](),
    "timers": {"forget_to_register_again", "send_no_elapsed", "forgive_no_pause"},
    "replicas": {"commit_whoever_owns_the_shard", "give_no_new_term_to_leases"},
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        pytest.param(kind, plant, marks=[] if plant.__name__ in QUICK[kind] else [pytest.mark.slow])
        for kind, plants in PLANTED.items()
        for plant in plants
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_bug_is_found(kind: str, plant: Plant) -> None:
    """Every planted bug breaks one of its expected invariants, and the failure names the command that replays it."""
    assert search(kind, plant)
