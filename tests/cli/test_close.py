"""`rallypoint close`: ends a run and shows its outcome, also if another client ended it first."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from rallypoint.cli import operator
from rallypoint.cli.main import main
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.endpoint import CallTarget


class Stub:
    """A service that closes any run, and records the requests."""

    def __init__(self) -> None:
        self.asked: list[pb.CloseRunRequest] = []

    def GetRun(self, request: pb.GetRunRequest) -> pb.GetRunResponse:
        """Return the incarnation of the run."""
        return pb.GetRunResponse(run=pb.Run(run_id=request.run_id, incarnation="first"))

    def CloseRun(self, request: pb.CloseRunRequest) -> pb.CloseRunResponse:
        self.asked.append(request)
        end = pb.RunEnd(outcome=pb.OUTCOME_CANCELLED, detail=f"closed by an operator: {request.reason}")
        return pb.CloseRunResponse(run_end=end)


def test_a_run_is_closed_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's hosts show the reason, and so does the command."""
    stub = Stub()

    def ask(_: Any, target: CallTarget, question: Any) -> Any:
        assert target == CallTarget("10.0.0.1:29400", None, 3.0)
        return question(stub)

    monkeypatch.setattr(operator, "call", ask)
    where = ["--rdzv-endpoint", "10.0.0.1:29400", "--timeout", "3"]
    result = CliRunner().invoke(main, ["close", "digits", "--reason", "out of money", *where])
    assert result.output == "run digits is closed: CANCELLED, closed by an operator: out of money\n"
    closed = pb.CloseRunRequest(run_id="digits", reason="out of money", incarnation="first")
    assert stub.asked == [closed]


@pytest.mark.parametrize("second", [False, True])
def test_a_deleted_run_frees_its_name(monkeypatch: pytest.MonkeyPatch, second: bool) -> None:
    """Only that incarnation is deleted; an attempt without a reply that deleted it counts as success."""
    deleted: list[pb.DeleteRunRequest] = []

    class Stub:
        async def GetRun(self, request: pb.GetRunRequest) -> pb.GetRunResponse:
            return pb.GetRunResponse(run=pb.Run(run_id=request.run_id, incarnation="first"))

        async def DeleteRun(self, request: pb.DeleteRunRequest) -> None:
            deleted.append(request)
            if second:
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, nothing, nothing)

    def ask(_: Any, target: CallTarget, question: Any) -> Any:
        return asyncio.run(question(Stub()))

    monkeypatch.setattr(operator, "call", ask)
    result = CliRunner().invoke(main, ["delete", "digits", "--rdzv-endpoint", "10.0.0.1:29400"])
    assert result.output == "run digits is deleted: its name is free\n"
    assert deleted == [pb.DeleteRunRequest(run_id="digits", incarnation="first")]
