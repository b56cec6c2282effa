"""Code for torch's timers is watched without changes, with torch's own client, or with one line changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli.cli_process import rallypoint

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("torch_timer_worker.py")
FOREIGN_TIMER_WORKER = Path(__file__).with_name("foreign_timer_worker.py")


def test_a_worker_can_not_have_another_one_killed(tmp_path: Path) -> None:
    """A timer that rank 0 writes for rank 1's process is ignored with a log line; its own timers still work."""
    flags = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "0", "--log-dir", tmp_path / "logs")
    result = rallypoint("run", *flags, FOREIGN_TIMER_WORKER, tmp_path, timeout=90)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("neither this worker nor a descendant of it") == 1
    assert [path.parent.name for path in tmp_path.glob("logs/*/attempt_0/*/hang.txt")] == ["0"]


@pytest.mark.torch
@pytest.mark.parametrize("client", ["stock", "ours", "queue"])
def test_a_worker_that_hangs_in_torchs_expires_is_reaped_and_the_job_goes_on(
    tmp_path: Path, client: str
) -> None:
    """Its failure names the scope, its neighbour restarts with it, and the second round succeeds."""
    pytest.importorskip("torch.distributed.elastic.timer")
    flags = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--log-format", "json")
    result = rallypoint("run", *flags, "--log-dir", tmp_path, WORKER, client, timeout=170)
    assert result.returncode == 0, result.stderr
    ends = re.findall(r"rank \d is done after \d restarts", result.stdout)
    assert [end for end in sorted(ends) if end.endswith("1 restarts")] == [
        "rank 0 is done after 1 restarts",
        "rank 1 is done after 1 restarts",
    ]
    assert "rank 1 is done after 0 restarts" not in ends
    assert "did not leave 'all reduce' within" in result.stderr
    assert "the child was killed" not in result.stderr
