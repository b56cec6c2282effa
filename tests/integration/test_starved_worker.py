"""After an OOM kill of a worker, the report and failure.json name the kill, and the cgroup whose limit was reached."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT, rallypoint
from support.mortal import mortal
from support.small_cgroup import GLUTTON, small_cgroup

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a cgroup"),
]

# Bytes; enough for the agent with its services, which must survive.
LIMIT = 384 << 20


def test_an_oom_kill_is_distinguished_from_other_kills(tmp_path: Path) -> None:
    """An OOM kill is detected if the agent and its workers share a cgroup, as in a container or a job of Slurm."""
    with small_cgroup(LIMIT) as folder:
        wanted = tmp_path / "wanted.json"
        flags = ("--standalone", "--log-dir", tmp_path, "--failure-file", wanted, "--no-python", "--")
        enter = ("sh", "-c", 'echo 0 > "$0" && exec "$@"', str(folder / "cgroup.procs"))
        ran = rallypoint(
            *("run", *flags, sys.executable, "-S", "-c", GLUTTON),
            program=mortal(*enter, str(RALLYPOINT)),
            timeout=120,
        )
    assert ran.returncode == 1, ran.stderr
    sentence = (
        f"killed by the kernel OOM killer (SIGKILL): its cgroup /{folder.name} reached its memory limit of"
    )
    assert f"reason     {sentence} 384.0 MiB; its peak was " in ran.stderr
    (document,) = [json.loads(path.read_text()) for path in tmp_path.glob("*/failure.json")]
    assert json.loads(wanted.read_text()) == document
    first = document["first_failure"]
    assert (first["kind"], first["signal"], first["rank"]) == ("out_of_memory", "SIGKILL", 0)
    assert first["message"].startswith(sentence)
    assert document["retry"] == "here"
