"""Whatever befalls replicas and their etcd, the invariants hold, and the cluster gets going again.

The product's replicas, their journals and their client of etcd run on a model of etcd (`etcd_model`); nodes, clients
and onlookers are those of `simulation`. A failure names its seed: `make simulate-replicas SEED=137` replays it;
`RALLYPOINT_REPLICA_SIMULATIONS=5000` plays so many here instead of 15.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.replicas.faults import ACTIONS
from simulation.replicas.scenario import fingerprint, play

BLOCKS = 6
QUICK_BLOCKS = 3  # the others are for make test-slow
SIMULATIONS = int(os.environ.get("RALLYPOINT_REPLICA_SIMULATIONS", "15"))
TESTS = Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(
            range(block, SIMULATIONS, BLOCKS), marks=[pytest.mark.slow] if block >= QUICK_BLOCKS else []
        )
        for block in range(min(BLOCKS, SIMULATIONS))
    ],
    ids=str,
)
def test_no_seed_breaks_an_invariant(seeds: range) -> None:
    """No seed breaks an invariant, and each ends with a round that all live nodes run, or a run that is closed."""
    for seed in seeds:
        play(seed)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_seed_is_one_history() -> None:
    """The same seed is the same history, to the last message, and in a process that hashes differently too."""
    code = "from simulation.replicas.scenario import *; print(*[fingerprint(play(seed)) for seed in (3, 7)])"
    prints = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(TESTS)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
        prints.append(done.stdout.split())
    assert prints[0] == prints[1] == [fingerprint(play(seed)) for seed in (3, 7)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_seeds_reach_every_kind_of_trouble() -> None:
    """A few dozen seeds have elections, leases that end, take-overs, and all that may befall."""
    struck: set[str] = set()
    seen: set[str] = set()
    for seed in range(40):
        cluster = play(seed)
        struck.update(cluster.struck)
        seen.update(what for _, what, _ in cluster.trace)
    assert struck == set(ACTIONS)
    assert {"elected", "lease expired", "members parted", "compacted", "full"} <= seen
