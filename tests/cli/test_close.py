"""`rallypoint close`: ends a run, and says how it ended, even if somebody else was first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from rallypoint.cli import operator
from rallypoint.cli.main import main
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


class Stub:
    """A service that closes any run, and keeps what it was asked."""

    def __init__(self) -> None:
        """Nothing asked yet."""
        self.asked: list[pb.CloseRunRequest] = []

    def CloseRun(self, request: pb.CloseRunRequest) -> pb.CloseRunResponse:
        """Close."""
        self.asked.append(request)
        end = pb.RunEnd(outcome=pb.OUTCOME_CANCELLED, detail=f"closed by an operator: {request.reason}")
        return pb.CloseRunResponse(run_end=end)


def test_a_run_is_closed_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's hosts show it, and so does the command."""
    stub = Stub()

    def ask(endpoint: str, tls: Any, timeout: float, question: Any) -> Any:
        assert (endpoint, tls, timeout) == ("10.0.0.1:29400", None, 3.0)
        return question(stub)

    monkeypatch.setattr(operator, "call_rendezvous", ask)
    arguments = [
        "close",
        "digits",
        "--rdzv-endpoint",
        "10.0.0.1:29400",
        "--reason",
        "out of money",
        "--timeout",
        "3",
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.output == "run digits is closed: CANCELLED, closed by an operator: out of money\n"
    assert stub.asked == [pb.CloseRunRequest(run_id="digits", reason="out of money")]


def test_a_deleted_run_frees_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is repeated whose outcome is unknown: the second time, it could be a new run of that name."""
    deleted: list[str] = []

    def ask(endpoint: str, tls: Any, timeout: float, question: Any, *, repeatable: bool) -> Any:
        assert not repeatable
        return question(SimpleNamespace(DeleteRun=lambda request: deleted.append(request.run_id)))

    monkeypatch.setattr(operator, "call_rendezvous", ask)
    result = CliRunner().invoke(main, ["delete", "digits", "--rdzv-endpoint", "10.0.0.1:29400"])
    assert result.output == "run digits is deleted: its name is free\n"
    assert deleted == ["digits"]
