"""docs/architecture.md names files, folders and functions that exist, and leaves no folder out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
STEPS = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
FOLDERS = re.findall(r"^\| `([\w/]+)` \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.split("|")[1].strip())
def test_a_step_names_functions_that_exist(step: str) -> None:
    """Each file of a step is followed by functions that are defined in it."""
    functions: set[str] = set()
    for name in re.findall(r"`([^`]+)`", step.split("|")[3]):
        if name.endswith(".py"):
            tree = ast.parse((ROOT / name).read_text())
            functions = {
                node.name
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        else:
            assert name in functions
    assert functions


def test_the_life_of_a_failure_has_ten_steps() -> None:
    """The test above misses none."""
    assert len(STEPS) == 10


def test_every_folder_of_the_product_is_in_the_table() -> None:
    """Folders of generated code and packages that only hold folders are left out."""
    folders = {
        str(path.parent.relative_to(ROOT))
        for tree in ("services", "agent")
        for path in (ROOT / tree).rglob("*.py")
        if path.name != "__init__.py" and not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    }
    known = set(FOLDERS) | {
        # They are in the row of the folder around them.
        "services/rallypoint/rendezvous/journal/etcd",
        # Its client is the package's own file.
        "services/rallypoint/rendezvous",
        # `python -m rallypoint`.
        "agent/rallypoint",
        "services/rallypoint/timer",
        "agent/rallypoint/agent",
    }
    assert folders - known == set()
    assert [folder for folder in FOLDERS if not (ROOT / folder).is_dir()] == []
