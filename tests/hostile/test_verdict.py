"""An answer is checked against the contract in the .proto files."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from hostile.attacker import Outcome
from hostile.contract import documented_reasons
from hostile.requests import Request
from hostile.verdict import fault

Code = grpc.StatusCode
SET = Request(1, 2, "/rallypoint.rendezvous.v1.StoreService/Set", (b"",), 30.0, None, False, 1)
HASTY = replace(SET, timeout=0.001)
GONE = replace(SET, cancel_after=0.0)
WATCH = replace(SET, path="/rallypoint.rendezvous.v1.StateService/WatchState")
NO_METHOD = replace(SET, path="/nobody.v1.NobodyService/Ask")
LARGE = replace(SET, messages=(bytes(4 * 1024 * 1024 + 1),))
HEALTH = replace(SET, path="/grpc.health.v1.Health/Check")


def test_the_tables_of_all_services_are_found() -> None:
    """Each has the row that every one of them has, and its own rows."""
    tables = documented_reasons()
    assert [name.rpartition(".")[2] for name in tables] == [
        "SupervisorService",
        "RendezvousService",
        "StateService",
        "StoreService",
        "ServerService",
        "TimerService",
    ]
    for name, table in tables.items():
        # The requests of ServerService have no fields.
        has_fields = not name.endswith("ServerService")
        assert (("INVALID_ARGUMENT", "INVALID_ARGUMENT") in table) == has_fields
        assert ("INVALID_ARGUMENT", "MALFORMED_MESSAGE") in table
        assert ("RESOURCE_EXHAUSTED", "TOO_MANY_REQUESTS") in table
    assert ("FAILED_PRECONDITION", "ROUND_OVER") in tables["rallypoint.rendezvous.v1.StoreService"]


@pytest.mark.parametrize(
    ("request_", "outcome"),
    [
        (SET, Outcome(Code.OK)),
        (SET, Outcome(Code.FAILED_PRECONDITION, "ROUND_OVER")),
        (HASTY, Outcome(Code.DEADLINE_EXCEEDED)),
        (WATCH, Outcome(Code.DEADLINE_EXCEEDED)),
        (GONE, Outcome(Code.CANCELLED)),
        (NO_METHOD, Outcome(Code.UNIMPLEMENTED)),
        (HEALTH, Outcome(Code.NOT_FOUND)),
        (LARGE, Outcome(Code.RESOURCE_EXHAUSTED)),
    ],
)
def test_a_documented_outcome_is_no_fault(request_: Request, outcome: Outcome) -> None:
    """gRPC's own errors are right where they are allowed."""
    assert fault(request_, outcome, documented_reasons()) is None


@pytest.mark.parametrize(
    ("request_", "outcome"),
    [
        (SET, Outcome(Code.UNKNOWN)),
        (SET, Outcome(Code.INTERNAL, "ROUND_OVER")),
        (HEALTH, Outcome(Code.UNKNOWN)),
        (SET, Outcome(Code.UNAVAILABLE, "UNEXPECTED_ERROR")),
        (SET, Outcome(Code.FAILED_PRECONDITION, "TOO_LATE")),
        (SET, Outcome(Code.INVALID_ARGUMENT, "ROUND_OVER")),
        (SET, Outcome(Code.INVALID_ARGUMENT)),
        (SET, Outcome(Code.DEADLINE_EXCEEDED)),
        (SET, Outcome(Code.CANCELLED)),
        (SET, Outcome(Code.UNAVAILABLE)),
        (SET, Outcome(Code.RESOURCE_EXHAUSTED)),
        (NO_METHOD, Outcome(Code.NOT_FOUND)),
        (HEALTH, Outcome(Code.UNAVAILABLE)),
    ],
)
def test_an_undocumented_outcome_is_a_fault(request_: Request, outcome: Outcome) -> None:
    """Above all, the two codes without information for a caller; a bug; and silence."""
    assert fault(request_, outcome, documented_reasons()) is not None
