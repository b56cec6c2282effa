"""Bugs planted in the product are found: a referee that never whistles proves nothing."""

from __future__ import annotations

import pytest

from simulation.planted import PLANTED, search
from simulation.plants import Plant


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "plant"),
    [(kind, plant) for kind, plants in PLANTED.items() for plant in plants],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_bug_is_found(kind: str, plant: Plant) -> None:
    """Every planted bug breaks an invariant it should, and the failure names a seed that shows it again."""
    assert search(kind, plant)
