"""Every refusal has its code and reason, as the contract says, and carries what a program needs."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.base import refusals as state
from rallypoint.rendezvous.base import refusals as store
from rallypoint.rendezvous.base.errors import (
    Draining,
    EtcdAway,
    EtcdFull,
    EventsCompacted,
    NotOwner,
    OutcomeUnknown,
    RunBroken,
    StreamReplaced,
    of_unknown_outcome,
)
from rallypoint.rendezvous.base.limits import LimitReached
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.state import Outcome, ScaleUpPolicy
from rallypoint.rendezvous.journal.journal import JournalError

DIFFERENCES: dict[str, tuple[object, object]] = {
    "max_nodes": (2, 4),
    "scale_up_policy": (ScaleUpPolicy.IMMEDIATE, ScaleUpPolicy.ON_RESTART),
}


TABLE: list[tuple[Exception, StatusCode, str, dict[str, str]]] = [
    (commands.RunNotFound("r"), StatusCode.NOT_FOUND, "RUN_NOT_FOUND", {"run_id": "r"}),
    (
        commands.RunIsClosed("r", Outcome.SUCCEEDED, "all done"),
        StatusCode.FAILED_PRECONDITION,
        "RUN_CLOSED",
        {"run_id": "r", "outcome": "SUCCEEDED"},
    ),
    (
        commands.RunIsEnding("r", ("a", "b")),
        StatusCode.FAILED_PRECONDITION,
        "RUN_ENDING",
        {"run_id": "r", "nodes": "2"},
    ),
    (commands.RunInUse("r", 3), StatusCode.FAILED_PRECONDITION, "RUN_IN_USE", {"run_id": "r", "nodes": "3"}),
    (
        commands.SettingsDiffer("r", DIFFERENCES),
        StatusCode.FAILED_PRECONDITION,
        "SETTINGS_DIFFER",
        {"max_nodes": "2", "scale_up_policy": "IMMEDIATE"},
    ),
    (
        commands.LeaseLost("r", "n", 3, None),
        StatusCode.FAILED_PRECONDITION,
        "LEASE_LOST",
        {"run_id": "r", "node_id": "n", "lease": "3"},
    ),
    (
        commands.LeaseLost("r", "n", 3, 7),
        StatusCode.FAILED_PRECONDITION,
        "LEASE_LOST",
        {"run_id": "r", "node_id": "n", "lease": "3", "superseded_by": "7"},
    ),
    (
        commands.LeaseNotProven("r", "n"),
        StatusCode.PERMISSION_DENIED,
        "LEASE_NOT_PROVEN",
        {"run_id": "r", "node_id": "n"},
    ),
    (
        commands.NodeIdTaken("r", "n", "alice"),
        StatusCode.PERMISSION_DENIED,
        "NODE_ID_TAKEN",
        {"run_id": "r", "node_id": "n"},
    ),
    (
        commands.JoinTimedOut("r", "n", 4, 600.0),
        StatusCode.FAILED_PRECONDITION,
        "JOIN_TIMED_OUT",
        {"run_id": "r", "node_id": "n", "min_nodes": "4"},
    ),
    (
        commands.RevisionAhead("r", 9, 5),
        StatusCode.OUT_OF_RANGE,
        "REVISION_AHEAD",
        {"run_id": "r", "revision": "9", "current": "5"},
    ),
    (
        commands.NodeIsEvicted("r", "n", "bad host"),
        StatusCode.FAILED_PRECONDITION,
        "NODE_EVICTED",
        {"run_id": "r", "node_id": "n", "by": "operator"},
    ),
    (
        commands.NodeIsEvicted("r", "n", "its workers failed 4 times", by_service=True),
        StatusCode.FAILED_PRECONDITION,
        "NODE_EVICTED",
        {"run_id": "r", "node_id": "n", "by": "service"},
    ),
    (
        commands.TooManyEvicted("r", 5),
        StatusCode.RESOURCE_EXHAUSTED,
        "TOO_MANY_EVICTED",
        {"run_id": "r", "limit": "5"},
    ),
    (
        LimitReached("TOO_MANY_RUNS", "r", "as many runs as may be", "delete some", 5),
        StatusCode.RESOURCE_EXHAUSTED,
        "TOO_MANY_RUNS",
        {"run_id": "r", "limit": "5"},
    ),
    (
        EventsCompacted("r", 3, 9),
        StatusCode.OUT_OF_RANGE,
        "EVENTS_COMPACTED",
        {"run_id": "r", "oldest_revision": "9"},
    ),
    (StreamReplaced("a newer stream"), StatusCode.ABORTED, "STREAM_REPLACED", {}),
    (Draining(), StatusCode.UNAVAILABLE, "DRAINING", {}),
    (NotOwner("r", "b:1"), StatusCode.UNAVAILABLE, "NOT_OWNER", {"run_id": "r", "owner_address": "b:1"}),
    (NotOwner("r"), StatusCode.UNAVAILABLE, "NOT_OWNER", {"run_id": "r"}),
    (NotOwner("r", cause="full"), StatusCode.UNAVAILABLE, "NOT_OWNER", {"run_id": "r", "cause": "full"}),
    (NotOwner(""), StatusCode.UNAVAILABLE, "NOT_OWNER", {}),
    (
        OutcomeUnknown("r", "b:1"),
        StatusCode.UNAVAILABLE,
        "OWNERSHIP_LOST",
        {"run_id": "r", "owner_address": "b:1"},
    ),
    (OutcomeUnknown("r"), StatusCode.UNAVAILABLE, "OWNERSHIP_LOST", {"run_id": "r"}),
    (EtcdFull("no space"), StatusCode.RESOURCE_EXHAUSTED, "ETCD_FULL", {}),
    (EtcdAway(), StatusCode.UNAVAILABLE, "ETCD_UNAVAILABLE", {}),
    (
        RunBroken("r", "KeyError"),
        StatusCode.FAILED_PRECONDITION,
        "RUN_BROKEN",
        {"run_id": "r", "cause": "KeyError"},
    ),
    (JournalError("the disk is full"), StatusCode.UNAVAILABLE, "JOURNAL_BROKEN", {}),
    (
        commands.RoundOver("r", 1, 2),
        StatusCode.FAILED_PRECONDITION,
        "ROUND_OVER",
        {"round": "1", "current_round": "2"},
    ),
    (
        store.RoundNotBegun("r", 3, 2),
        StatusCode.FAILED_PRECONDITION,
        "ROUND_NOT_BEGUN",
        {"round": "3", "current_round": "2"},
    ),
    (store.NotAnInteger("k", b"x" * 5_000_000), StatusCode.FAILED_PRECONDITION, "NOT_AN_INTEGER", {}),
    (store.IntegerOverflow("k", 2**63 - 1, 1), StatusCode.FAILED_PRECONDITION, "INTEGER_OVERFLOW", {}),
    (
        store.ValueTooLarge("k", 11, 10),
        StatusCode.FAILED_PRECONDITION,
        "VALUE_TOO_LARGE",
        {"limit_bytes": "10"},
    ),
    (
        store.KeyWaitTimedOut("r", ["j", "k"], 1.0),
        StatusCode.DEADLINE_EXCEEDED,
        "KEY_WAIT_TIMED_OUT",
        {"missing_count": "2", "missing": '["j","k"]'},
    ),
    (
        store.RunStoreFull("r", "k", 11, 10),
        StatusCode.RESOURCE_EXHAUSTED,
        "RUN_STORE_FULL",
        {"limit_bytes": "10"},
    ),
    (store.TooManyKeys("r", "k", 10), StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_KEYS", {"limit_keys": "10"}),
    (
        store.AnswerTooLarge(2, 11, 10, 1),
        StatusCode.RESOURCE_EXHAUSTED,
        "ANSWER_TOO_LARGE",
        {"limit_bytes": "10", "fitting": "1"},
    ),
    (store.TooManyWaiters("r", 10, 20, 0.5), StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WAITERS", {}),
    (store.StoreBusy("r", 10, 0.5), StatusCode.RESOURCE_EXHAUSTED, "STORE_BUSY", {}),
    (
        store.OperationSuperseded("c/0", 1, 2),
        StatusCode.FAILED_PRECONDITION,
        "OPERATION_SUPERSEDED",
        {"latest_sequence": "2"},
    ),
    (store.OperationReused("c/0", 1), StatusCode.INVALID_ARGUMENT, "OPERATION_REUSED", {}),
    (store.JournalFailed("disk full"), StatusCode.UNAVAILABLE, "JOURNAL_FAILED", {}),
    (state.TooManyStates(1), StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STATES", {"limit": "1"}),
    (state.StatesFull("r", 2, 1), StatusCode.RESOURCE_EXHAUSTED, "STATES_FULL", {"limit_bytes": "1"}),
    (store.StoresFull("r", 2, 1), StatusCode.RESOURCE_EXHAUSTED, "STORES_FULL", {"limit_bytes": "1"}),
    (state.StateBusy(1), StatusCode.RESOURCE_EXHAUSTED, "STATE_BUSY", {}),
    (state.TooManyWatchers(1), StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS", {"limit": "1"}),
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


def test_whoever_comes_past_a_limit_is_told_when_to_try_again() -> None:
    """In RetryInfo; the sentence names the limit, and the remedy."""
    told = translate(LimitReached("TOO_MANY_RUNS", "r", "as many as may", "delete some", 10, retry_after=7.0))
    assert told is not None
    assert (told.retry_after, told.message) == (7.0, "as many as may (the limit is 10); delete some")


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (Draining(), 0.1),
        (NotOwner("r"), 0.1),
        (NotOwner("r", "b:1"), None),
        (EtcdFull("no space"), 5.0),
        (OutcomeUnknown("r"), 0.1),
        (OutcomeUnknown("r", "b:1"), None),
        (store.TooManyWaiters("r", 10, 20, 0.5), 0.5),
        (store.StoreBusy("r", 10, 0.25), 0.25),
        (state.TooManyStates(1), 5.0),
        (state.StatesFull("r", 2, 1), 5.0),
        (state.StateBusy(1), 0.1),
        (state.TooManyWatchers(1), 5.0),
        (store.RunStoreFull("r", "k", 11, 10), None),
        (store.StoresFull("r", 11, 10), 5.0),
        (store.TooManyKeys("r", "k", 10), None),
        (store.AnswerTooLarge(2, 11, 10, 1), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_may_pass_by_itself_says_when_to_come_back(error: Exception, seconds: float | None) -> None:
    """What a full store or an answer too large needs is another request."""
    told = translate(error)
    assert told is not None
    assert told.retry_after == seconds


def test_what_was_refused_is_told_apart_from_what_may_have_been_done() -> None:
    """In the reason and in the sentence; where to ask next is the same."""
    refused = NotOwner("r", "b:1")
    unknown = of_unknown_outcome(refused)
    assert str(refused) == "nothing was done: run 'r' belongs to the replica at b:1; send the request there"
    assert (
        str(unknown)
        == "the outcome is unknown: run 'r' belongs to the replica at b:1; send the request there"
    )
    assert of_unknown_outcome(draining := Draining()) is draining


def test_every_refusal_is_in_the_table() -> None:
    """None can reach the wire as an unexpected error."""
    assert set(commands.Refused.__subclasses__()) <= {type(row[0]) for row in TABLE}


def test_what_it_does_not_know_it_leaves_alone() -> None:
    """A bug stays a bug."""
    assert translate(KeyError("x")) is None
