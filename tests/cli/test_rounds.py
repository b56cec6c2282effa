"""`rallypoint rounds`: why a round ended, the first failure, and the time until workers ran again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner
from google.protobuf.duration_pb2 import Duration

from rallypoint.cli import operator
from rallypoint.cli.main import main
from rallypoint.cli.rounds import rounds_of
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

pytestmark = pytest.mark.usefixtures("utc")

BEGAN = 1_763_640_000.0  # 2025-11-20 12:00:00 UTC


def event(after: float, kind: pb.EventKind.ValueType, round_: int = 0, **more: Any) -> pb.Event:
    """Return an event that happened so many seconds after the run began."""
    event = pb.Event(kind=kind, round=round_, **more)
    event.time.FromMilliseconds(round((BEGAN + after) * 1000))
    return event


def frozen(after: float, round_: int, nodes: int = 2) -> pb.Event:
    """Return the event that a round of nodes with four workers each gets its ranks."""
    return event(after, pb.EVENT_KIND_ROUND_FROZEN, round_, group_world_size=nodes, world_size=4 * nodes)


def ended(after: float, round_: int, cause: pb.RoundEndCause.ValueType, node_id: str, why: str) -> pb.Event:
    """Return the event that a round ends."""
    end = pb.RoundEnd(round=round_, cause=cause, node_id=node_id, detail=why)
    return event(after, pb.EVENT_KIND_ROUND_ENDED, round_, node_id=node_id, round_end=end)


LOST = "node b was lost: its connection broke"
STORY = [
    event(0, pb.EVENT_KIND_RUN_CREATED),
    frozen(30, 1),
    event(30.5, pb.EVENT_KIND_ROUND_FINALIZED, 1),
    ended(130.5, 1, pb.ROUND_END_CAUSE_NODE_LOST, "b", LOST),
    frozen(131, 2),
    ended(132, 2, pb.ROUND_END_CAUSE_NODE_LOST, "c", "node c was lost: it did not confirm"),
    frozen(133, 3, nodes=1),
    event(133.25, pb.EVENT_KIND_ROUND_FINALIZED, 3),
]
CLOSED = event(
    233.25,
    pb.EVENT_KIND_RUN_CLOSED,
    run_end=pb.RunEnd(
        outcome=pb.OUTCOME_FAILED,
        detail="worker of rank 0 on node a failed: it broke",
        failure=pb.WorkerFailure(node_id="a"),
    ),
)


def test_the_times_of_a_round_are_distinguished() -> None:
    """Joining, confirming, running; the gap counts from the last time that workers ran."""
    first, second, third = rounds_of(STORY).rounds
    assert (first.joining, first.confirming, first.gap, first.lasted) == (30.0, 0.5, None, 100.0)
    assert (second.joining, second.confirming, second.gap, second.lasted) == (0.5, None, None, None)
    assert (third.joining, third.confirming, third.gap) == pytest.approx((1.0, 0.25, 2.75), abs=1e-6)
    assert third.lasted is None


def test_a_round_ends_for_its_first_cause_or_with_its_run() -> None:
    """The round names the node of its first cause."""
    history = rounds_of([*STORY, CLOSED])
    assert [(each.cause, each.node_id, each.why) for each in (history.rounds[0], history.rounds[2])] == [
        ("NODE_LOST", "b", LOST),
        ("FAILED", "a", "worker of rank 0 on node a failed: it broke"),
    ]
    assert history.rounds[2].lasted == pytest.approx(100.0, abs=1e-6)


def test_times_without_kept_events_are_left_open() -> None:
    """A long job's first events are gone; the known facts about the rounds are shown."""
    first, second, third = rounds_of(STORY[3:]).rounds
    assert (first.number, first.nodes, first.joining, first.lasted, first.why) == (1, 0, None, None, LOST)
    assert (second.joining, third.gap) == pytest.approx((0.5, 2.75), abs=1e-6)
    (only,) = rounds_of(STORY[7:]).rounds
    assert (only.number, only.gap) == (3, None)
    assert only.final == pytest.approx(BEGAN + 133.25, abs=1e-6)


