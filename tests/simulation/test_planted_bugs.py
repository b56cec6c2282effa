"""Bugs planted in the product are found: a referee that never whistles proves nothing."""

from __future__ import annotations

import re

import pytest

from simulation.planted import PLANTED, search
from simulation.plants import Plant


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "plant", "invariant"),
    [(kind, plant, words) for kind, plants in PLANTED.items() for plant, words in plants.items()],
    ids=[f"{kind}-{plant.__name__}" for kind, plants in PLANTED.items() for plant in plants],
)
def test_a_planted_bug_is_found(kind: str, plant: Plant, invariant: str) -> None:
    """Every planted bug breaks an invariant it should, and the failure names a seed that shows it again."""
    found = search(kind, plant)
    assert found is not None
    assert re.search(
        rf"({invariant}).*\[seed {found.seed}\](?s:.*)make simulate.* SEED={found.seed}$", found.report
    )
    print(f"{plant.__name__}: seed {found.seed}, {found.seconds:.1f} s")  # noqa: T201
