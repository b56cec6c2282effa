"""Invariants of reports about a run: each violation is found, and a correct history has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from ha.findings import Wrong
from ha.history import Admission, Entry, History, Logged, Operation, Outcome, Told
from ha.invariants import check_invariants
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

RUN = "run"
LEASES = {"a": 1, "b": 2}
_END = pb.RoundEnd(round=1, cause=pb.ROUND_END_CAUSE_NODE_LOST, node_id="b", detail="node b is gone")
_EVENTS = [
    pb.Event(revision=1, kind=pb.EVENT_KIND_RUN_CREATED),
    pb.Event(revision=2, kind=pb.EVENT_KIND_NODE_JOINED, node_id="a"),
    pb.Event(revision=3, kind=pb.EVENT_KIND_NODE_JOINED, node_id="b"),
    pb.Event(revision=4, kind=pb.EVENT_KIND_ROUND_FROZEN, round=1, group_world_size=2, world_size=4),
    pb.Event(revision=5, kind=pb.EVENT_KIND_ROUND_FINALIZED, round=1),
    pb.Event(revision=6, kind=pb.EVENT_KIND_NODE_LOST, node_id="b"),
    pb.Event(revision=7, kind=pb.EVENT_KIND_ROUND_ENDED, round=1, round_end=_END),
    pb.Event(revision=8, kind=pb.EVENT_KIND_ROUND_FROZEN, round=2, group_world_size=1, world_size=2),
    pb.Event(revision=9, kind=pb.EVENT_KIND_ROUND_FINALIZED, round=2),
]


def _json(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)


def _logged(subscriber: str = "", events: Sequence[pb.Event] = _EVENTS) -> list[Entry]:
    return [Logged(100.0, subscriber, RUN, _json(event)) for event in events]


def _place(rank: int, round_: int = 1, **changes: Any) -> pb.Assignment:
    size = 3 - round_
    place = pb.Assignment(
        round=round_,
        group_rank=rank,
        group_world_size=size,
        base_rank=2 * rank,
        world_size=2 * size,
        master_address="a",
        master_port=29_500,
        fencing_token=4 * round_,
    )
    for name, value in changes.items():
        setattr(place, name, value)
    return place


def _report(node: str, revision: int, phase: int, place: pb.Assignment | None = None, **changes: Any) -> Told:
    end = _END if revision >= 7 else None
    update = pb.NodeUpdate(
        revision=revision, phase=pb.Phase.ValueType(phase), assignment=place, last_round_end=end
    )
    fields: dict[str, Any] = {
        "subscriber": f"{node}#1",
        "lease": LEASES[node],
        "at": float(revision),
    } | changes
    return Told(run_id=RUN, node_id=node, update=_json(update), **fields)


def _seen(
    revision: int, phase: int, nodes: Sequence[tuple[str, pb.Assignment]] = (), at: float = 0.0
) -> Told:
    run = pb.Run(run_id=RUN, revision=revision, phase=pb.Phase.ValueType(phase))
    if revision >= 7:
        run.last_round_end.CopyFrom(_END)
    for node, place in nodes:
        run.nodes.add(node_id=node, lease=LEASES[node], assignment=place)
    return Told(at or float(revision), "watcher", RUN, "", 0, _json(run))


_TRUTH: list[Entry] = [
    Admission(2.0, "a#1", RUN, "a", 1, resumed=False),
    Admission(3.0, "b#1", RUN, "b", 2, resumed=False),
    _report("a", 3, pb.PHASE_JOINABLE),
    _seen(3, pb.PHASE_JOINABLE),
    _report("a", 4, pb.PHASE_FROZEN, _place(0, master_port=0)),
    _report("a", 5, pb.PHASE_FINAL, _place(0)),
    _report("b", 5, pb.PHASE_FINAL, _place(1)),
    _seen(5, pb.PHASE_FINAL, [("a", _place(0)), ("b", _place(1))]),
    Admission(5.5, "a#1", RUN, "a", 1, resumed=True),
    _report("a", 5, pb.PHASE_FINAL, _place(0), at=5.5),
    _report("a", 7, pb.PHASE_JOINABLE),
    _report("a", 9, pb.PHASE_FINAL, _place(0, 2)),
    *_logged("events", _EVENTS[2:7]),
]


def _wrong(*more: Entry) -> set[Wrong]:
    """Return the kinds of findings in the correct history with further entries."""
    return _wrong_alone(*_TRUTH, *more)


def _wrong_alone(*entries: Entry) -> set[Wrong]:
    history = History()
    for entry in [*entries, *_logged()]:
        history.add(entry)
    return {finding.wrong for finding in check_invariants(history)}


def test_valid_reports_have_no_findings() -> None:
    """Reports to nodes and watchers that match the log, with a resumed lease, have no findings."""
    assert not _wrong()


@pytest.mark.parametrize(
    "place",
    [
        _place(1, group_world_size=3),
        _place(1, world_size=5),
        _place(1, fencing_token=5),
        _place(1, master_address="b"),
        _place(1, master_port=29_501),
        _place(0),
        _place(1, base_rank=3),
    ],
    ids=["nodes", "workers", "token", "address", "port", "rank", "base"],
)
def test_a_round_has_one_membership(place: pb.Assignment) -> None:
    """Each field of a round that differs between the reports to two nodes is found, and a rank given to both."""
    assert Wrong.REUSED in _wrong(_report("b", 5, pb.PHASE_FINAL, place, at=5.6))


def test_ranks_are_those_of_the_nodes() -> None:
    """A rank past the last, a node with two ranks, and worker ranks that don't begin at 0 are found."""
    assert Wrong.RANKS in _wrong(_report("b", 5, pb.PHASE_FINAL, _place(2), at=5.6))
    for base in 1, 2, -1:
        gap = _seen(8, pb.PHASE_FROZEN, [("a", _place(0, 2, base_rank=base))])
        assert _wrong_alone(gap) == {Wrong.RANKS}
    two = _report("a", 4, pb.PHASE_FROZEN, _place(1, base_rank=2, master_port=0), subscriber="a#2")
    assert {Wrong.RANKS, Wrong.REUSED} & _wrong(two)


