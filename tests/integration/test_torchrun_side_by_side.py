"""The output of both launchers in docs/why-not-torchrun.md is their real output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from integration.torchrun_side_by_side import SCENES, play
from integration.torchrun_twice import LAUNCHERS

PAGE = Path(__file__).parents[2] / "docs" / "why-not-torchrun.md"

EXPECTED = {
    "hello": (r"hello from a worker", 0),
    "missing": (r"Error: .*'missing\.py' does not exist; expected a Python script", 2),
    "exit": (r"error worker failed rank=0 pid=\d+ reason='exited with code 3'", 1),
    "segfault": (r"exit code  killed by SIGSEGV \(signal 11\)", 1),
    "exception": (r"error worker failed rank=0 pid=\d+ reason='ValueError: a bad batch'", 1),
    "traceback": (r"ValueError: a bad batch", 1),
    "oom": (r"error worker failed rank=0 pid=\d+ reason='killed by the kernel OOM killer \(SIGKILL\): ", 1),
    "stdin": (r"hi", 0),
    "breakpoint": (r"\(Pdb\)", 0),
    "requeue": (r"running again", 0),
    "requeue-service": (r"running again", 0),
}
"""Start of the first useful line under `rallypoint run`, and its exit code."""

_COMPARED = 60  # characters: the cut of a line depends on the length of a process id


def cells(name: str) -> list[str]:
    """Return the cells of torchrun and of Rallypoint in the page's row of a scene."""
    scene = SCENES[name]
    _, row, rest = PAGE.read_text().partition(f"| {scene.event} | {scene.useful} | ")
    assert row, f"the page has no row of {name}"
    return rest.partition(" |\n")[0].split(" | ")


def regular(text: str) -> str:
    """Replace numbers, which differ from run to run."""
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*", "N", text)


def test_each_scene_is_tried() -> None:
    """Each scene has an expected line."""
    assert EXPECTED.keys() == SCENES.keys()


@pytest.mark.torch
@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXPECTED)
def test_the_first_useful_line(name: str, tmp_path: Path) -> None:
    """The page has the printed line, and under Rallypoint it is the expected one."""
    pytest.importorskip("torch")
    for launcher, cell in zip(LAUNCHERS, cells(name), strict=True):
        outcome = play(SCENES[name], launcher, tmp_path / launcher)
        assert f"exit code {outcome.exit_code}" in cell, outcome.output
        shown = f": `{regular(outcome.text)[:_COMPARED]}" if outcome.line else "no such line;"
        assert shown in regular(cell), outcome.output
        if launcher == "rallypoint":
            line, exit_code = EXPECTED[name]
            assert re.match(line, outcome.text), outcome.output
            assert outcome.exit_code == exit_code
