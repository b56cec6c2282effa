"""Tests of the checks for the torture tests: they find each planted error, so that their silence is a proof."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.state import LossReason, RoundEnd, RoundEndCause, RunSettings, Seat
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.core.ledger import Violation
from torture.durable_run import DurableRun, Entry, check_one_membership_a_round
from torture.tormented_node import Told

SETTINGS = RunSettings(min_nodes=1, max_nodes=2)


def seat(node_id: str, rank: int, of: int) -> Seat:
    """Return the rank assignment of a node with one worker."""
    return Seat(node_id, rank, rank, rank, of, 1)


def joined(node_id: str, lease: int) -> facts.NodeJoined:
    """Return the fact that a node joined with one worker."""
    return facts.NodeJoined(node_id, lease, f"{node_id}.cluster.internal", 1, "trainer")


# Two nodes run, one leaves and the other runs on, until it is restarted on request.
HISTORY: list[facts.Fact] = [
    facts.RunCreated(SETTINGS),
    joined("a", 2),
    joined("b", 3),
    facts.RoundFrozen(1, (seat("a", 0, 2), seat("b", 1, 2))),
    facts.NodeConfirmed(1, "a", 1),
    facts.NodeConfirmed(1, "b", 1),
    facts.RoundFinalized(1),
    facts.NodeLeft("b", "done"),
    facts.RoundEnded(RoundEnd(1, RoundEndCause.NODE_LEFT, "b", ""), 0),
    facts.RoundFrozen(2, (seat("a", 0, 1),)),
    facts.RestartRequested(2, "so"),
    facts.RoundEnded(RoundEnd(2, RoundEndCause.RESTART_REQUESTED, "", ""), 0),
]


def chronicle(history: list[facts.Fact] = HISTORY) -> DurableRun:
    """Return the contents of a journal, one fact a second."""
    return DurableRun([Entry(revision, float(revision), fact) for revision, fact in enumerate(history, 1)])


def final(**changed: int | str) -> pb.NodeUpdate:
    """Return the update of node a about FINAL round 1, with changes of its place."""
    place: dict[str, int | str] = {
        "round": 1,
        "group_rank": 0,
        "group_world_size": 2,
        "base_rank": 0,
        "world_size": 2,
        "role_world_size": 2,
        "fencing_token": 4,
    }
    assignment = pb.Assignment(**place | changed)  # type: ignore[arg-type]
    return pb.NodeUpdate(revision=7, phase=pb.PHASE_FINAL, assignment=assignment)


def test_updates_that_agree_with_the_journal_are_accepted() -> None:
    """Updates that agree with the journal are accepted."""
    kept = chronicle()
    kept.check_told("a", [Told(2, final()), Told(2, pb.NodeUpdate(revision=9, phase=pb.PHASE_JOINABLE))])
    kept.check_admissions("a", [2])
    kept.check_departures("b", [3])
    kept.check_restarts([2])
    assert kept.counts()["RoundFrozen"] == 2


LIES: dict[str, Callable[[DurableRun], None]] = {
    "told before it is durable": lambda kept: kept.check_told(
        "a", [Told(2, pb.NodeUpdate(revision=13, phase=pb.PHASE_FROZEN))]
    ),
    "the phase": lambda kept: kept.check_told(
        "a", [Told(2, pb.NodeUpdate(revision=8, phase=pb.PHASE_FROZEN))]
    ),
    "revisions only grow": lambda kept: kept.check_told(
        "a", [Told(2, pb.NodeUpdate(revision=9, phase=pb.PHASE_JOINABLE)), Told(2, final())]
    ),
    "assignment": lambda kept: kept.check_told("a", [Told(2, final(group_rank=1))]),
    "number of nodes": lambda kept: kept.check_told("a", [Told(2, final(group_world_size=3))]),
    "fencing token": lambda kept: kept.check_told("a", [Told(2, final(fencing_token=5))]),
    "the lease that": lambda kept: kept.check_told("a", [Told(3, final())]),
    "a lease that a was given": lambda kept: kept.check_admissions("a", [2, 9]),
    "a leaving that a was told": lambda kept: kept.check_departures("a", [2]),
    "a restart that was answered": lambda kept: kept.check_restarts([1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_each_planted_error_is_found(lie: str) -> None:
    """The error has its name."""
    with pytest.raises(Violation, match=lie):
        LIES[lie](chronicle())


def test_a_round_number_that_comes_twice_is_found() -> None:
    """It is found in the journal itself."""
    again = [*HISTORY[:9], facts.RoundFrozen(1, (seat("a", 0, 1),))]
    with pytest.raises(Violation, match="never given out twice"):
        chronicle(again)


@pytest.mark.parametrize(
    ("lie", "other"),
    [
        ("is one membership", final(group_rank=1, base_rank=1, world_size=3)),
        ("is one membership", final(group_rank=1, base_rank=1, fencing_token=9)),
        ("is one node's", final()),
        ("group ranks are", final(group_rank=2)),
        ("the same port", final(group_rank=1, base_rank=1, master_port=7)),
        ("fencing tokens grow", final(round=2, group_rank=1)),
    ],
)
def test_two_memberships_under_one_number_are_found(lie: str, other: pb.NodeUpdate) -> None:
    """They are found by the updates of nodes, without any journal."""
    true = final(group_rank=1, base_rank=1)
    check_one_membership_a_round([("a", Told(2, final())), ("b", Told(3, true)), ("b", Told(3, true))])
    with pytest.raises(Violation, match=lie):
        check_one_membership_a_round([("a", Told(2, final())), ("b", Told(3, other))])


def test_the_time_without_a_final_round_is_that_from_an_end_to_the_next_begin() -> None:
    """A round in between that never runs does not shorten it."""
    assert chronicle().longest_without_final() == 0.0
    later: list[facts.Fact] = [
        facts.RoundFrozen(3, (seat("a", 0, 1),)),
        facts.NodeConfirmed(3, "a", 1),
        facts.RoundFinalized(3),
        facts.NodeLost("a", LossReason.DISCONNECTED),
    ]
    assert chronicle([*HISTORY, *later]).longest_without_final() == 15.0 - 9.0