def test_fencing_tokens_grow() -> None:
    """A later round needs a greater token: otherwise a worker of the earlier round would not be fenced."""
    first = _report("a", 5, pb.PHASE_FINAL, _place(0))
    assert not _wrong_alone(first, _report("a", 8, pb.PHASE_FROZEN, _place(0, 2)))
    assert Wrong.OUT_OF_ORDER in _wrong_alone(
        first, _report("a", 8, pb.PHASE_FROZEN, _place(0, 2, fencing_token=4))
    )


def test_revisions_grow() -> None:
    """A subscriber receives no earlier state again, over any number of streams; another subscriber may."""
    assert Wrong.OUT_OF_ORDER in _wrong(_report("a", 3, pb.PHASE_JOINABLE, at=20.0))
    assert not _wrong(_report("a", 3, pb.PHASE_JOINABLE, at=20.0, subscriber="a#2"))


def test_events_come_without_a_gap() -> None:
    """A watcher of events receives each of them, as the log has it."""
    assert Wrong.OUT_OF_ORDER in _wrong(*_logged("gap", [_EVENTS[1], _EVENTS[3]]))
    other = pb.Event(revision=3, kind=pb.EVENT_KIND_NODE_JOINED, node_id="ghost")
    assert _wrong(*_logged("ghosts", [other])) == {Wrong.NOT_DURABLE}
    assert _wrong(*_logged("future", [pb.Event(revision=10)])) == {Wrong.NOT_DURABLE}


def test_a_log_with_a_gap_is_found() -> None:
    """Missing events in the log are a finding by themselves."""
    history = History()
    for event in _logged(events=[*_EVENTS[:3], *_EVENTS[5:]]):
        history.add(event)
    assert [finding.wrong for finding in check_invariants(history)] == [Wrong.OUT_OF_ORDER]


def test_a_round_number_is_given_once() -> None:
    """Two rounds of one number in the log of events are found."""
    again = pb.Event(revision=10, kind=pb.EVENT_KIND_ROUND_FROZEN, round=2, group_world_size=1, world_size=2)
    history = History()
    for event in _logged(events=[*_EVENTS, again]):
        history.add(event)
    assert [finding.wrong for finding in check_invariants(history)] == [Wrong.REUSED]


def test_a_lease_is_given_once() -> None:
    """A number for two nodes, or twice for one, is found; a node resumes only its own lease."""
    assert _wrong(Admission(9.0, "c#1", RUN, "c", 2, resumed=False)) == {Wrong.REUSED}
    assert _wrong(Admission(9.0, "b#2", RUN, "b", 2, resumed=False)) == {Wrong.REUSED}
    assert _wrong(Admission(9.0, "c#1", RUN, "c", 2, resumed=True)) == {Wrong.REUSED}
    assert not _wrong(Admission(9.0, "b#2", RUN, "b", 3, resumed=False))
    assert not _wrong(Admission(9.0, "c#1", "other", "c", 2, resumed=False))


