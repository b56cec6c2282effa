"""Scenarios of a seed, with any cast: random faults, the checks of a referee, and a trace of all events.

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

# The part of a trace that a report has: the last lines, and characters of each. A replay shows all.
_LAST = 80
_WIDTH = 240


class Failed(AssertionError):
    """A seed breaks an invariant; the message names it, and the command that replays the seed."""


class Traced(Protocol):
    """A simulation that keeps a trace."""

    trace: list[tuple[float, str, tuple[Any, ...]]]
    """Entries: virtual time in seconds, event, details."""


class Plan(Protocol):
    """The settings drawn from a seed."""

    @property
    def seed(self) -> int:
        """The seed."""

    @property
    def pause(self) -> float:
        """Mean virtual seconds between two faults."""

    def describe(self) -> str:
        """Return one paragraph about the plan."""


class Scenario:
    """One seed; `play` it once. Each cast has a subclass."""

    target = ""
    """The target of make that replays its seeds."""
    plan: Plan
    world: Any
    """The cast: it has `chance`, `clockwork`, `referee`, `calm`, `struck`, `note` and `trace`."""

    def __init__(self, seed: int) -> None:
        """Draw the plan of a seed, and build its cast."""
        raise NotImplementedError

    def play(self) -> Any:
        """Play it to the end; return the cast.

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
        """Play it; return the whole trace, and the invariant that was broken, or ""."""
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
        """Apply faults, drawn by their weights, at random times until `calm` is set."""
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
        """Return True if the next fault must wait for the end of the one before."""
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
    """Return a hash of the trace."""
    return hashlib.sha256("\n".join(shown(played)).encode()).hexdigest()


def report(error: Exception, played: Traced, plan: Plan, target: str) -> str:
    """Return the report of a seed that broke an invariant; `target`: the target of make that replays it."""
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
    """Disable logs and garbage collection: the events of a seed must not depend on when objects are collected."""
    before, collected = logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        logging.disable(before)
        if collected:
            gc.enable()