def shown(monkeypatch: pytest.MonkeyPatch, events: list[pb.Event], *arguments: str) -> tuple[str, str]:
    """Return the command's output about a run with these events: stdout, stderr."""
    monkeypatch.setattr(operator, "call", lambda *_: (events, False))
    result = CliRunner().invoke(main, ["rounds", "digits", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_a_round_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator on call sees the cause at one look."""
    lines = [" ".join(line.split()) for line in shown(monkeypatch, STORY)[0].splitlines()]
    assert lines == [
        "round started nodes workers join confirm gap recovery slowest ran restarts ended because",
        f"1 2025-11-20 12:00:30.500 2 8 30.000s 0.500s - - - 1m40s 0 NODE_LOST: {LOST}",
        "2 - 2 8 0.500s - - - - - 0 NODE_LOST: node c was lost: it did not confirm",
        "3 2025-11-20 12:02:13.250 1 4 1.000s 0.250s 2.750s - - - - (running)",
    ]


def test_a_recovery_ends_when_workers_run_and_shows_the_slowest_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event may come late; missing reports are counted, and the JSON has the parts."""
    parts = pb.RecoveryParts(stopped=Duration(nanos=500_000_000), started=Duration(seconds=1))
    start = pb.RoundStart(reported_nodes=2, slowest_node_id="b", parts=parts, age=Duration(seconds=5))
    started = event(140, pb.EVENT_KIND_ROUND_STARTED, 3, group_world_size=3, round_start=start)
    story = [*STORY[:6], frozen(133, 3, nodes=3), STORY[7], started]
    line = " ".join(shown(monkeypatch, story)[0].splitlines()[3].split())
    assert "2.750s 4.500s b: stopped 0.50, started 1.00 (2 of 3 reported) - - (running)" in line
    (*_, third) = json.loads(shown(monkeypatch, story, "--json")[0])["rounds"]
    assert third["recoverySeconds"] == 4.5
    assert (third["slowestNodeId"], third["startedNodes"]) == ("b", 2)
    assert third["slowestParts"] == {"stopped": 0.5, "started": 1.0}


def test_a_failure_shows_its_cost_and_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted restarts, the delay of the next round, and the first failure although it was reported late."""
    failed = ended(140, 3, pb.ROUND_END_CAUSE_WORKER_FAILED, "b", "worker of rank 4 on node b failed: reset")
    failed.counted_restarts = 2
    failed.held_back.seconds = 1
    first = pb.WorkerFailure(round=3, rank=0, node_id="a", message="CUDA error")
    late = event(140.1, pb.EVENT_KIND_WORKER_FAILED, 3, failure=first, earliest=True)
    for events, why in (
        ([*STORY, failed], "worker of rank 4 on node b failed: reset"),
        ([*STORY, failed, late], "worker of rank 0 on node a failed: CUDA error"),
    ):
        line = " ".join(shown(monkeypatch, events)[0].splitlines()[3].split())
        assert line.endswith(f"6.750s 2 WORKER_FAILED: {why} (the next is delayed by 1 s)")


def test_the_state_after_the_last_round_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ended, one that waits for nodes, one without a round yet, one whose round is being confirmed."""
    assert shown(monkeypatch, [*STORY, CLOSED])[0].endswith(
        "run digits is closed: worker of rank 0 on node a failed: it broke\n"
    )
    joining = "nodes have been joining the next round since 2025-11-20 12:02:10.500\n"
    assert shown(monkeypatch, STORY[:4])[0].endswith(joining)
    assert shown(monkeypatch, STORY[:1])[0] == joining.replace("12:02:10.500", "12:00:00.000")
    assert "(nodes are confirming)" in shown(monkeypatch, STORY[:2])[0]
    assert shown(monkeypatch, [])[0] == "no rounds\n"


def test_older_rounds_are_left_out_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rounds matter; the gap before the first one shown is kept."""
    out, err = shown(monkeypatch, STORY, "--limit", "1")
    assert [line.split()[0] for line in out.splitlines()] == ["round", "3"]
    assert "2.750s" in out
    assert err == "(2 older rounds are left out; --limit shows more)\n"


def test_programs_get_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is JSON, with null for unknown values."""
    first, second, _ = json.loads(shown(monkeypatch, STORY, "--json")[0])["rounds"]
    assert first == {
        "round": 1,
        "nodes": 2,
        "workers": 8,
        "joinable": "2025-11-20T12:00:00.000Z",
        "frozen": "2025-11-20T12:00:30.000Z",
        "final": "2025-11-20T12:00:30.500Z",
        "ended": "2025-11-20T12:02:10.500Z",
        "joinSeconds": 30.0,
        "confirmSeconds": 0.5,
        "gapSeconds": None,
        "recoverySeconds": None,
        "startedNodes": 0,
        "slowestNodeId": "",
        "slowestParts": {},
        "ranSeconds": 100.0,
        "cause": "NODE_LOST",
        "nodeId": "b",
        "detail": LOST,
        "countedRestarts": 0,
        "heldBackSeconds": 0.0,
    }
    assert second["final"] is None


@pytest.mark.parametrize("text", ["[/b]", "[red]x[/red]", ":smile:"])
def test_reasons_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """They may quote any text: none of it is markup."""
    story = [*STORY[:3], ended(9, 1, pb.ROUND_END_CAUSE_WORKER_FAILED, "a", f"failed: {text}")]
    assert f"WORKER_FAILED: failed: {text}" in shown(monkeypatch, story)[0]
