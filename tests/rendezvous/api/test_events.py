"""An event describes in one sentence its fact and the cause, and carries the fields that programs need."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from rallypoint.rendezvous.api.events import event_of
from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.commands import Actor, ActorKind
from rallypoint.rendezvous.core.state import (
    LossReason,
    Outcome,
    RecoveryParts,
    ReportedFailure,
    RoundEnd,
    RoundEndCause,
    RunEnd,
    RunSettings,
    Seat,
)
from rallypoint.rendezvous.journal.codec import DecodedRecord, encode_record
from rallypoint.rendezvous.runs.run import api_messages
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_seconds

SETTINGS = RunSettings(min_nodes=2, max_nodes=4, max_restarts=3)
FAILURE = ReportedFailure(
    7, 3, 1, "trainer", "n1", "host1", 4711, -9, 1.7e9, "killed by SIGKILL", "Traceback …", "/l"
)
LOST = RoundEnd(7, RoundEndCause.NODE_LOST, "n3", "node n3 was lost: its connection broke")
FAILED = RoundEnd(
    7, RoundEndCause.WORKER_FAILED, "n1", "worker of rank 3 on node n1 failed: killed by SIGKILL"
)
PARTS = RecoveryParts(stopped=4.5, reformed=0.25, started=0.5)

# A fact, and its event: kind, node, round, sentence.
CASES: list[tuple[facts.Fact, str]] = [
    (
        facts.RunCreated(SETTINGS),
        "RUN_CREATED - 0: the run began: a round has 2 to 4 nodes, and 3 restarts may be used",
    ),
    (
        facts.NodeJoined("n3", 5, "10.0.0.3", 8, "trainer"),
        "NODE_JOINED n3 0: node n3 joined from 10.0.0.3 with 8 workers",
    ),
    (
        facts.NodeLost("n3", LossReason.LEASE_EXPIRED),
        "NODE_LOST n3 0: node n3 was lost: no heartbeat for 15 s (3 missed, one every 5 s)",
    ),
    (facts.NodeLeft("n3", "SIGTERM"), "NODE_LEFT n3 0: node n3 left: SIGTERM"),
    (
        facts.NodeDeparting("n3", "SIGTERM"),
        "NODE_DEPARTING n3 0: node n3 stops its workers in order to leave: SIGTERM",
    ),
    (
        facts.NodeEvicted("n3", "bad memory", lease=5),
        "NODE_EVICTED n3 0: node n3 was taken out by an operator: bad memory",
    ),
    (
        facts.NodeEvicted("n9", "bad memory"),
        "NODE_EVICTED n9 0: node n9, which was not in the run, was barred by an operator: bad memory",
    ),
    (facts.NodeReadmitted("n3", "repaired"), "NODE_READMITTED n3 0: node n3 may join again: repaired"),
    (
        facts.RoundFrozen(8, (Seat("n1", 0, 0, 0, 9, 8), Seat("n2", 1, 8, 8, 9, 1))),
        "ROUND_FROZEN - 8: round 8 frozen: 2 nodes, 9 workers",
    ),
    (facts.NodeConfirmed(8, "n1", 29500), "NODE_CONFIRMED n1 8: node n1 confirmed round 8"),
    (facts.RoundFinalized(8), "ROUND_FINALIZED - 8: round 8 final: all nodes confirmed, workers start"),
    (
        facts.RoundStarted(8, 2, 2, "n1", PARTS, duration=5.25, age=0.01),
        "ROUND_STARTED - 8: round 8 started on 2 nodes 5.25 s after the end of the round before; "
        "slowest: node n1 (stopped 4.50, re-formed 0.25, started 0.50)",
    ),
    (facts.WorkerFailed(FAILURE), f"WORKER_FAILED n1 7: {FAILED.detail}"),
    (facts.NodeSucceeded(8, "n1"), "NODE_SUCCEEDED n1 8: all workers of node n1 succeeded in round 8"),
    (
        facts.ExitBarrierPassed(8),
        "EXIT_BARRIER_PASSED - 8: exit barrier of round 8 over after 300 s: nodes whose workers "
        "succeeded no longer wait for the others",
    ),
    (
        facts.RestartRequested(8, "new data"),
        "RESTART_REQUESTED - 8: an operator requested a restart of round 8: new data",
    ),
    (facts.RoundEnded(LOST, 0), "ROUND_ENDED n3 7: round 7 ended: node n3 was lost: its connection broke"),
    (
        facts.RoundEnded(FAILED, 2),
        "ROUND_ENDED n1 7: round 7 ended: worker of rank 3 on node n1 failed: killed by SIGKILL (restart 2 of 3)",
    ),
    (
        facts.RunClosed(RunEnd(Outcome.CANCELLED, "closed by an operator: enough")),
        "RUN_CLOSED - 0: the run is closed, CANCELLED: closed by an operator: enough",
    ),
]


def of(fact: facts.Fact, settings: RunSettings = SETTINGS) -> pb.Event:
    """Return the event of a fact."""
    actor = Actor(ActorKind.NODE, "n3", "ipv4:10.0.0.3:7")
    return event_of(DecodedRecord(encode_record("run", 12, fact, 1.7e9 + 0.25, actor)), settings)


@pytest.mark.parametrize(("fact", "expected"), CASES, ids=lambda value: type(value).__name__)
def test_every_fact_becomes_an_event_with_its_subject(fact: facts.Fact, expected: str) -> None:
    """Kind, node, round and sentence; time, actor and revision."""
    event = of(fact)
    kind = pb.EventKind.Name(event.kind).removeprefix("EVENT_KIND_")
    assert f"{kind} {event.node_id or '-'} {event.round}: {event.detail}" == expected
    assert event.revision == 12
    assert event.actor == pb.Actor(kind=pb.ACTOR_KIND_NODE, name="n3", peer="ipv4:10.0.0.3:7")
    assert round(event.time.ToNanoseconds() / 1e6) == 1_700_000_000_250


def test_no_fact_and_no_kind_is_forgotten() -> None:
    """Every fact of a journal has an event, and every kind of event has a fact."""
    assert {type(fact) for fact, _ in CASES} == set(get_args(facts.Fact))
    assert {of(fact).kind for fact, _ in CASES} == set(pb.EventKind.values()) - {pb.EVENT_KIND_UNSPECIFIED}


def test_a_loss_is_explained_by_the_runs_own_settings() -> None:
    """A time that the run does not have would mislead operators."""
    event = of(facts.NodeLost("n3", LossReason.DISCONNECTED), RunSettings(disconnect_grace=0.5))
    assert event.detail.endswith("did not come back within 0.5 s")


def test_the_event_of_a_start_has_fields_for_programs() -> None:
    """An unknown duration is absent; the sentence has nodes that did not report, and the age of an old start."""
    event = of(facts.RoundStarted(8, 2, 2, "n1", PARTS, duration=5.25, age=0.01))
    assert (event.group_world_size, event.round_start.reported_nodes) == (2, 2)
    assert event.round_start.slowest_node_id == "n1"
    start = event.round_start
    assert [to_seconds(each) for each in (start.duration, start.age, start.parts.stopped)] == [
        5.25,
        0.01,
        4.5,
    ]
    first = of(facts.RoundStarted(1, 3, 1, "n2", RecoveryParts(), age=60.0))
    assert not first.round_start.HasField("duration")
    assert first.detail == "round 1 started on 1 of 3 nodes, 60 s ago"


def test_a_count_of_one_is_written_in_the_singular() -> None:
    """The sentences are for people."""
    seats = (Seat("n1", 0, 0, 0, 1, 1),)
    assert of(facts.RoundFrozen(1, seats)).detail == "round 1 frozen: 1 node, 1 worker"
    created = of(facts.RunCreated(RunSettings(max_nodes=1, max_restarts=1)), SETTINGS).detail
    assert created == "the run began: a round has 1 node, and 1 restart may be used"
    again = of(facts.RunCreated(SETTINGS, "second", reopened=True), SETTINGS).detail
    assert again.startswith("the run was reopened: a round has ")


def test_budgets_are_described_as_the_run_has_them() -> None:
    """The budgets of the run and of a node, and their window; the number of the restart, and its back-off."""
    budgets = RunSettings(max_restarts=5, restart_window=600.0, max_restarts_per_node=2)
    assert of(facts.RunCreated(budgets), budgets).detail.endswith(
        "and 5 restarts in 600 s may be used, 2 for one node"
    )
    ended = of(facts.RoundEnded(FAILED, 9, 3, 4), budgets)
    assert ended.detail.endswith("killed by SIGKILL (restart 3 of 5 in 600 s, delayed by 4 s)")
    assert (ended.counted_restarts, ended.held_back.seconds) == (3, 4)
    assert not of(facts.RoundEnded(LOST, 9, 3, 4), budgets).HasField("held_back")


def test_a_record_of_an_earlier_version_has_the_number_of_restarts() -> None:
    """It has no other number; at that time, all restarts counted."""
    assert of(facts.RoundEnded(FAILED, 2)).detail.endswith("(restart 2 of 3)")


def test_the_event_of_a_failure_has_its_age_and_marks_the_first_one() -> None:
    """A report may arrive late, and still name the first failure."""
    event = of(facts.WorkerFailed(replace(FAILURE, age=12.5), earliest=True))
    assert event.earliest
    assert event.detail == (
        "worker of rank 3 on node n1 failed, 12.5 s before it was reported: killed by SIGKILL"
    )
    assert not of(facts.WorkerFailed(FAILURE)).earliest


def test_a_node_that_failed_too_often_was_evicted_by_the_service() -> None:
    """The service evicted it, not an operator."""
    reason = "its workers failed 4 times in 600 s, last that of rank 3: killed by SIGKILL"
    event = of(facts.NodeEvicted("n1", reason, 3, by_service=True))
    assert event.detail == f"node n1 was taken out: {reason}"
    assert of(facts.NodeEvicted("n1", reason, by_service=True)).detail == (
        f"node n1, which was not in the run, was barred: {reason}"
    )


def test_an_event_has_the_values_of_its_sentence() -> None:
    """The failure with its traceback, the ends, the size of a round; each only in the events that have it."""
    assert of(facts.WorkerFailed(FAILURE)).failure == api_messages.to_message(FAILURE)
    assert of(facts.RoundEnded(LOST, 0)).round_end == api_messages.to_message(LOST)
    end = RunEnd(Outcome.FAILED, "no restart left", FAILURE)
    assert of(facts.RunClosed(end)).run_end == api_messages.to_message(end)
    frozen = of(facts.RoundFrozen(8, (Seat("n1", 0, 0, 0, 8, 8),)))
    assert (frozen.group_world_size, frozen.world_size) == (1, 8)
    assert not any(frozen.HasField(field) for field in ("failure", "round_end", "run_end"))
