"""`make demo` injects faults into a training job, and the job still completes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import demo
from support.processes import fresh_marker, gone

pytestmark = [pytest.mark.slow, pytest.mark.integration]


def test_every_fault_is_recovered_and_named(tmp_path: Path) -> None:
    """The accuracy is reached, the timeline shows each fault with its detection and times; no process is left."""
    with fresh_marker() as marker:
        done = subprocess.run(
            [sys.executable, demo.__file__, "--var", str(tmp_path)],
            env={**os.environ, "DEMO_MARKER": marker},
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert gone(marker)

    told = json.loads((tmp_path / "demo.json").read_text())
    assert told["accuracy"] >= 0.92
    worker, hung, agent, newcomer, rendezvous = told["faults"]
    assert "killed by SIGKILL" in worker["detail"]
    assert "did not leave 'step' within 2 s" in hung["detail"]
    assert "was lost: its connection broke" in agent["detail"]
    assert "joined" in newcomer["detail"]
    assert "no worker was restarted" in rendezvous["detail"]
    assert [fault["workers"] for fault in told["faults"]] == [[4, 4], [4, 4], [4, 2], [2, 4], [4, 4]]
    assert [fault["restarts"] for fault in told["faults"]] == [1, 2, 2, 2, 2]
    assert hung["noticed_after"] >= demo.STEP_TIMEOUT
    rounds = [fault["rounds"] for fault in told["faults"]]
    assert all(before < after for before, after in rounds[:4])
    assert rounds[4][0] == rounds[4][1]
    for fault in told["faults"]:
        assert (
            0 <= fault["noticed_after"] < fault["epoch_after"]
        )  # rounded: less than half a millisecond is 0
        assert 0 < fault["down"] <= fault["epoch_after"]

    picture = ElementTree.parse(tmp_path / "demo.svg")  # noqa: S314  (of its own making)
    drawn = [text.text for text in picture.iterfind(".//{*}text")]
    for fault in told["faults"]:
        assert any(label and label[0] == fault["fault"][0] and len(label) > 1 for label in drawn)
        assert f"{fault['epoch_after']:.2f} s" in drawn

    table = " ".join(done.stdout.split("fault, and who noticed it")[1].split())
    for fault in told["faults"]:
        for text in (
            fault["fault"],
            fault["detail"],
            f"{fault['noticed_after']:.2f} s",
            f"{fault['down']:.2f} s",
        ):
            assert " ".join(text.split()) in table
    assert f"Held-out accuracy {told['accuracy']:.2f}" in table
