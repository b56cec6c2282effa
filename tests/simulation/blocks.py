"""What a process of its own does for a range of seeds: the module that runs a program can't be imported by them."""

from __future__ import annotations

import signal

from simulation.scenario import Failed, play


def leave_interrupts() -> None:
    """Ctrl-C goes to the whole process group; only the parent acts on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def play_block(seeds: range) -> list[str]:
    """Play seeds; returns a report for each that fails."""
    reports = []
    for seed in seeds:
        try:
            play(seed)
        except Failed as failure:
            reports.append(str(failure))
    return reports
