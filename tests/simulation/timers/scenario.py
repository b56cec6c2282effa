"""Run a seed, from the first start of a service until no worker is in a scope, with the referee's checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rendezvous.core.ledger import Violation
from simulation.seeds import Scenario
from simulation.timers import faults
from simulation.timers.plan import Plan, draw_plan
from simulation.timers.referee import AT_LAST
from simulation.timers.scene import Scene
from simulation.timers.speech import simulated_links

# Virtual seconds after the end of the faults in which workers run without hanging.
_STEADY = 3.0


class TimerScenario(Scenario):
    """A timer service, agents and their workers."""

    target = "simulate-timers"
    plan: Plan

    def __init__(self, seed: int) -> None:
        self.plan = draw_plan(seed)
        self.scene = self.world = Scene(self.plan)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the workers' connections by simulated ones."""
        with simulated_links():
            yield

    def _play(self) -> None:
        scene, plan = self.scene, self.plan
        self._cause_trouble(faults.ACTIONS, faults.draw_actions(scene.chance))
        self._let_pass(plan.trouble)
        scene.calm_down()
        self._let_pass(_STEADY)
        scene.finish()
        longest = max(plan.temper.longest, plan.settings.learn_factor * 4.0, plan.settings.learn_least)
        within = AT_LAST + longest + 2 * scene.forgivable
        clockwork = scene.clockwork
        if not clockwork.run(clockwork.now + within, scene.settled, scene.referee.check):
            if scene.unwatched:
                raise Violation(
                    f"no agent gives up: unguarded after {within:.0f} s: {'; '.join(scene.unwatched)}"
                )
            service = scene.service
            left = scene.referee.owed(service.ripe) if service is not None else []
            spans = "; ".join(span.describe() for span in left)
            raise Violation(f"who is late is reaped in the end: not within {within:.0f} s: {spans}")
