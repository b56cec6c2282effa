"""Whatever befalls a whole cluster, in whatever order, the invariants of the design hold, and it gets going again.

The engine, the servicer, the interceptor, the membership client and the agent's core are the product's. Simulated
are what they stand on: network, disk, clocks, processes and workers. docs/simulation.md says what is checked.

A failure names its seed: `make simulate SEED=137` replays that one with its whole trace; `RALLYPOINT_SIMULATIONS=5000`
plays so many here instead of 1,000.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.rendezvous.core import facts
from simulation.faults import ACTIONS
from simulation.scenario import fingerprint, play, shown

BLOCKS = 20
QUICK_BLOCKS = 2  # the others are for make test-slow
SIMULATIONS = int(os.environ.get("RALLYPOINT_SIMULATIONS", "1000"))
TESTS = Path(__file__).parent.parent


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


def test_a_seed_is_one_history() -> None:
    """The same seed is the same history, to the last message, and in a process that hashes differently too."""
    code = "from simulation.scenario import *; print(*[fingerprint(play(seed)) for seed in (3, 7, 11)])"
    prints = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(TESTS)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=50,
        )
        prints.append(done.stdout.split())
    assert prints[0] == prints[1] == [fingerprint(play(seed)) for seed in (3, 7, 11)]
    assert len(set(prints[0])) == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_seeds_reach_every_corner() -> None:
    """A few hundred seeds have every fact, every loss, every end of a round and of a run, and every kind of trouble.

    And every call of store and fenced state.
    """
    seen: set[str] = set()
    struck: set[str] = set()
    calls: set[str] = set()
    for seed in range(250):
        cluster = play(seed)
        struck.update(cluster.struck)
        calls.update(cluster.referee.store.seen)
        for line in shown(cluster):
            seen.update(line.replace("(", " ").replace(":", " ").split())
    wanted = {fact.__name__ for fact in facts.Fact.__args__} | {
        *(
            "LEASE_EXPIRED",
            "DISCONNECTED",
            "SUPERSEDED",
            "CONFIRM_TIMED_OUT",
            "JOIN_TIMED_OUT",
            "DEPARTURE_TIMED_OUT",
        ),
        *("NODE_LOST", "NODE_LEFT", "WORKER_FAILED", "NODE_JOINED", "RESTART_REQUESTED", "NODE_EVICTED"),
        *("SUCCEEDED", "FAILED", "CANCELLED"),
        *("LEASE_LOST", "RUN_CLOSED", "DRAINING", "JOURNAL_BROKEN", "STREAM_REPLACED", "SUBSCRIBER_TOO_SLOW"),
        *("fenced", "forgotten", "checkpoint", "resume"),
        *("by_service=True", "earliest=False", "permanent=True", "quick_restarts=3", "held_back", "mend"),
    }
    text = " ".join(seen)
    assert not {word for word in wanted if word not in text}
    assert struck == set(ACTIONS)
    store = (
        "Set",
        "Get",
        "Add",
        "Append",
        "CompareSet",
        "MultiSet",
        "MultiGet",
        "Delete",
        "SetState",
        "GetState",
    )
    assert calls == {f"{call}Request" for call in store}
