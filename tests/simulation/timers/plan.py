"""The plan of a seed: its workers and reapers, the settings of the service, and the rate of faults."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rallypoint.timer.core.values import TimerSettings
from simulation.timers.host import Reaping
from simulation.timers.programs import Temper


@dataclass(frozen=True, slots=True)
class Plan:
    """The random choices of a seed."""

    seed: int
    hosts: int
    workers: int
    temper: Temper
    reaping: Reaping
    settings: TimerSettings
    # Seconds: latency of the network in one direction; duration of the period with faults; mean time between two
    # faults.
    latency: float
    trouble: float
    pause: float

    def describe(self) -> str:
        """Return one paragraph for the report of a failure."""
        settings = self.settings
        return (
            f"seed {self.seed}: {self.hosts} hosts with {self.workers} workers each; trouble for "
            f"{self.trouble:.0f} s, something every {self.pause:.1f} s; {self.temper}; {self.reaping}; learns "
            f"from {settings.learn_warm_up}, {settings.learn_factor} times, at least {settings.learn_least} s"
        )


def draw_plan(seed: int) -> Plan:
    chance = random.Random(f"{seed}/plan")
    return Plan(
        seed,
        hosts=chance.choice([1, 1, 2, 3]),
        workers=chance.choice([1, 1, 2]),
        temper=_temper(chance),
        reaping=Reaping(
            failing=chance.choice([0.0, 0.3, 0.6]),
            raising=chance.choice([0.0, 0.2]),
            evidence=chance.choice([0.01, 0.2, 2.0]),
        ),
        settings=TimerSettings(
            learn_warm_up=chance.choice([3, 6, 12]),
            learn_factor=chance.choice([2.0, 5.0]),
            learn_least=chance.choice([0.3, 1.0]),
        ),
        latency=chance.choice([0.0005, 0.002, 0.02]),
        trouble=chance.uniform(4.0, 16.0),
        pause=chance.choice([0.7, 2.0, 5.0]),
    )


def _temper(chance: random.Random) -> Temper:
    doom = chance.choice([0.0, 0.1, 0.3])
    return Temper(
        ends={"prompt": 1.0, "brink": chance.choice([0.1, 1.0]), "late": doom, "hang": doom},
        learning=chance.choice([0.0, 0.3, 0.8]),
        nesting=chance.choice([0.0, 0.3]),
        renewing=chance.choice([0.2, 0.6]),
        lulls=chance.choice([0.0, 0.0, 0.5]),
        threads=chance.choice([1, 1, 2]),
        shortest=chance.choice([0.08, 0.5]),
        longest=chance.choice([2.0, 8.0]),
    )
