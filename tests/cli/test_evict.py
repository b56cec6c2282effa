"""`rallypoint evict`: takes a node out, or lets it in again, and says so if its name may be misspelt."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from rallypoint.cli import operator
from rallypoint.cli.main import main
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


@pytest.mark.parametrize(
    ("flags", "was_in", "told"),
    [
        ([], True, "node n3 was taken out of run digits and is refused from now on\n"),
        (
            [],
            False,
            "node n3 was not in run digits; it is refused from now on: check the spelling "
            "(`rallypoint evict digits n3 --readmit` undoes it)\n",
        ),
        (["--readmit"], True, "node n3 may join run digits\n"),
        (["--readmit"], False, "node n3 may join run digits; it was not evicted: check the spelling\n"),
    ],
)
def test_a_node_is_taken_out_or_let_in_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], was_in: bool, told: str
) -> None:
    """The service is asked what was said, where and for how long it was said."""
    asked: list[pb.EvictNodeRequest | pb.ReadmitNodeRequest] = []

    class Stub:
        def EvictNode(self, request: pb.EvictNodeRequest) -> pb.EvictNodeResponse:
            asked.append(request)
            return pb.EvictNodeResponse(was_in=was_in)

        def ReadmitNode(self, request: pb.ReadmitNodeRequest) -> pb.ReadmitNodeResponse:
            asked.append(request)
            return pb.ReadmitNodeResponse(was_evicted=was_in)

    def ask(endpoint: str, tls: Any, timeout: float, question: Any) -> Any:
        assert (endpoint, tls, timeout) == ("10.0.0.1:29400", None, 3.0)
        return question(Stub())

    monkeypatch.setattr(operator, "call_rendezvous", ask)
    arguments = ["--rdzv-endpoint", "10.0.0.1:29400", "--timeout", "3", "--reason", "bad memory", *flags]
    result = CliRunner().invoke(main, ["evict", "digits", "n3", *arguments])
    assert (result.exit_code, result.output) == (0, told)
    kind = pb.ReadmitNodeRequest if flags else pb.EvictNodeRequest
    assert asked == [kind(run_id="digits", node_id="n3", reason="bad memory")]
