"""What playing a seed comes to, whatever it stands for: a trace, and a report that says how to see it again."""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

# What of a trace is shown: lines, and characters of each. A replay shows all.
_LAST = 80
_WIDTH = 240


class Failed(AssertionError):
    """A seed breaks an invariant; the message says which, and how to see it again."""


class Traced(Protocol):
    """What keeps a trace: when something happened, in the world's time, what, and its details."""

    trace: list[tuple[float, str, tuple[Any, ...]]]


class Plan(Protocol):
    """What a seed stands for."""

    @property
    def seed(self) -> int:
        """The seed."""

    def describe(self) -> str:
        """One paragraph."""


def shown(played: Traced) -> list[str]:
    """A trace, a line for each entry."""
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
