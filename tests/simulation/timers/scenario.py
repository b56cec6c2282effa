"""A seed, played from the first start of a service until nobody is in a scope any more, under the referee's eyes."""

from __future__ import annotations

from rendezvous.core.ledger import Violation
from simulation.clockwork import Stuck
from simulation.seeds import Failed, fingerprint, quiet, report, shown
from simulation.timers import faults
from simulation.timers.plan import draw_plan
from simulation.timers.referee import AT_LAST
from simulation.timers.scene import Scene
from simulation.timers.speech import simulated_links

__all__ = ["Failed", "Scenario", "fingerprint", "play", "replay", "shown"]

# Virtual seconds from the end of trouble in which workers go on without hanging.
_STEADY = 3.0


class Scenario:
    """One seed; `play` it once."""

    def __init__(self, seed: int) -> None:
        self.plan = draw_plan(seed)
        self.scene = Scene(self.plan)

    def play(self) -> Scene:
        """Play it to the end.

        Raises:
            Failed: An invariant is broken.
        """
        try:
            with quiet(), simulated_links():
                try:
                    self._play()
                finally:
                    self.scene.dispose()
        except (Violation, Stuck) as error:
            raise Failed(report(error, self.scene, self.plan, "simulate-timers")) from error
        return self.scene

    def _play(self) -> None:
        scene, plan = self.scene, self.plan
        weights = faults.draw_actions(scene.chance)
        scene.note("actions", weights)

        def strike() -> None:
            if scene.calm:
                return
            name = scene.chance.choices(list(weights), list(weights.values()))[0]
            scene.struck.add(name)
            faults.ACTIONS[name][0](scene)
            scene.clockwork.after(scene.chance.expovariate(1 / plan.pause), strike)

        scene.clockwork.after(scene.chance.expovariate(1 / plan.pause), strike)
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

    def _let_pass(self, seconds: float) -> None:
        clockwork = self.scene.clockwork
        clockwork.run(clockwork.now + seconds, lambda: False, self.scene.referee.check)


def play(seed: int) -> Scene:
    """Play a seed.

    Raises:
        Failed: It breaks an invariant.
    """
    return Scenario(seed).play()


def replay(seed: int) -> tuple[list[str], str]:
    """Play a seed; returns all that happened, and what came of it: empty if no invariant was broken."""
    scenario, verdict = Scenario(seed), ""
    try:
        scenario.play()
    except Failed as failure:
        verdict = str(failure).splitlines()[0]
    return [*shown(scenario.scene), scenario.plan.describe()], verdict
