"""Measurements in turns give medians of the successful trials, and report the failed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.processes import BenchmarkError
from benchmarks.session import Session
from benchmarks.trials import in_turns


@dataclass(frozen=True)
class Taken:
    """A result."""

    seconds: float


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path, (), 3, None, lambda line: None)


def _show(taken: Taken) -> str:
    return f"{taken.seconds} s"


def test_variants_take_turns_and_the_median_counts(session: Session) -> None:
    """Variants alternate, so that a slow phase of the machine affects all of them; the result is the median."""
    order: list[str] = []

    def variant(name: str, *seconds: float) -> Callable[[], Taken]:
        left = iter(seconds)

        def measure() -> Taken:
            order.append(name)
            return Taken(next(left))

        return measure

    variants = {"floor": variant("floor", 1, 9, 2), "ours": variant("ours", 3, 4, 5)}
    assert in_turns(session, "storm", variants, _show) == {"floor": Taken(2), "ours": Taken(4)}
    assert order == ["floor", "ours"] * 3
    assert session.failures == []


def test_failed_trials_are_reported_and_left_out(session: Session) -> None:
    """Failed trials are reported, and left out of the median."""
    left = iter([Taken(1), None, Taken(3)])

    def sometimes() -> Taken:
        taken = next(left)
        if taken is None:
            raise BenchmarkError("12 streams lost")
        return taken

    def never() -> Taken:
        raise BenchmarkError("no server")

    assert in_turns(session, "storm", {"ours": sometimes, "floor": never}, _show) == {"ours": Taken(2)}
    assert sorted(session.failures) == [
        *(f"storm floor {trial}/3: no server" for trial in (1, 2, 3)),
        "storm ours 2/3: 12 streams lost",
    ]
