"""A measured value beside the least possible cost: a row of the table and of `bench.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

_UNMEASURED = "-"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of ours, and the same figure of the floor and of the peer, in one unit.

    Attributes:
        name: benchmark, figure and variant, with dots between them.
        n: size: nodes, connections or writers, depending on the benchmark.
        value: ours.
        unit: of value, floor and peer.
        floor: value of the least program that could do the work; None if there is none.
        peer: value of torch; None if torch is not installed, did not finish, or has no equivalent.
        note: for people.
    """

    name: str
    n: int
    value: float
    unit: str
    floor: float | None = None
    peer: float | None = None
    note: str = ""

    @property
    def ratio_to_floor(self) -> float | None:
        """Ours divided by the floor's."""
        return _ratio(self.value, self.floor)

    @property
    def ratio_to_peer(self) -> float | None:
        """Ours divided by the peer's."""
        return _ratio(self.value, self.peer)

    def as_record(self) -> dict[str, object]:
        """The object for `bench.json`."""
        return asdict(self) | {"ratio_to_floor": self.ratio_to_floor, "ratio_to_peer": self.ratio_to_peer}


def _ratio(value: float, other: float | None) -> float | None:
    return value / other if other else None


def write_figures(path: Path, figures: Sequence[Figure]) -> None:
    """Write `bench.json`: a list with one object per figure."""
    path.write_text(json.dumps([figure.as_record() for figure in figures], indent=2) + "\n")


def show_figures(console: Console, figures: Sequence[Figure]) -> None:
    """Print the table."""
    table = Table(title="Ours, the floor's and torch's; /floor and /torch: ours divided by theirs")
    table.add_column("figure", no_wrap=True)
    for column in ("n", "ours", "floor", "/floor", "torch", "/torch"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("unit")
    table.add_column("note")
    for figure in figures:
        table.add_row(
            figure.name,
            f"{figure.n:,}",
            _number(figure.value),
            _number(figure.floor),
            _number(figure.ratio_to_floor),
            _number(figure.peer),
            _number(figure.ratio_to_peer),
            figure.unit,
            figure.note,
        )
    console.print(table)


def _number(value: float | None) -> str:
    """Format with three significant digits, but never with an exponent."""
    if value is None:
        return _UNMEASURED
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
