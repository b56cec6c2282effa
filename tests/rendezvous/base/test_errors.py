"""Every refusal has the code and reason of the contract, and carries the fields that programs need."""

from __future__ import annotations

from typing import TypeAlias

import pytest
from grpc import StatusCode as Code

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


Row: TypeAlias = tuple[Exception, str, float | None, dict[str, str]]


def row(error: Exception, reason: str, retry_after: float | None = None, **metadata: str) -> Row:
    """Return an error and its fields on the wire; `retry_after`: None if the same request would fail again."""
    return error, reason, retry_after, metadata


TABLE: dict[Code, list[Row]] = {
    Code.NOT_FOUND: [row(commands.RunNotFound("r"), "RUN_NOT_FOUND", run_id="r")],
    Code.FAILED_PRECONDITION: [
        row(
            commands.RunIsClosed("r", Outcome.SUCCEEDED, "all done"),
            "RUN_CLOSED",
            run_id="r",
            outcome="SUCCEEDED",
        ),
        row(commands.RunIsEnding("r", ("a", "b")), "RUN_ENDING", run_id="r", nodes="2"),
        row(commands.RunInUse("r", 3), "RUN_IN_USE", run_id="r", nodes="3"),
        row(
            commands.SettingsDiffer("r", DIFFERENCES),
            "SETTINGS_DIFFER",
            max_nodes="2",
            scale_up_policy="IMMEDIATE",
        ),
        row(commands.LeaseLost("r", "n", 3, None), "LEASE_LOST", run_id="r", node_id="n", lease="3"),
        row(
            commands.LeaseLost("r", "n", 3, 7),
            "LEASE_LOST",
            run_id="r",
            node_id="n",
            lease="3",
            superseded_by="7",
        ),
        row(
            commands.JoinTimedOut("r", "n", 4, 600.0),
            "JOIN_TIMED_OUT",
            run_id="r",
            node_id="n",
            min_nodes="4",
        ),
        row(
            commands.NodeIsEvicted("r", "n", "bad host"),
            "NODE_EVICTED",
            run_id="r",
            node_id="n",
            by="operator",
        ),
        row(
            commands.NodeIsEvicted("r", "n", "its workers failed 4 times", by_service=True),
            "NODE_EVICTED",
            run_id="r",
            node_id="n",
            by="service",
        ),
        row(RunBroken("r", "KeyError"), "RUN_BROKEN", run_id="r", cause="KeyError"),
        row(commands.RoundOver("r", 1, 2), "ROUND_OVER", round="1", current_round="2"),
        row(store.RoundNotBegun("r", 3, 2), "ROUND_NOT_BEGUN", round="3", current_round="2"),
        row(store.NotAnInteger("k", b"x" * 5_000_000), "NOT_AN_INTEGER"),
        row(store.IntegerOverflow("k", 2**63 - 1, 1), "INTEGER_OVERFLOW"),
        row(store.ValueTooLarge("k", 11, 10), "VALUE_TOO_LARGE", limit_bytes="10"),
        row(store.OperationSuperseded("c/0", 1, 2), "OPERATION_SUPERSEDED", latest_sequence="2"),
    ],
    Code.PERMISSION_DENIED: [
        row(commands.LeaseNotProven("r", "n"), "LEASE_NOT_PROVEN", run_id="r", node_id="n"),
        row(commands.NodeIdTaken("r", "n", "alice"), "NODE_ID_TAKEN", run_id="r", node_id="n"),
    ],
    Code.OUT_OF_RANGE: [
        row(commands.RevisionAhead("r", 9, 5), "REVISION_AHEAD", run_id="r", revision="9", current="5"),
        row(EventsCompacted("r", 3, 9), "EVENTS_COMPACTED", run_id="r", oldest_revision="9"),
    ],
    Code.RESOURCE_EXHAUSTED: [
        row(commands.TooManyEvicted("r", 5), "TOO_MANY_EVICTED", run_id="r", limit="5"),
        row(
            LimitReached("TOO_MANY_RUNS", "r", "as many runs as may be", "delete some", 5),
            "TOO_MANY_RUNS",
            retry_after=5.0,
            run_id="r",
            limit="5",
        ),
        row(EtcdFull("no space"), "ETCD_FULL", retry_after=5.0),
        row(store.RunStoreFull("r", "k", 11, 10), "RUN_STORE_FULL", limit_bytes="10"),
        row(store.TooManyKeys("r", "k", 10), "TOO_MANY_KEYS", limit_keys="10"),
        row(store.AnswerTooLarge(2, 11, 10, 1), "ANSWER_TOO_LARGE", limit_bytes="10", fitting="1"),
        row(store.TooManyWaiters("r", 10, 20, 0.5), "TOO_MANY_WAITERS", retry_after=0.5),
        row(store.StoreBusy("r", 10, 0.5), "STORE_BUSY", retry_after=0.5),
        row(state.TooManyStates(1), "TOO_MANY_STATES", retry_after=5.0, limit="1"),
        row(state.StatesFull("r", 2, 1), "STATES_FULL", retry_after=5.0, limit_bytes="1"),
        row(store.StoresFull("r", 2, 1), "STORES_FULL", retry_after=5.0, limit_bytes="1"),
        row(state.StateBusy(1), "STATE_BUSY", retry_after=0.1),
        row(state.TooManyWatchers(1), "TOO_MANY_WATCHERS", retry_after=5.0, limit="1"),
    ],
    Code.ABORTED: [row(StreamReplaced("a newer stream"), "STREAM_REPLACED")],
    Code.UNAVAILABLE: [
        row(Draining(), "DRAINING", retry_after=0.1),
        row(NotOwner("r", "b:1"), "NOT_OWNER", run_id="r", owner_address="b:1"),
        row(NotOwner("r"), "NOT_OWNER", retry_after=0.1, run_id="r"),
        row(NotOwner("r", cause="full"), "NOT_OWNER", retry_after=0.1, run_id="r", cause="full"),
        row(NotOwner(""), "NOT_OWNER", retry_after=0.1),
        row(OutcomeUnknown("r", "b:1"), "OWNERSHIP_LOST", run_id="r", owner_address="b:1"),
        row(OutcomeUnknown("r"), "OWNERSHIP_LOST", retry_after=0.1, run_id="r"),
        row(EtcdAway(), "ETCD_UNAVAILABLE", retry_after=0.5),
        row(JournalError("the disk is full"), "JOURNAL_BROKEN"),
        row(store.JournalFailed("disk full"), "JOURNAL_FAILED"),
    ],
    Code.DEADLINE_EXCEEDED: [
        row(
            store.KeyWaitTimedOut("r", ["j", "k"], 1.0),
            "KEY_WAIT_TIMED_OUT",
            missing_count="2",
            missing='["j","k"]',
        )
    ],
    Code.INVALID_ARGUMENT: [row(store.OperationReused("c/0", 1), "OPERATION_REUSED")],
}


