"""The arguments of every benchmark: folder, sizes, number of trials, and where it reports."""

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
        folder: for logs and journals; on a real disk, or the figures of journals are wrong.
        sizes: sizes to measure; empty: the benchmark's own sizes.
        trials: number of measurements of each variant; the result is their median.
        torch: an interpreter that has torch, for the peer; None: there is none.
        `say`: prints a line about the progress.
        failures: failed measurements; also lost calls, even if there are figures.
    """

    folder: Path
    sizes: tuple[int, ...]
    trials: int
    torch: Path | None
    say: Callable[[str], None]
    failures: list[str] = field(default_factory=list)

    def sizes_or(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """Return the requested sizes, or a benchmark's own."""
        return self.sizes or own

    def fail(self, what: str) -> None:
        """Record a failure, and print it."""
        self.failures.append(what)
        self.say(f"FAILED: {what}")


Benchmark: TypeAlias = Callable[[Session], Iterator[Figure]]
