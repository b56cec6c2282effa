"""Scenarios of a seed, of any cast: faults come by chance, a referee judges, and all is written into a trace.

The cast is a cluster with its rendezvous service (`simulation.scenario`), one with replicas over etcd
(`simulation.replicas`), or a timer service with agents and workers (`simulation.timers`).
"""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rendezvous.core.ledger import Violation
from simulation.clockwork import Stuck

# What of a trace is shown: lines, and characters of each. A replay shows all.
_LAST = 80
_WIDTH = 240


class Failed(AssertionError):
    """A seed breaks an invariant; the message says which, and how to see it again."""


class Traced(Protocol):
    """A world that keeps a trace."""

    trace: list[tuple[float, str, tuple[Any, ...]]]
    """Virtual time, event, details."""


class Plan(Protocol):
    """The settings that a seed stands for."""

    @property
    def seed(self) -> int:
        """The seed."""

    @property
    def pause(self) -> float:
        """Mean virtual seconds between two faults."""

    def describe(self) -> str:
        """One paragraph."""


class Scenario:
    """One seed; `play` it once. A cast has a subclass."""

    target = ""
    """The target of make that replays such seeds."""
    plan: Plan
    world: Any
    """The cast: it has `chance`, `clockwork`, `referee`, `calm`, `struck`, `note` and `trace`."""

    def __init__(self, seed: int) -> None:
        """Draw the plan of a seed, and build its world."""
        raise NotImplementedError

    def play(self) -> Any:
        """Play it to the end; returns the world.

        Raises:
            Failed: An invariant is broken.
        """
        try:
            with quiet(), self.in_place():
                try:
                    self._play()
                finally:
                    self.world.dispose()
        except (Violation, Stuck) as error:
            raise Failed(report(error, self.world, self.plan, self.target)) from error
        return self.world

    def replay(self) -> tuple[list[str], str]:
        """Play it; returns the whole trace, and the invariant that was broken, or ""."""
        verdict = ""
        try:
            self.play()
        except Failed as failure:
            verdict = str(failure).splitlines()[0]
        return [*shown(self.world), self.plan.describe()], verdict

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace parts of the product by simulated ones."""
        yield

    def _play(self) -> None:
        raise NotImplementedError

    def _cause_trouble(self, actions: Mapping[str, Any], weights: Mapping[str, float]) -> None:
        """Start faults, drawn by their weights, at random times until the world is calm."""
        world = self.world

        def strike() -> None:
            if world.calm:
                return
            if self._waits_its_turn():
                world.clockwork.after(1.0, strike)
                return
            name = world.chance.choices(list(weights), list(weights.values()))[0]
            world.struck.add(name)
            actions[name][0](world)
            world.clockwork.after(world.chance.expovariate(1 / self.plan.pause), strike)

        world.note("actions", dict(weights))
        world.clockwork.after(world.chance.expovariate(1 / self.plan.pause), strike)

    def _waits_its_turn(self) -> bool:
        """Return whether the next fault must wait for the end of the one before."""
        return False

    def _let_pass(self, seconds: float) -> None:
        clockwork = self.world.clockwork
        clockwork.run(clockwork.now + seconds, lambda: False, self.world.referee.check)


def shown(played: Traced) -> list[str]:
    """Return a trace, a line for each entry."""
    return [
        f"{at:10.4f} {what:10} " + " ".join(" ".join(str(detail).split()) for detail in details)
        for at, what, details in played.trace
    ]


def fingerprint(played: Traced) -> str:
    """A hash of all that happened."""
    return hashlib.sha256("\n".join(shown(played)).encode()).hexdigest()


def report(error: Exception, played: Traced, plan: Plan, target: str) -> str:
    """What is said of a seed that broke an invariant; `target`: of make, that plays such seeds."""
    return "\n".join(
        [
            f"{error}  [seed {plan.seed}]",
            *(line[:_WIDTH] for line in shown(played)[-_LAST:]),
            plan.describe(),
            f"{error}",
            f"replay: make {target} SEED={plan.seed}",
        ]
    )


@contextmanager
def quiet() -> Iterator[None]:
    """No logs, and no garbage collection in the middle: what it would end must not depend on when it comes."""
    before, collected = logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        logging.disable(before)
        if collected:
            gc.enable()
