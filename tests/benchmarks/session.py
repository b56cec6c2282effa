"""What every benchmark is given: where to work, how often, and whom to tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from benchmarks.figures import Figure


@dataclass(slots=True)
class Session:
    """One run of benchmarks.

    Attributes:
        folder: for logs and journals; on a real disk, or what is said of journals is not true.
        sizes: sizes to measure; empty: those that a benchmark has of its own.
        trials: how often each thing is measured; what is told is the median.
        torch: an interpreter that has torch, for the peer; None: there is none.
        say: takes a line about what is going on.
        failures: what went wrong. Calls that were lost are told of here, whatever the figures.
    """

    folder: Path
    sizes: tuple[int, ...]
    trials: int
    torch: Path | None
    say: Callable[[str], None]
    failures: list[str] = field(default_factory=list)

    def sizes_or(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes that were asked for, or a benchmark's own."""
        return self.sizes or own

    def fail(self, what: str) -> None:
        """Note that something went wrong, and say so."""
        self.failures.append(what)
        self.say(f"FAILED: {what}")


Benchmark: TypeAlias = Callable[[Session], Iterator[Figure]]
