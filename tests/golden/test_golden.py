"""The public surface is that of the golden files: help, contract, metrics, exit codes, import paths."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from golden.files import difference, stored
from golden.render import metric_calls, metrics, public_names, registrars, render
from house.source import ROOT, product


@pytest.fixture(scope="module")
def rendered() -> dict[str, str]:
    return render()


@pytest.mark.parametrize("name", stored())
def test_a_golden_file_is_up_to_date(rendered: dict[str, str], name: str) -> None:
    text = difference(name, stored()[name], rendered.get(name, ""))
    if text:
        pytest.fail(text, pytrace=False)


def test_every_text_has_a_golden_file(rendered: dict[str, str]) -> None:
    """A new command has its own file."""
    missing = sorted(rendered.keys() - stored().keys())
    assert not missing, f"`make golden` writes {', '.join(missing)}"


@pytest.mark.slow
def test_the_environment_changes_no_golden_file(tmp_path: Path) -> None:
    """They do not contain the terminal, the user, the folder or the settings of a job."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tests"),
        "HOME": str(tmp_path / "home"),
        "USER": "somebody-else",
        "LOGNAME": "somebody-else",
        "TMPDIR": str(tmp_path),
        "COLUMNS": "200",
        "LINES": "7",
        "TERM": "dumb",
        "FORCE_COLOR": "1",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "3",
        "PET_NNODES": "7",
        "PET_RDZV_ENDPOINT": "elsewhere:1",
        "RALLYPOINT_RDZV_ENDPOINT": "elsewhere:1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "golden", "--check"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_of_the_source_is_registered() -> None:
    """A metric outside the classes that take a registry would be missed."""
    inside = {
        id(call) for module, name in registrars() for call in metric_calls(module, _class(module.tree, name))
    }
    calls = [(module, call) for module in product() for call in metric_calls(module)]
    assert calls
    assert [f"{module.shown}:{call.lineno}" for module, call in calls if id(call) not in inside] == []
    listed = {line.partition(" ")[0] for line in metrics().splitlines() if not line.startswith(" ")}
    assert len(listed) >= len(calls)
    named = {call.args[0].value for _, call in calls if call.args and isinstance(call.args[0], ast.Constant)}
    assert named <= listed


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return found


@pytest.mark.parametrize(
    "line", [line for line in stored()["public_imports.txt"].splitlines() if line[0] != " "]
)
def test_a_public_name_can_be_imported(line: str) -> None:
    """The list is read from the source; here the modules are loaded."""
    if line.startswith("rallypoint.torch"):
        pytest.importorskip("torch")
    module = importlib.import_module(line)
    if "v1" not in line.split("."):
        assert [name for name in public_names(line) if not hasattr(module, name)] == []
