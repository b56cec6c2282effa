"""docs/why-not-torchrun.md is true: its table is the output of the command, except for the seconds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torture.length import ordinarily
from why_not_torchrun import LAUNCHERS, SCENES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "why-not-torchrun.md").read_text()


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of a table's rows by issue, without measured seconds."""
    found = re.findall(r"^\| \[(\d+)\]\(\S+\) \| (.*) \|$", text, re.MULTILINE)
    return {issue: re.sub(r" after \d+ s", "", cells).split(" | ") for issue, cells in found}


def test_the_page_has_each_scene() -> None:
    """It is in the table, with its event, and in the text."""
    assert {issue: cells[0] for issue, cells in rows(PAGE).items()} == {
        issue: scene.fault for issue, scene in SCENES.items()
    }
    text = PAGE.partition("## The issues")[2]
    assert [issue for issue in SCENES if f"issues/{issue}))." not in text] == []


@pytest.mark.torch
@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_table_is_true(tmp_path: Path) -> None:
    """All scenes in one run, most of which wait; torchrun's column, if it depends on races, in full runs only."""
    pytest.importorskip("torch")
    if os.geteuid() or not shutil.which("cc"):
        pytest.skip("a host name of its own needs root, and a clock of its own a C compiler")
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "examples" / "why_not_torchrun.py")),
            *("--keep", str(tmp_path), *ordinarily(("--under", LAUNCHERS[-1]), in_full=())),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = {issue: ordinarily([cells[0], cells[-1]], in_full=cells) for issue, cells in rows(PAGE).items()}
    assert rows(done.stdout) == page, done.stderr
