"""Spares wait beside a full round, take the rank of a node that goes, and delay no round."""

from __future__ import annotations

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.decide import next_deadline
from rallypoint.rendezvous.core.state import LossReason, Phase, RunState
from rallypoint.rendezvous.runs.run import run_message
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.core.scripted_run import ScriptedRun


def states(state: RunState) -> dict[str, int]:
    return {node.node_id: node.state for node in run_message(state).nodes}


def test_a_node_that_waits_beside_a_full_round_is_a_spare() -> None:
    """Beside a round with room it waits, to be let in when the round ends."""
    full = ScriptedRun(min_nodes=1, max_nodes=1)
    full.start("a")
    full.join("b")
    assert states(full.state)["b"] == pb.NODE_STATE_SPARE
    roomy = ScriptedRun(min_nodes=1, max_nodes=2, last_call_timeout=0.0)
    roomy.join("a")
    roomy.later(0.1)
    roomy.join("b")
    assert states(roomy.state)["b"] == pb.NODE_STATE_WAITING


def test_while_a_round_is_formed_all_nodes_wait() -> None:
    """Without a round there are no spares."""
    run = ScriptedRun(min_nodes=2, max_nodes=2)
    run.join("a")
    assert states(run.state) == {"a": pb.NODE_STATE_WAITING}


def test_a_spare_that_departs_holds_up_no_round() -> None:
    """It never had workers: a node that is lost meanwhile is replaced at once, by another spare."""
    run = ScriptedRun(min_nodes=2, max_nodes=2)
    run.start("a", "b")
    run.join("c", "d")
    run.depart("c")
    run.lose("a")
    assert (run.phase, run.round, sorted(run.ranks)) == (Phase.FROZEN, 2, ["b", "d"])
    run.run_round()
    run.leave("c")
    assert (run.phase, run.round) == (Phase.FINAL, 2)


def test_a_participant_that_departs_does_even_beside_a_spare_that_does() -> None:
    """The round waits for workers that may be alive, also if a spare departs too."""
    run = ScriptedRun(min_nodes=1, max_nodes=2)
    run.start("a", "b")
    run.join("c", "d")
    run.depart("c")
    run.depart("a")
    assert run.phase is Phase.JOINABLE
    run.leave("a")
    assert (run.phase, sorted(run.ranks)) == (Phase.FROZEN, ["b", "d"])


def test_a_spare_that_departs_and_hangs_is_dropped() -> None:
    """After the confirm timeout, and the running round is not affected."""
    run = ScriptedRun(min_nodes=1, max_nodes=1, confirm_timeout=60.0)
    run.start("a")
    run.join("spare")
    run.depart("spare")
    assert next_deadline(run.state) is not None
    assert run.later(59.9) == []
    assert run.later(0.1) == [facts.NodeLost("spare", LossReason.DEPARTURE_TIMED_OUT)]
    assert (run.phase, run.round) == (Phase.FINAL, 1)


def test_a_spare_that_departs_gets_no_seat() -> None:
    """It is about to leave; the round is formed without it although it is still present."""
    run = ScriptedRun(min_nodes=1, max_nodes=2, last_call_timeout=30.0)
    run.start("a", "b")
    run.join("spare")
    run.depart("spare")
    run.lose("a")
    assert run.phase is Phase.JOINABLE
    run.later(30)
    assert run.ranks == ["b"]


def test_a_former_participant_that_is_a_spare_now_is_a_spare() -> None:
    """It was lost and came back too late: its old workers are not of the round that ended last."""
    run = ScriptedRun(min_nodes=2, max_nodes=2)
    run.start("a", "b")
    run.join("c")
    run.lose("a")
    run.run_round()
    run.join("a", "d")
    run.depart("a")
    run.lose("b")
    assert (run.phase, sorted(run.ranks)) == (Phase.FROZEN, ["c", "d"])
