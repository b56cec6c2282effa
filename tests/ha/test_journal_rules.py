"""The rules of the core, applied to the facts that were read back from etcd at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from google.protobuf.json_format import MessageToDict

from ha.findings import Wrong
from ha.history import Fact, History, Told
from ha.journal_rules import check_journal
from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.commands import SERVICE
from rallypoint.rendezvous.core.state import RunSettings, Seat
from rallypoint.rendezvous.journal.codec import encode_record
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

_SEAT = Seat("a", group_rank=0, base_rank=0, base_role_rank=0, role_world_size=2, local_world_size=2)
_FROZEN = facts.RoundFrozen(round=1, seats=(_SEAT,))
_FACTS: list[facts.Fact] = [
    facts.RunCreated(RunSettings(min_nodes=1, max_nodes=2)),
    facts.NodeJoined("a", lease=2, address="a", local_world_size=2, role="trainer"),
    _FROZEN,
    facts.NodeConfirmed(round=1, node_id="a", master_port=1),
    facts.RoundFinalized(round=1),
]


def _wrong(written: Sequence[facts.Fact], *told: Told) -> list[Wrong]:
    history = History()
    for entry in told:
        history.add(entry)
    for revision, fact in enumerate(written, start=1):
        # Wall clocks of replicas that were set: the newer the record, the older its time.
        content = encode_record("run", revision, fact, 1e9 - 1e6 * revision, SERVICE)
        history.add(Fact("run", revision, content.hex()))
    return [finding.wrong for finding in check_journal(history)]


def _report(
    revision: int, phase: pb.Phase.ValueType, place: pb.Assignment | None = None, lease: int = 2
) -> Told:
    update = pb.NodeUpdate(revision=revision, phase=phase, assignment=place)
    return Told(1.0, "a#1", "run", "a", lease, MessageToDict(update, preserving_proto_field_name=True))


_PLACE = pb.Assignment(
    round=1, group_world_size=1, world_size=2, role_world_size=2, master_address="a", fencing_token=3
)


def test_valid_facts_have_no_findings() -> None:
    """Valid facts have no findings, with any clocks of replicas, and with the reports to the node."""
    assert not _wrong(_FACTS, _report(2, pb.PHASE_JOINABLE), _report(3, pb.PHASE_FROZEN, _PLACE))


def test_facts_that_break_the_rules_are_found() -> None:
    """A round of a node that has not joined, one that is FINAL before all confirmed, and a gap in ranks are found."""
    assert _wrong([*_FACTS[:1], *_FACTS[2:]]) == [Wrong.OUT_OF_ORDER]
    assert _wrong([*_FACTS[:3], *_FACTS[4:]]) == [Wrong.OUT_OF_ORDER]
    gap = replace(_FROZEN, seats=(replace(_SEAT, base_rank=1),))
    assert _wrong([*_FACTS[:2], gap, *_FACTS[3:]]) == [Wrong.OUT_OF_ORDER]


def test_reports_that_contradict_the_facts_are_found() -> None:
    """Reports of a missing revision, of a wrong phase, and of ranks to another lease are found."""
    assert _wrong(_FACTS, _report(6, pb.PHASE_FINAL, _PLACE)) == [Wrong.NOT_DURABLE]
    assert _wrong(_FACTS, _report(4, pb.PHASE_FINAL, _PLACE)) == [Wrong.NOT_DURABLE]
    assert _wrong(_FACTS, _report(5, pb.PHASE_FINAL, _PLACE, lease=1)) == [Wrong.NOT_DURABLE]
