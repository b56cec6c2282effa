"""docs/first-hour.md shows the output of the present version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from first_hour.page import PAGE, differences, normalized
from first_hour.scenes import play
from first_hour.terminals import why_not

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(900)
async def test_the_page_shows_the_present_output() -> None:
    """Every command is typed into terminals of two hosts; `make first-hour` rewrites the page."""
    if reason := why_not():
        pytest.skip(reason)
    found = list(differences(PAGE.read_text(encoding="utf-8"), await play()))
    assert not found, "\n".join(found)


def test_output_is_compared_without_its_variable_parts() -> None:
    """Numbers, folders and random names do not count; words do."""
    page = "Text.\n```console\n12:00:01 joined lease=2 logs=/tmp/rallypoint_ab/x\nrank 1\n```\n"
    other = "Text.\n```console\nrank 0\nrank 1\n13:10:59 joined lease=7 logs=/tmp/rallypoint_cd/y\n```\n"
    assert list(differences(page, other)) == []
    assert list(differences(page, other.replace("joined", "left"))) == [
        "block 1: - N joined lease=N logs=FOLDER",
        "block 1: + N left lease=N logs=FOLDER",
    ]
    assert list(differences(page, other.replace("Text", "Other"))) == ["the text between the blocks differs"]
    assert normalized("run_id=standalone-0a1b2c3d 59s") == normalized("run_id=standalone-99887766 1m02s")


def test_the_readme_shows_output_of_the_page() -> None:
    """Its ten lines of output are those of the crash with a restart."""
    (block,) = re.findall(r"^```console\n(\$ pip install[^`]*?crash\.py.*?)^```$", README, re.M | re.S)
    page = {normalized(line) for line in PAGE.read_text(encoding="utf-8").splitlines()}
    output = [line for line in block.splitlines() if not line.startswith("$")]
    assert len(output) > 5
    assert [line for line in output if normalized(line) not in page] == []


def test_the_readme_shows_the_scripts_of_its_commands() -> None:
    """Other scripts exist, or are the reader's own. Those shown are the page's, so that their output is tested."""
    shown = dict(re.findall(r"^`(\w+\.py)`[^`]*\n\n(```python\n.*?^```$)", README, re.M | re.S))
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name, script in shown.items() if script not in page] == []
    commands = re.findall(r"^```console\n(.*?)^```$", README, re.M | re.S)
    named = {name for command in commands for name in re.findall(r"[\w/.-]+\.py\b", command)}
    unknown = {Path(name).name for name in named if not (ROOT / name).exists()} - shown.keys()
    assert unknown == {"train.py"}
    assert "`train.py` stands for your own script" in README
