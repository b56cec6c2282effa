"""A command works with any standard streams and encoding that it inherits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.marks import slow
from support.waiting import PATIENCE

RALLYPOINT = f"{Path(sys.executable).parent}/rallypoint"


@pytest.mark.parametrize("closed", [*(slow(each) for each in ("<&-", ">&-", "2>&-")), "<&- >&- 2>&-"])
def test_a_job_runs_without_a_standard_stream(tmp_path: Path, closed: str) -> None:
    """The output of its workers goes nowhere; above all, not into a socket that got the stream's number."""
    script = tmp_path / "show.py"
    script.write_text("import sys; print('x' * 10_000); print('y' * 10_000, file=sys.stderr)")
    command = f'exec "$0" run --standalone --nproc-per-node 2 "$1" {closed}'
    ended = subprocess.run(
        ["sh", "-c", command, RALLYPOINT, str(script)], capture_output=True, check=False, timeout=PATIENCE
    )
    assert (ended.returncode, b"spawner" in ended.stderr) == (0, False)


def test_characters_missing_in_the_encoding_are_escaped() -> None:
    """A name in another script does not end a command with a traceback."""
    program = "from rallypoint.cli import main as inherited; print('训练')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert (shown.stdout, shown.stderr) == ("\\u8bad\\u7ec3\n", "")
