"""Large herds and crash-looping newcomers: no node is lost for a pause of the service, and healthy nodes run on.

A failure names its seed: `make simulate HERD=1 SEED=3` or `make simulate JOINERS=1 SEED=3` replays it.
"""

from __future__ import annotations

import pytest

from simulation import herds, joiners
from simulation.blocks import scenario_of
from simulation.host_plants import HOST_PLANTS
from simulation.plants import Plant
from simulation.seeds import Failed

# Seeds within which each planted bug must be found. Seeds of herds and joiners last a hundred times as long as others.
SEEDS = {"clusters": 2000, "herds": 20, "joiners": 20}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [2])
def test_no_node_of_a_herd_is_lost(seed: int) -> None:
    """Pauses and restarts of the service change no membership and restart no worker, of 300 nodes."""
    herds.play(seed)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(2))
def test_newcomers_that_come_and_go_cost_little(seed: int) -> None:
    """Healthy nodes run for more than 95 % of an hour in which newcomers come and go."""
    joiners.play(seed)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "plant", "invariant"),
    [(kind, plant, words) for kind, plants in HOST_PLANTS.items() for plant, words in plants.items()],
    ids=lambda value: getattr(value, "__name__", "") or None,
)
def test_a_planted_bug_is_found(
    kind: str, plant: Plant, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every planted bug breaks an invariant it should, and the failure names a seed that shows it again."""
    plant(monkeypatch)
    with pytest.raises(Failed, match=rf"({invariant}).*\[seed \d+\](?s:.*)make simulate.* SEED=\d+"):
        play_all(kind)


def play_all(kind: str) -> None:
    """Play seeds of a kind until one fails."""
    for seed in range(SEEDS[kind]):
        scenario_of(kind).play(seed)
