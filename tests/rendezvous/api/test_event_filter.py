"""A filter accepts an event that matches all of its fields; a refused filter names the field that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from rallypoint.rendezvous.api.events import parse_filter
from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.commands import SERVICE
from rallypoint.rendezvous.core.state import LossReason, RoundEnd, RoundEndCause
from rallypoint.rendezvous.journal.codec import DecodedRecord, encode_record
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.errors import ServiceError

LOST = facts.NodeLost("a", LossReason.DISCONNECTED)
ENDED = facts.RoundEnded(RoundEnd(2, RoundEndCause.NODE_LOST, "a", "it was lost"), 0)
CONFIRMED = facts.NodeConfirmed(3, "b", 29500)
FINAL = facts.RoundFinalized(3)
HISTORY: list[facts.Fact] = [LOST, ENDED, CONFIRMED, FINAL]  # one per second, from 100 s on


def at(seconds: int, nanos: int = 0) -> Timestamp:
    """Return a time."""
    return Timestamp(seconds=seconds, nanos=nanos)


@pytest.mark.parametrize(
    ("filter_", "matching"),
    [
        (pb.EventFilter(), HISTORY),
        (pb.EventFilter(node_ids=["a"]), [LOST, ENDED]),
        (pb.EventFilter(node_ids=["a", "b"]), [LOST, ENDED, CONFIRMED]),
        (pb.EventFilter(node_ids=["nobody"]), []),
        (pb.EventFilter(kinds=[pb.EVENT_KIND_NODE_LOST, pb.EVENT_KIND_ROUND_FINALIZED]), [LOST, FINAL]),
        (pb.EventFilter(rounds=[3]), [CONFIRMED, FINAL]),
        (pb.EventFilter(rounds=[2, 3], node_ids=["a"]), [ENDED]),
        (pb.EventFilter(rounds=[2], kinds=[pb.EVENT_KIND_NODE_LOST]), []),
        (pb.EventFilter(since=at(101)), [ENDED, CONFIRMED, FINAL]),
        (pb.EventFilter(since=at(101, 1)), [CONFIRMED, FINAL]),
        (pb.EventFilter(until=at(101)), [LOST]),
        (pb.EventFilter(since=at(101), until=at(103)), [ENDED, CONFIRMED]),
        (pb.EventFilter(since=at(101), until=at(101)), []),
        (pb.EventFilter(since=at(0), until=at(0)), []),
    ],
)
def test_events_match_every_field_that_is_set(filter_: pb.EventFilter, matching: list[facts.Fact]) -> None:
    """One of the nodes, of the kinds, of the rounds; `since` is inclusive, `until` is not."""
    check = parse_filter(filter_)
    matched = [
        fact
        for seconds, fact in enumerate(HISTORY, start=100)
        if check.matches(DecodedRecord(encode_record("run", 1, fact, seconds, SERVICE)))
    ]
    assert matched == matching


@pytest.mark.parametrize(
    ("field", "given", "complaint"),
    [
        ("node_ids", {"node_ids": [""]}, "must not be empty"),
        ("node_ids", {"node_ids": ["a", "x" * 257]}, "at most 256 bytes"),
        ("node_ids", {"node_ids": ["a\n"]}, "control characters"),
        ("node_ids", {"node_ids": ["a"] * 1001}, "at most 1000 entries, not 1001"),
        ("kinds", {"kinds": [0]}, "no event kind 0"),
        ("kinds", {"kinds": [1, 99]}, "no event kind 99"),
        ("kinds", {"kinds": [-1]}, "no event kind -1"),
        ("kinds", {"kinds": [1] * 1001}, "at most 1000 entries"),
        ("rounds", {"rounds": [0]}, "must be at least 1, not 0"),
        ("rounds", {"rounds": [-(2**31)]}, "must be at least 1, not -2147483648"),
        ("rounds", {"rounds": [1] * 1001}, "at most 1000 entries"),
        ("since", {"since": at(2), "until": at(1)}, "must not be after filter.until"),
        ("since", {"since": at(1, 2), "until": at(1, 1)}, "must not be after filter.until"),
        ("since", {"since": at(2**62)}, "is no time"),
        ("until", {"until": at(-(2**63))}, "is no time"),
        ("until", {"until": at(1, -1)}, "is no time"),
        ("until", {"until": at(1, 10**9)}, "is no time"),
    ],
)
def test_a_filter_that_makes_no_sense_is_refused(field: str, given: dict[str, Any], complaint: str) -> None:
    """The refusal names the field, and describes the error."""
    with pytest.raises(ServiceError) as error:
        parse_filter(pb.EventFilter(**given))
    ((named, description),) = error.value.field_violations
    assert named == f"filter.{field}"
    assert complaint in description


def test_every_bad_field_of_a_filter_is_named() -> None:
    bad: dict[str, Any] = {"node_ids": ["", "a"], "kinds": [99], "rounds": [0], "until": at(1, -1)}
    with pytest.raises(ServiceError) as error:
        parse_filter(pb.EventFilter(**bad))
    fields = [field for field, _ in error.value.field_violations]
    assert fields == ["filter.node_ids", "filter.kinds", "filter.rounds", "filter.until"]
