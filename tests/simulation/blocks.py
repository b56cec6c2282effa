"""What a process of its own does for a range of seeds: the module that runs a program can't be imported by them."""

from __future__ import annotations

import signal
from importlib import import_module
from typing import Any

from simulation.seeds import Failed

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


def leave_interrupts() -> None:
    """Ctrl-C goes to the whole process group; only the parent acts on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def play_block(kind: str, seeds: range) -> list[str]:
    """Play seeds; returns a report for each that fails."""
    play, reports = scenario_of(kind).play, []
    for seed in seeds:
        try:
            play(seed)
        except Failed as failure:
            reports.append(str(failure))
    return reports
