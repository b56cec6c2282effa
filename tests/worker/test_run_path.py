"""A worker of --run-path runs as torchrun's: `runpy` finds it, and its exception is recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import PATIENCE

SHOW = "import sys; print(__name__, sys.argv, {folder!r} in sys.path)"


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program by its path, in its own folder."""
    command = [sys.executable, "-u", "-m", "rallypoint.worker.run_path", str(program), *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=program.parent,
        env=os.environ | environment,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_script_is_main_and_its_folder_is_not_on_the_path(tmp_path: Path, safe: str) -> None:
    """Its arguments are its own."""
    script = tmp_path / "train.py"
    script.write_text(SHOW.format(folder=str(tmp_path)))
    assert run(script, "a", "-m", PYTHONSAFEPATH=safe).stdout == f"__main__ ['{script}', 'a', '-m'] False\n"


def test_a_folder_is_run_by_its_main_module(tmp_path: Path) -> None:
    """The folder is on the path, so that the main module can import the modules beside it."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(SHOW.format(folder=str(tmp_path / "package")))
    assert run(tmp_path / "package").stdout.endswith(" True\n")


def test_its_exception_is_recorded(tmp_path: Path) -> None:
    """The record is as if its main function were decorated."""
    script, error_file = tmp_path / "train.py", tmp_path / "error.json"
    script.write_text("raise ValueError('no data')")
    assert run(script, TORCHELASTIC_ERROR_FILE=str(error_file)).returncode == 1
    assert json.loads(error_file.read_text())["message"]["message"] == "ValueError: no data"


def test_its_exit_code_is_its_own(tmp_path: Path) -> None:
    """No failure of ours replaces it."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)")
    assert run(script).returncode == 7
