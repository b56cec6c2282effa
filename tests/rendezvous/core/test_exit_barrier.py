"""Participants that succeeded wait for the others; after the barrier's timeout they may leave."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.state import Outcome, Phase, RoundEndCause
from rallypoint.rendezvous.runs.run import node_update
from rendezvous.core.scripted_run import ScriptedRun


@pytest.fixture
def run() -> ScriptedRun:
    """Return a round of three nodes whose exit barrier holds for a hundred seconds."""
    run = ScriptedRun(
        min_nodes=1, max_nodes=3, max_restarts=5, exit_barrier_timeout=100.0, last_call_timeout=30.0
    )
    run.start("a", "b", "c")
    return run


def test_it_holds_for_its_timeout_from_the_first_success(run: ScriptedRun) -> None:
    """Not a moment less, and a second success neither prolongs it nor starts another."""
    run.succeed("a")
    run.later(60)
    run.succeed("b")
    assert run.later(39.9) == []
    assert not run.state.exit_barrier_passed
    assert run.later(0.1) == [facts.ExitBarrierPassed(1)]
    assert run.state.exit_barrier_passed
    assert run.phase is Phase.FINAL


def test_it_passes_once(run: ScriptedRun) -> None:
    """A node that succeeds after it need not wait, and the barrier does not expire a second time."""
    run.succeed("a")
    run.later(100)
    run.succeed("b")
    assert run.state.exit_barrier_deadline is None
    assert run.later(1000) == []


def test_it_is_in_updates_to_nodes_while_the_round_runs(run: ScriptedRun) -> None:
    """Their updates have it from the moment that it passes, but not before, and not in the next round."""
    run.succeed("a")
    assert not node_update(run.state, "a").exit_barrier_passed
    run.later(100)
    assert node_update(run.state, "a").exit_barrier_passed
    run.lose("b")
    assert run.phase is Phase.JOINABLE
    assert not node_update(run.state, "a").exit_barrier_passed


@pytest.mark.parametrize("gone", ["a", "ab"])
def test_a_node_that_leaves_past_it_ends_no_round(run: ScriptedRun, gone: str) -> None:
    """The others go on, and the run succeeds with the last of them."""
    run.succeed("a", "b")
    run.later(100)
    for node_id in gone:
        run.leave(node_id)
    assert (run.phase, run.round) == (Phase.FINAL, 1)
    run.succeed("c")
    assert run.state.run_end is not None
    assert run.state.run_end.outcome is Outcome.SUCCEEDED


def test_a_failure_after_some_went_starts_those_that_are_left(run: ScriptedRun) -> None:
    """At once: no node is missing that the round waited for."""
    run.succeed("a")
    run.later(100)
    run.leave("a")
    run.fail("c")
    assert (run.phase, run.round, sorted(run.ranks)) == (Phase.FROZEN, 2, ["b", "c"])
    assert run.state.restart_count == 1


def test_every_round_has_its_own(run: ScriptedRun) -> None:
    """After it passed in one round, it holds again in the next."""
    run.succeed("a")
    run.later(100)
    run.fail("b")
    run.run_round()
    run.succeed("b")
    assert run.later(99.9) == []
    assert run.later(0.1) == [facts.ExitBarrierPassed(2)]


def test_a_node_lost_past_it_ends_the_round_of_those_at_work(run: ScriptedRun) -> None:
    """They can't finish without it."""
    run.succeed("a")
    run.later(100)
    run.leave("a")
    run.lose("b")
    (ended,) = run.of_type(facts.RoundEnded)
    assert (ended.end.cause, ended.end.node_id) == (RoundEndCause.NODE_LOST, "b")
    run.later(30)
    assert run.ranks == ["c"]


def test_a_round_that_is_over_has_no_barrier_deadline(run: ScriptedRun) -> None:
    """A round that is being confirmed waits for confirmations only."""
    run.succeed("a")
    run.later(50)
    run.fail("b")
    assert run.phase is Phase.FROZEN
    assert run.state.exit_barrier_deadline is None
