"""Bugs planted in the product are found: a referee that never whistles proves nothing."""

from __future__ import annotations

import pytest

from simulation.plants import PLANTS, Plant
from simulation.scenario import Failed, play
from simulation.store_plants import STORE_PLANTS

# Each must be found within so many seeds. On most, a few are enough.
SEEDS = 2000


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("plant", "invariant"), (PLANTS | STORE_PLANTS).items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_bug_is_found(plant: Plant, invariant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every planted bug breaks an invariant it should, and the failure names a seed that shows it again."""
    plant(monkeypatch)
    with pytest.raises(Failed, match=rf"({invariant}).*\[seed \d+\](?s:.*)make simulate SEED=\d+"):
        play_all(range(SEEDS))


def play_all(seeds: range) -> None:
    """Play seeds until one fails."""
    for seed in seeds:
        play(seed)