@pytest.mark.parametrize(
    ("code", "expected"),
    [pytest.param(code, each, id=each[1]) for code, rows in TABLE.items() for each in rows],
)
def test_the_table(code: Code, expected: Row) -> None:
    """Code for generic clients; reason, metadata and retry time for ours; one sentence for people."""
    error, reason, retry_after, metadata = expected
    told = translate(error)
    assert told is not None
    assert (told.code, told.reason, told.metadata) == (code, reason, metadata)
    assert told.retry_after == retry_after
    assert told.message == str(error)
    assert told.message
    assert "\n" not in told.message


def test_the_error_of_a_limit_has_a_retry_delay() -> None:
    """RetryInfo has the time; the sentence has the limit and the remedy."""
    told = translate(LimitReached("TOO_MANY_RUNS", "r", "as many as may", "delete some", 10, retry_after=7.0))
    assert told is not None
    assert (told.retry_after, told.message) == (7.0, "as many as may (the limit is 10); delete some")


def test_a_refusal_differs_from_an_unknown_outcome() -> None:
    """The reason and the sentence differ; the next address is the same."""
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
    assert set(commands.Refused.__subclasses__()) <= {
        type(error) for rows in TABLE.values() for error, *_ in rows
    }


def test_an_unknown_error_is_not_translated() -> None:
    """A bug stays a bug."""
    assert translate(KeyError("x")) is None
