"""The stock PyTorch example trains and resumes under stock torchrun: it does not depend on Rallypoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import PATIENCE

pytestmark = [pytest.mark.torch, pytest.mark.integration]

SCRIPT = Path(__file__).parents[2] / "examples" / "train_torch.py"


# Torch 2.13 rarely aborts a worker as it exits.
TORCHS_ABORT = "terminate called without an active exception"


def torchrun(checkpoint: Path, *arguments: object) -> list[str]:
    """Run two workers under stock torchrun, again if torch aborts one; return the lines they printed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    lines: list[str] = []
    for _ in range(2):
        done = subprocess.run(
            [*launch, str(SCRIPT), "--checkpoint", str(checkpoint), *map(str, arguments)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )
        lines += done.stdout.splitlines()
        if TORCHS_ABORT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return lines


def test_it_trains_and_resumes_under_stock_torchrun(tmp_path: Path) -> None:
    """A second launch goes on after the first one's last epoch, with its optimizer; it reaches the accuracy."""
    pytest.importorskip("torch")
    checkpoint = tmp_path / "new" / "digits"
    torchrun(checkpoint, "--epochs", 3)
    *lines, last = torchrun(checkpoint, "--epochs", 15)
    lines = [line for line in lines if line != last]  # a second launch prints it again
    epochs = [re.match(r"restart 0 · epoch (\d+)/15 · .* · world 2$", line) for line in lines]
    assert [match and int(match[1]) for match in epochs] == list(range(4, 16))
    result = re.match(r"held-out accuracy (\S+) · loss \S+$", last)
    assert result, last
    assert float(result[1]) >= 0.92
    assert sorted(entry.name for entry in checkpoint.iterdir()) == ["latest", "step-450"]


def test_it_knows_nothing_of_rallypoint() -> None:
    """It has no import and no variable of ours, so that it runs anywhere torch does."""
    assert not re.search(r"import rallypoint|from rallypoint|RALLYPOINT_", SCRIPT.read_text())
