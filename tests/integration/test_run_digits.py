"""`make run` trains to the end on its own cluster, and can be stopped at any time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import run_digits
from support.processes import fresh_marker, gone
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the example, as from a shell; at the end, none of its processes is left."""
    with fresh_marker() as marker:
        environment = {**os.environ, "RUN_MARKER": marker}
        command = [sys.executable, run_digits.__file__, "--var", str(folder)]
        with subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            yield process
        assert gone(marker)


def test_it_trains_to_the_end_and_prints_a_status_command(tmp_path: Path) -> None:
    """The console shows the folders, every epoch and the accuracy; the status command that it names works."""
    with started(tmp_path) as process:
        assert process.stdout is not None
        shown = [process.stdout.readline()]
        while " epoch 1/" not in shown[-1]:
            shown.append(process.stdout.readline())
        look = next(line for line in shown if line.startswith("look at it with"))
        status = subprocess.run(
            look.split("with", 1)[1].split(), capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert "FINAL, round 1, 4 workers on 2 nodes" in status.stdout
        rest, errors = process.communicate(timeout=150)
    assert (process.returncode, errors) == (0, "")
    output = "".join(shown) + rest
    assert all(f" epoch {epoch}/30 " in output for epoch in range(1, 31))
    last = re.search(r"^Held-out accuracy ([\d.]+): all 4 workers of round 1 succeeded", output, re.MULTILINE)
    assert last is not None
    assert float(last[1]) >= 0.92


@pytest.mark.slow
def test_ctrl_c_stops_everything(tmp_path: Path) -> None:
    """During the training it prints a clear message, ends with exit code 130, and leaves no process behind."""
    with started(tmp_path) as process:
        assert process.stdout is not None
        while " epoch 1/" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=150)
    assert process.returncode == 130
    assert errors.split("\n")[-2] == "Stopped by SIGINT; nothing that was started is left."


@pytest.mark.slow
def test_a_failure_is_reported(tmp_path: Path) -> None:
    """A job that can't start ends with exit code 1 and the reason, without a traceback of ours."""
    (tmp_path / "runs").write_text("in the way of a folder")
    with started(tmp_path) as process:
        _, errors = process.communicate(timeout=150)
    assert process.returncode == 1
    assert "cannot make a log directory" in errors
    assert "Nothing that was started is left; logs are below" in errors
    assert "Traceback" not in errors
