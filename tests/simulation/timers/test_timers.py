"""Whatever befalls a watchdog, its agents and their workers: nobody is reaped in vain, and who hangs is reaped.

The table, the watchdog and the servicer, the agent's client, ledger, socket and tables, and the worker's `expires` and
uplink are the product's. Simulated are time, processes, network, sockets and reapers. docs/simulation.md says what is
checked.

A failure names its seed: `make simulate-timers SEED=137` replays that one with its whole trace;
`RALLYPOINT_TIMER_SIMULATIONS=5000` plays so many here instead of 300.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.timers.faults import ACTIONS
from simulation.timers.scenario import fingerprint, play, shown

BLOCKS = 10
QUICK_BLOCKS = 2  # the others are for make test-slow
SIMULATIONS = int(os.environ.get("RALLYPOINT_TIMER_SIMULATIONS", "300"))
TESTS = Path(__file__).parent.parent.parent


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
    """No seed breaks an invariant, and each ends with nobody in a scope who is to be out of it or reaped."""
    for seed in seeds:
        play(seed)


def test_a_seed_is_one_history() -> None:
    """The same seed is the same history, to the last message, and in a process that hashes differently too."""
    code = (
        "from simulation.timers.scenario import *; print(*[fingerprint(play(seed)) for seed in (3, 7, 11)])"
    )
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
def test_seeds_reach_every_corner() -> None:
    """A few dozen seeds have every action, reapings by every kind of timer, and every message of agent and service."""
    seen: set[str] = set()
    struck: set[str] = set()
    for seed in range(60):
        scene = play(seed)
        struck.update(scene.struck)
        for line in shown(scene):
            seen.update(line.replace("(", " ").split())
        seen.update("reaped " + scope.rstrip("0123456789") for _, scope in scene.referee.reaped)
    wanted = {
        *("subscribe", "acquire", "release", "clear", "acknowledge", "registered", "observe", "learned"),
        *("subscribed", "expired", "draining", "OK", "FAILED_PRECONDITION"),
        *("failed", "gone", "reaped scope", "reaped auto"),
    }
    assert not wanted - seen
    assert struck == set(ACTIONS)