def test_a_report_that_is_not_durable_is_found() -> None:
    """A reported revision that the log lacks, or has with other values, is found."""
    assert _wrong(_report("a", 10, pb.PHASE_FINAL, _place(0, 2))) == {Wrong.NOT_DURABLE}
    assert _wrong(_report("b", 6, pb.PHASE_JOINABLE)) == {Wrong.NOT_DURABLE}
    assert _wrong(_seen(9, pb.PHASE_JOINABLE, at=9.5)) == {Wrong.NOT_DURABLE}
    another = pb.Run(
        run_id=RUN, revision=7, phase=pb.PHASE_JOINABLE, last_round_end=pb.RoundEnd(round=1, node_id="a")
    )
    assert _wrong(Told(9.6, "other", RUN, "", 0, _json(another))) == {Wrong.NOT_DURABLE}
    assert _wrong(Told(9.7, "other", "a run without a log", "", 0, _json(another))) == {Wrong.NOT_DURABLE}


def test_the_first_failure_may_be_known_late() -> None:
    """The end of a round is attributed to an earlier failure once that is reported, and to no other."""
    end = pb.RoundEnd(round=1, cause=pb.ROUND_END_CAUSE_WORKER_FAILED, node_id="b", detail="of b")
    first = pb.Event(
        revision=7,
        kind=pb.EVENT_KIND_WORKER_FAILED,
        node_id="a",
        round=1,
        earliest=True,
        failure=pb.WorkerFailure(node_id="a"),
    )
    ended = pb.Event(revision=6, kind=pb.EVENT_KIND_ROUND_ENDED, round=1, round_end=end)
    for node_id, expected in (("a", []), ("b", [Wrong.NOT_DURABLE])):
        reported_end = pb.RoundEnd(round=1, cause=end.cause, node_id=node_id, detail=f"of {node_id}")
        run = pb.Run(run_id=RUN, revision=7, phase=pb.PHASE_JOINABLE, last_round_end=reported_end)
        history = History()
        history.add(Told(9.0, "watcher", RUN, "", 0, _json(run)))
        for event in _logged(events=[*_EVENTS[:5], ended, first]):
            history.add(event)
        assert [finding.wrong for finding in check_invariants(history)] == expected


def _read(revision: int, began: float, ended: float, round_: int = 2) -> Operation:
    answered = {"revision": revision, "phase": "PHASE_FINAL", "round": round_}
    return Operation("reader", "run.get", RUN, began, ended, Outcome.OK, {}, answered, "replica-1")


def test_a_read_older_than_a_known_revision_is_found() -> None:
    """A read that begins after a revision was reported to a client, or read, shows no earlier one."""
    assert not _wrong(_read(9, 9.5, 10.0), _read(5, 5.0, 9.5, round_=1))
    assert _wrong(_read(5, 7.5, 8.0, round_=1)) == {Wrong.STALE}
    assert _wrong(_read(10, 11.0, 12.0), _read(9, 12.5, 13.0)) == {Wrong.STALE}
    assert not _wrong(_read(10, 11.0, 12.0), _read(9, 11.5, 13.0))


def test_a_revision_is_shown_alike() -> None:
    """Two replicas that show one revision differently have diverged."""
    assert _wrong(_read(9, 10.0, 11.0), _read(9, 10.0, 11.0, round_=3)) == {Wrong.REUSED}


def _write(
    began: float, lease: int, round_: int, node: str = "b", outcome: Outcome = Outcome.OK
) -> Operation:
    writer = {"run_id": RUN, "node_id": node, "lease": lease, "round": round_}
    answered = {} if outcome is Outcome.OK else {"reason": "ROUND_OVER"}
    asked = {"value": f"{began}", "writer": writer}
    return Operation(node, "store.set", f"{RUN}/k", began, began + 0.1, outcome, asked, answered)


def test_a_write_after_its_round_or_lease_is_found() -> None:
    """An accepted write is found if it begins after its round was known to be over, or its lease superseded."""
    assert not _wrong(_write(6.0, 2, 1), _write(6.9, 2, 1), _write(8.0, 1, 2, node="a"))
    assert not _wrong(_write(7.5, 2, 1, outcome=Outcome.REFUSED))
    assert not _wrong(_write(7.5, 2, 1, outcome=Outcome.UNKNOWN))
    assert _wrong(_write(7.5, 2, 1)) == {Wrong.UNFENCED}
    assert not _wrong(_write(7.5, 2, 0)), "it is of no round"
    newer = Admission(8.0, "b#2", RUN, "b", 3, resumed=False)
    assert not _wrong(newer, _write(7.9, 2, 2))
    assert _wrong(newer, _write(8.1, 2, 2)) == _wrong(newer, _write(8.1, 2, 0)) == {Wrong.UNFENCED}
