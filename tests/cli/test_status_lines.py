"""What `status` prints into a pipe is one line for each run and node, for grep to find whole."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from rallypoint.cli import operator
from rallypoint.cli.main import main
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


def test_a_run_is_one_line_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name in full, and the whole sentence that says how it ended."""
    name, detail = "r" * 256, "worker of rank 1 failed: " + "much to say " * 80 + "and the end"
    run = pb.Run(run_id=name, phase=pb.PHASE_CLOSED, run_end=pb.RunEnd(detail=detail))
    monkeypatch.setattr(operator, "ask", lambda *_: pb.ListRunsResponse(runs=[run]))
    _, line = CliRunner().invoke(main, ["status"]).output.splitlines()
    assert line.startswith(f" {name} ")
    assert line.rstrip().endswith(detail)
