"""What a process of its own does for a range of seeds: the module that runs a program can't be imported by them."""

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
"""What a seed may stand for."""


def scenario(kind: str, seed: int) -> Scenario:
    """Return the scenario of a seed."""
    module, _, name = _SCENARIOS[kind].rpartition(".")
    made: Scenario = getattr(import_module(module), name)(seed)
    return made


def begin_process() -> None:
    """Have a process end with its parent, however that ends. Ctrl-C goes to both, and is for the parent.

    Garbage is looked for less often: a seed makes millions of objects, and leaves few cycles.
    """
    gc.set_threshold(200_000)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def play_block(kind: str, seeds: range) -> list[str]:
    """Play seeds; returns a report for each that fails."""
    reports: list[str] = []
    for seed in seeds:
        try:
            scenario(kind, seed).play()
        except Failed as failure:
            reports.append(str(failure))
    return reports
