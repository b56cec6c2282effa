"""A figure stands beside its floor and its peer, and `bench.json` contains all of it."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from benchmarks.figures import Figure, show_figures, write_figures


def test_ratios_are_ours_divided_by_theirs_and_none_without_a_divisor() -> None:
    """Ratios are ours divided by theirs, and None without a divisor."""
    assert Figure("storm", 8, 3.0, "s", floor=2.0, peer=60.0).ratio_to_floor == 1.5
    assert Figure("storm", 8, 3.0, "s", floor=2.0, peer=60.0).ratio_to_peer == 0.05
    assert Figure("storm", 8, 3.0, "s").ratio_to_floor is None
    assert Figure("storm", 8, 3.0, "s", floor=0.0).ratio_to_floor is None


def test_the_file_is_a_list_with_an_object_for_each_figure(tmp_path: Path) -> None:
    """Programs read the file; its keys are an interface."""
    write_figures(tmp_path / "bench.json", [Figure("storm", 8, 3.0, "s", floor=2.0, note="why")])
    assert json.loads((tmp_path / "bench.json").read_text()) == [
        {
            "name": "storm",
            "n": 8,
            "value": 3.0,
            "unit": "s",
            "floor": 2.0,
            "peer": None,
            "note": "why",
            "ratio_to_floor": 1.5,
            "ratio_to_peer": None,
        }
    ]


def test_the_table_has_a_row_for_each_figure_and_a_dash_for_a_missing_value() -> None:
    """The table shows a dash, and not zero, for a missing value."""
    out = io.StringIO()
    show_figures(Console(file=out, width=150), [Figure("storm", 1024, 1234.5, "s", floor=2.0)])
    (row,) = (line for line in out.getvalue().splitlines() if "storm" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "storm",
        "1,024",
        "1,234",
        "2",
        "617",
        "-",
        "-",
        "s",
        "",
    ]
