"""No seed breaks an invariant; each seed is one history; together they reach every kind of fault.

`clusters` has the engine, the servicer, the interceptor, the membership client and the agent's core of the product,
on a simulated network, disk, clock and processes. `replicas` has the product's replicas, journals and client of etcd on
a model of etcd (`etcd_model`). `timers` has the table, the watchdog and the servicer, the agent's client, mirror,
socket and tables, and the worker's `expires` and connection, on simulated processes, sockets and reapers.
docs/simulation.md lists the checks.

A failure names its seed: `make simulate SEED=137` (`simulate-replicas`, `simulate-timers`) replays that one with its
whole trace; `RALLYPOINT_SIMULATIONS=5` plays five times as many seeds here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.rendezvous.core import facts
from simulation import faults
from simulation.blocks import scenario
from simulation.replicas import faults as replica_faults
from simulation.seeds import fingerprint, shown
from simulation.timers import faults as timer_faults
from support.marks import slow

FACTOR = int(os.environ.get("RALLYPOINT_SIMULATIONS", "1"))
# By kind: the number of seeds, of tests that share them, and of those tests that `make test` runs.
SEEDS = {"clusters": (1000, 40, 2), "timers": (300, 10, 2), "replicas": (15, 6, 3)}
TESTS = Path(__file__).parent.parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        pytest.param(kind, range(block, count * FACTOR, blocks), marks=[pytest.mark.slow] * (block >= quick))
        for kind, (count, blocks, quick) in SEEDS.items()
        for block in range(blocks)
    ],
    ids=str,
)
def test_no_seed_breaks_an_invariant(kind: str, seeds: range) -> None:
    """No seed breaks an invariant, and each ends well: with a round of all live nodes, or a closed run."""
    for seed in seeds:
        scenario(kind, seed).play()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind", "seeds"), [("clusters", (3, 7, 11)), ("timers", (3, 7, 11)), slow("replicas", (3, 7))], ids=str
)
def test_a_seed_is_one_history(kind: str, seeds: tuple[int, ...]) -> None:
    """The same seed gives the same history, to the last message, also in a process with another hash seed."""
    play = f"print(*[fingerprint(scenario({kind!r}, seed).play()) for seed in {seeds}])"
    code = f"from simulation.blocks import scenario; from simulation.seeds import fingerprint; {play}"
    here = [fingerprint(scenario(kind, seed).play()) for seed in seeds]
    assert len(set(here)) == len(seeds)
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
        assert done.stdout.split() == here


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_clusters_reach_every_corner() -> None:
    """A few hundred seeds have every fact, every loss, every end of a round and of a run, and every kind of fault.

    They also have every call of store and fenced state.
    """
    seen: set[str] = set()
    struck: set[str] = set()
    calls: set[str] = set()
    for seed in range(250):
        cluster = scenario("clusters", seed).play()
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
    assert struck == set(faults.ACTIONS)
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


@pytest.mark.slow
def test_timers_reach_every_corner() -> None:
    """A few dozen seeds have every fault, reapings by every kind of timer, and every message of agent and service."""
    seen: set[str] = set()
    struck: set[str] = set()
    for seed in range(60):
        scene = scenario("timers", seed).play()
        struck.update(scene.struck)
        for line in shown(scene):
            seen.update(line.replace("(", " ").split())
        seen.update("reaped " + scope.rstrip("0123456789") for _, scope in scene.referee.reaped)
    wanted = {
        *("subscribe", "acquire", "release", "clear", "acknowledge", "registered", "observe", "learned"),
        *("subscribed", "expired", "draining", "FAILED_PRECONDITION"),
        *("failed", "gone", "reaped scope", "reaped auto"),
    }
    assert not wanted - seen
    assert struck == set(timer_faults.ACTIONS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_replicas_reach_every_kind_of_trouble() -> None:
    """A few dozen seeds have elections, expired leases, take-overs, and every kind of fault."""
    struck: set[str] = set()
    seen: set[str] = set()
    for seed in range(40):
        cluster = scenario("replicas", seed).play()
        struck.update(cluster.struck)
        seen.update(what for _, what, _ in cluster.trace)
    assert struck == set(replica_faults.ACTIONS)
    assert {"elected", "lease expired", "members parted", "compacted", "full"} <= seen
