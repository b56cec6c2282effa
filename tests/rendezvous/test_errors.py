"""Every refusal has its code and reason, as the contract says, and carries what a program needs."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from rallypoint.rendezvous.core import refusals
from rallypoint.rendezvous.core.state import Outcome, ScaleUpPolicy
from rallypoint.rendezvous.errors import Draining, StreamReplaced, translate
from rallypoint.rendezvous.journal.journal import JournalError

DIFFERENCES: dict[str, tuple[object, object]] = {
    "max_nodes": (2, 4),
    "scale_up_policy": (ScaleUpPolicy.IMMEDIATE, ScaleUpPolicy.ON_RESTART),
}


TABLE: list[tuple[Exception, StatusCode, str, dict[str, str]]] = [
    (refusals.RunNotFound("r"), StatusCode.NOT_FOUND, "RUN_NOT_FOUND", {"run_id": "r"}),
    (
        refusals.RunIsClosed("r", Outcome.SUCCEEDED, "all done"),
        StatusCode.FAILED_PRECONDITION,
        "RUN_CLOSED",
        {"run_id": "r", "outcome": "SUCCEEDED"},
    ),
    (
        refusals.SettingsDiffer("r", DIFFERENCES),
        StatusCode.FAILED_PRECONDITION,
        "SETTINGS_DIFFER",
        {"max_nodes": "2", "scale_up_policy": "IMMEDIATE"},
    ),
    (
        refusals.LeaseLost("r", "n", 3, None),
        StatusCode.FAILED_PRECONDITION,
        "LEASE_LOST",
        {"run_id": "r", "node_id": "n", "lease": "3"},
    ),
    (
        refusals.LeaseLost("r", "n", 3, 7),
        StatusCode.FAILED_PRECONDITION,
        "LEASE_LOST",
        {"run_id": "r", "node_id": "n", "lease": "3", "superseded_by": "7"},
    ),
    (
        refusals.JoinTimedOut("r", "n", 4, 600.0),
        StatusCode.FAILED_PRECONDITION,
        "JOIN_TIMED_OUT",
        {"run_id": "r", "node_id": "n", "min_nodes": "4"},
    ),
    (
        refusals.RevisionAhead("r", 9, 5),
        StatusCode.OUT_OF_RANGE,
        "REVISION_AHEAD",
        {"run_id": "r", "revision": "9", "current": "5"},
    ),
    (StreamReplaced("a newer stream"), StatusCode.ABORTED, "STREAM_REPLACED", {}),
    (Draining(), StatusCode.UNAVAILABLE, "DRAINING", {}),
    (JournalError("the disk is full"), StatusCode.UNAVAILABLE, "JOURNAL_BROKEN", {}),
]


@pytest.mark.parametrize(("error", "code", "reason", "metadata"), TABLE, ids=[row[2] for row in TABLE])
def test_the_table(error: Exception, code: StatusCode, reason: str, metadata: dict[str, str]) -> None:
    """Code for generic clients, reason and facts for ours, one sentence for people."""
    told = translate(error)
    assert told is not None
    assert (told.code, told.reason, told.metadata) == (code, reason, metadata)
    assert told.message == str(error)
    assert told.message
    assert "\n" not in told.message


def test_every_refusal_of_the_core_is_in_the_table() -> None:
    """None can reach the wire as an unexpected error."""
    assert set(refusals.Refused.__subclasses__()) <= {type(row[0]) for row in TABLE}


def test_what_it_does_not_know_it_leaves_alone() -> None:
    """A bug stays a bug."""
    assert translate(KeyError("x")) is None
