"""An event is one line: time, time since the event before, kind and reason; programs get the whole event."""

from __future__ import annotations

import json

import pytest

from rallypoint.cli.events import EventLines, json_line
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

pytestmark = pytest.mark.usefixtures("utc")


def event(after: float, kind: pb.EventKind.ValueType, detail: str, operator: str = "") -> pb.Event:
    """Return an event that happened so many seconds after noon."""
    actor = pb.ACTOR_KIND_OPERATOR if operator else pb.ACTOR_KIND_SERVICE
    event = pb.Event(revision=7, kind=kind, detail=detail, actor=pb.Actor(kind=actor, name=operator))
    event.time.FromMilliseconds(round((1_763_640_000 + after) * 1000))
    return event


def test_lines_have_time_span_kind_and_sentence() -> None:
    """The span is the time since the line before; the actor is named if it was an operator."""
    lines = EventLines(200)
    shown = [
        lines.format(event(0, pb.EVENT_KIND_NODE_LOST, "node b was lost: its connection broke")),
        lines.format(event(0.204, pb.EVENT_KIND_ROUND_ENDED, "round 7 ended: node b was lost")),
        lines.format(event(3600, pb.EVENT_KIND_EXIT_BARRIER_PASSED, "over")),
        lines.format(event(3599, pb.EVENT_KIND_NODE_EVICTED, "node a was taken out", "ann")),
    ]
    assert shown == [
        "2025-11-20 12:00:00.000             NODE_LOST            node b was lost: its connection broke",
        "2025-11-20 12:00:00.204    +0.204s  ROUND_ENDED          round 7 ended: node b was lost",
        "2025-11-20 13:00:00.000     +1h00m  EXIT_BARRIER_PASSED  over",
        "2025-11-20 12:59:59.000    -1.000s  NODE_EVICTED         node a was taken out (operator ann)",
    ]


def test_a_sentence_wider_than_the_terminal_stands_below() -> None:
    """The sentence breaks between words, and a name longer than a line does not break."""
    sentence = (
        f"node b was lost: its connection broke, and it did not come back within 2 s to host-{'x' * 80}"
    )
    assert EventLines(80).format(event(0, pb.EVENT_KIND_NODE_LOST, sentence)).splitlines() == [
        "2025-11-20 12:00:00.000             NODE_LOST",
        "    node b was lost: its connection broke, and it did not come back within 2 s",
        "    to",
        f"    host-{'x' * 80}",
    ]


def test_a_name_can_do_nothing_to_a_terminal() -> None:
    """Certificates name operators, and may contain anything."""
    line = EventLines(200).format(event(0, pb.EVENT_KIND_NODE_EVICTED, "out", "\x1b[2Jann\n"))
    assert line.isprintable()
    assert line.endswith("out (operator  [2Jann )")


def test_a_kind_of_a_newer_service_is_still_a_line() -> None:
    """Its sentence explains it."""
    newer = event(0, pb.EVENT_KIND_RUN_CLOSED, "something new")
    newer.kind = 99  # type: ignore[assignment]
    assert EventLines(200).format(newer).split(maxsplit=2)[2] == "?                    something new"
    assert json.loads(json_line(newer))["kind"] == 99


def test_programs_get_the_whole_event() -> None:
    """It is the protocol's own JSON, on one line, with fields that are zero."""
    shown = json_line(event(0.25, pb.EVENT_KIND_NODE_LOST, "node b was lost"))
    assert "\n" not in shown
    assert json.loads(shown) == {
        "revision": "7",
        "time": "2025-11-20T12:00:00.250Z",
        "actor": {"kind": "ACTOR_KIND_SERVICE", "name": "", "peer": ""},
        "kind": "EVENT_KIND_NODE_LOST",
        "nodeId": "",
        "round": 0,
        "detail": "node b was lost",
        "groupWorldSize": 0,
        "worldSize": 0,
        "earliest": False,
    }
