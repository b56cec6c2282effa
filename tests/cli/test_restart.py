"""`rallypoint restart`: restarts a run's workers, and reports the result."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from rallypoint.cli import operator
from rallypoint.cli.main import main
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.endpoint import CallTarget


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (pb.RestartRunResponse(ended_round=7), "run digits: round 7 ended, all workers restart\n"),
        (pb.RestartRunResponse(hurried=True), "run digits: the delayed restart happens now\n"),
        (pb.RestartRunResponse(), "run digits has no round at present, so there was nothing to restart\n"),
    ],
)
def test_a_run_is_restarted_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, answer: pb.RestartRunResponse, told: str
) -> None:
    """The request has the values of the command line, and goes to its endpoint with its timeout."""
    asked: list[pb.RestartRunRequest] = []

    class Stub:
        def GetRun(self, request: pb.GetRunRequest) -> pb.GetRunResponse:
            return pb.GetRunResponse(run=pb.Run(run_id=request.run_id, round=7))

        def RestartRun(self, request: pb.RestartRunRequest) -> pb.RestartRunResponse:
            asked.append(request)
            return answer

    def ask(_: Any, target: CallTarget, question: Any) -> Any:
        assert target == CallTarget("10.0.0.1:29400", None, 3.0)
        return question(Stub())

    monkeypatch.setattr(operator, "call", ask)
    arguments = ["--rdzv-endpoint", "10.0.0.1:29400", "--timeout", "3", "--reason", "new data"]
    result = CliRunner().invoke(main, ["restart", "digits", *arguments])
    assert (result.exit_code, result.output) == (0, told)
    assert asked == [pb.RestartRunRequest(run_id="digits", reason="new data", round=7)]
