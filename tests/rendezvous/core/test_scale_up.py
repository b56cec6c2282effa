"""Newcomers wait for a delay, and join a round that has room with one restart for all of them."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.decide import next_deadline, settle
from rallypoint.rendezvous.core.state import Phase, RoundEndCause, ScaleUpPolicy
from rendezvous.core.scripted_run import ScriptedRun


@pytest.fixture
def run() -> ScriptedRun:
    """Return a run of two nodes with room for two more, and a delay of ten seconds."""
    run = ScriptedRun(
        min_nodes=1,
        max_nodes=4,
        max_restarts=1,
        last_call_timeout=30.0,
        scale_up_policy=ScaleUpPolicy.DELAYED,
        scale_up_delay=10.0,
    )
    run.start("a", "b")
    return run


def test_newcomers_are_let_in_together(run: ScriptedRun) -> None:
    """The delay counts from the first of them, and not a moment less; then the next round has them all."""
    run.join("c")
    run.later(9.9)
    assert (run.phase, run.round) == (Phase.FINAL, 1)
    run.later(0.1)
    assert (run.phase, run.round, run.ranks) == (Phase.FROZEN, 2, ["a", "b", "c"])
    (ended,) = run.of_type(facts.RoundEnded)
    assert (ended.end.cause, ended.end.node_id, ended.end.detail) == (
        RoundEndCause.NODE_JOINED,
        "c",
        "node c joined",
    )
    assert ended.restart_count == 0


def test_a_later_newcomer_does_not_prolong_the_delay() -> None:
    """Otherwise frequent newcomers would keep all of them out."""
    run = ScriptedRun(min_nodes=1, max_nodes=9, scale_up_policy=ScaleUpPolicy.DELAYED, scale_up_delay=10.0)
    run.start("a")
    for number in range(4):
        run.join(f"n{number}")
        run.later(2.5)
    assert (run.phase, len(run.ranks)) == (Phase.FROZEN, 5)


def test_newcomers_that_fill_the_round_are_let_in_as_soon_as_one_is_ready(run: ScriptedRun) -> None:
    """There is no further newcomer to wait for."""
    run.let_in("c")
    assert run.phase is Phase.FINAL
    run.join("d")
    assert (run.phase, run.ranks) == (Phase.FROZEN, ["a", "b", "c", "d"])
    (ended,) = run.of_type(facts.RoundEnded)
    assert ended.end.detail == "nodes c and d joined"


def test_the_delay_ends_when_the_newcomer_has_gone(run: ScriptedRun) -> None:
    """The round runs on; the next newcomer starts a delay of its own."""
    run.join("c")
    run.later(9)
    run.leave("c")
    assert run.state.scale_up_deadline is None
    assert run.later(60) == []
    run.join("d")
    run.later(9.9)
    assert run.phase is Phase.FINAL
    run.later(0.1)
    assert run.ranks == ["a", "b", "d"]


def test_a_newcomer_that_departs_counts_no_longer(run: ScriptedRun) -> None:
    """A leaving node is no reason to end a round."""
    run.join("c")
    run.depart("c")
    assert run.state.scale_up_deadline is None
    run.later(11)
    assert (run.phase, run.round) == (Phase.FINAL, 1)


def test_a_newcomer_during_the_confirming_is_gathered_from_the_start_of_the_round() -> None:
    """A round that is being confirmed is not disturbed, and workers that have just started run for the whole delay."""
    run = ScriptedRun(
        min_nodes=1,
        max_nodes=3,
        last_call_timeout=0.0,
        scale_up_policy=ScaleUpPolicy.DELAYED,
        scale_up_delay=10.0,
    )
    run.join("a")
    run.later(1)
    run.join("b")
    assert run.state.scale_up_deadline is None
    run.later(20)
    run.confirm("a")
    assert run.state.scale_up_deadline == run.now + 10


def test_the_end_of_the_delay_is_a_deadline(run: ScriptedRun) -> None:
    """A caller that sleeps until the next one is awake then."""
    run.join("c")
    assert next_deadline(run.state) == run.now + 10
    assert settle(run.state, run.now + 9.999) == []
    assert isinstance(settle(run.state, run.now + 10)[0], facts.RoundEnded)


def test_a_round_that_ends_for_another_reason_takes_the_gathered_along(run: ScriptedRun) -> None:
    """They are present; and no old deadline is left to end the next round."""
    run.join("c")
    run.later(5)
    run.fail("a")
    assert run.ranks == ["a", "b", "c"]
    run.run_round()
    assert run.state.scale_up_deadline is None
    assert run.later(60) == []


def test_a_full_round_gathers_no_newcomers(run: ScriptedRun) -> None:
    """Spares wait for a free rank, not for a restart."""
    run.let_in("c", "d")
    run.run_round()
    run.join("spare")
    assert run.state.scale_up_deadline is None
    assert run.later(60) == []


def test_a_place_that_falls_free_is_no_reason_once_a_node_has_succeeded(run: ScriptedRun) -> None:
    """The run is about to end: no node is let in, and the server does not wake up repeatedly."""
    run.let_in("c", "d")
    run.run_round()
    run.join("spare")
    run.succeed("a")
    run.leave("a")
    run.later(60)
    assert (run.phase, run.waiting) == (Phase.FINAL, ["spare"])
    deadline = next_deadline(run.state)
    assert deadline is not None
    assert deadline > run.now
