"""Large herds and crash-looping newcomers: no node is lost by a pause of the service, and healthy nodes run on.

A failure names its seed: `make simulate HERD=1 SEED=3` or `make simulate JOINERS=1 SEED=3` replays it.
"""

from __future__ import annotations

import pytest

from simulation.herds import Herd
from simulation.joiners import Joiners
from support.marks import slow


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [2])
def test_no_node_of_a_herd_is_lost(seed: int) -> None:
    """Pauses and restarts of the service change no membership and restart no worker, of 300 nodes."""
    Herd(seed).play()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [slow(0), 1])
def test_newcomers_that_come_and_go_cost_little(seed: int) -> None:
    """Healthy nodes run for more than 95 % of an hour in which newcomers come and go."""
    Joiners(seed).play()
