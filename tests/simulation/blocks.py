"""The code that worker processes run for a range of seeds: they can't import the `__main__` module."""

from __future__ import annotations

import ctypes
import gc
import signal
from importlib import import_module

from simulation.seeds import Failed, Scenario

_PR_SET_PDEATHSIG = 1
_SCENARIOS = {
    "clusters": "simulation.scenario.ClusterScenario",
    "herds": "simulation.herds.Herd",
    "joiners": "simulation.joiners.Joiners",
    "timers": "simulation.timers.scenario.TimerScenario",
    "replicas": "simulation.replicas.scenario.ReplicaScenario",
}
KINDS = tuple(_SCENARIOS)
"""The kinds of simulation."""


def scenario(kind: str, seed: int) -> Scenario:
    """Return the scenario of a seed."""
    module, _, name = _SCENARIOS[kind].rpartition(".")
    made: Scenario = getattr(import_module(module), name)(seed)
    return made


def begin_process() -> None:
    """Make the process die with its parent, even if that is killed, and leave Ctrl-C to the parent.

    Garbage collection runs less often: a seed makes millions of objects, and leaves few cycles.
    """
    gc.set_threshold(200_000)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def play_block(kind: str, seeds: range) -> list[str]:
    """Play seeds; return a report for each that fails."""
    reports: list[str] = []
    for seed in seeds:
        try:
            scenario(kind, seed).play()
        except Failed as failure:
            reports.append(str(failure))
    return reports
