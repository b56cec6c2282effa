"""What a process of its own does for a range of seeds: the module that runs a program can't be imported by them."""

from __future__ import annotations

import ctypes
import signal
from importlib import import_module
from typing import Any

from simulation.seeds import Failed

_PR_SET_PDEATHSIG = 1
_SCENARIOS = {
    "clusters": "simulation.scenario",
    "herds": "simulation.herds",
    "joiners": "simulation.joiners",
    "timers": "simulation.timers.scenario",
    "replicas": "simulation.replicas.scenario",
}
KINDS = tuple(_SCENARIOS)
"""What a seed may stand for."""


def scenario_of(kind: str) -> Any:
    """The module that plays seeds of a kind: it has `play` and `replay`."""
    return import_module(_SCENARIOS[kind])


def begin_process() -> None:
    """Have a process end with its parent, however that ends. Ctrl-C goes to both, and is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def play_block(kind: str, seeds: range) -> list[str]:
    """Play seeds; returns a report for each that fails."""
    play, reports = scenario_of(kind).play, []
    for seed in seeds:
        try:
            play(seed)
        except Failed as failure:
            reports.append(str(failure))
    return reports
