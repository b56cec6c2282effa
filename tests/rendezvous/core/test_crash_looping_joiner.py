"""A node that joins, dies and joins again costs the healthy nodes of a run less than a twentieth of their time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.newcomers import PROBATION
from rallypoint.rendezvous.core.state import Phase, RunSettings
from rendezvous.core.crash_loop import HEALTHY, CrashLoop, Ending
from rendezvous.core.scripted_run import ScriptedRun

HOUR = 3600.0

# The settings of `rallypoint run --nnodes 2:3`: newcomers are let in at once, and no restart is allowed.
DEFAULTS = RunSettings(min_nodes=2, max_nodes=3)
# The settings that docs/rounds.md advises for an elastic number of nodes.
WITH_BUDGETS = RunSettings(min_nodes=2, max_nodes=3, max_restarts=1000, max_restarts_per_node=2)


def settings_for(ending: Ending) -> RunSettings:
    """Return the settings: a failed worker ends a run without restarts, which no newcomer's back-off can prevent."""
    return WITH_BUDGETS if ending is Ending.WORKER_CRASHES else DEFAULTS


@pytest.mark.parametrize("fresh_names", [False, True], ids=["same-name", "fresh-names"])
@pytest.mark.parametrize("every", [10.0, 30.0, 60.0], ids=lambda every: f"{every:g}s")
@pytest.mark.parametrize("ending", Ending, ids=lambda ending: ending.name.lower())
def test_healthy_nodes_run_for_more_than_95_percent_of_an_hour(
    ending: Ending, every: float, fresh_names: bool
) -> None:
    """For every cause of the joiner's death, however often it dies, with the same name or a new one each time."""
    loop = CrashLoop(settings_for(ending), ending, every, fresh_names=fresh_names)
    loop.start_healthy()
    loop.start_joining()
    loop.pass_time(HOUR)
    share = loop.running / HOUR
    rounds = sum(isinstance(fact, facts.RoundFrozen) for fact in loop.facts) - 1
    assert share > 0.95, f"{share:.1%} of the time; {loop.lives} lives, {rounds} more rounds"
    assert loop.state.phase is not Phase.CLOSED


@pytest.mark.parametrize("ending", Ending, ids=lambda ending: ending.name.lower())
def test_a_joiner_that_dies_uses_up_no_restart(ending: Ending) -> None:
    """Its loss is a change of membership, also if the workers of the others fail because of it."""
    if ending is Ending.WORKER_CRASHES:
        pytest.skip("a failed worker is a failed worker")
    loop = CrashLoop(DEFAULTS, ending, 10.0, fresh_names=False)
    loop.start_healthy()
    loop.start_joining()
    loop.pass_time(HOUR / 6)
    assert loop.state.phase is not Phase.CLOSED
    assert loop.state.restart_count == 0


def test_a_newcomer_that_stays_is_let_in_soon() -> None:
    """If nothing has failed before, a healthy newcomer waits only seconds."""
    loop = CrashLoop(DEFAULTS, Ending.KILLED_AT_ONCE, 10.0, fresh_names=False)
    loop.start_healthy()
    loop.join("c")
    loop.pass_time(30.0)
    assert loop.seated == {*HEALTHY, "c"}
    assert loop.running > 20.0


@pytest.mark.parametrize("room", [3, 4, 8])
@pytest.mark.parametrize("ending", Ending, ids=lambda ending: ending.name.lower())
def test_a_newcomer_that_stays_is_let_in_at_last_beside_one_that_does_not(ending: Ending, room: int) -> None:
    """In one round with the other or not; and while there is room, within some minutes."""
    settings = replace(settings_for(ending), max_nodes=room)
    loop = CrashLoop(settings, ending, 30.0, fresh_names=True)
    loop.start_healthy()
    loop.start_joining()
    loop.pass_time(HOUR / 6)
    loop.join("c")
    loop.pass_time(HOUR / 2)
    assert "c" in loop.seated


def test_a_participant_is_passed_over_for_no_other_node() -> None:
    """However often it failed as a newcomer: its workers may still be stopping until it confirms."""
    run = ScriptedRun()
    run.start("a")
    for _ in range(3):
        run.lose("a")
        run.start("a")
    run.join("b")
    run.restart()
    assert (run.phase, run.ranks) == (Phase.FROZEN, ["a"])


def test_probation_ends_though_the_service_was_paused_before() -> None:
    """A pause that leases were forgiven does not count against the time that a round ran."""
    run = ScriptedRun(min_nodes=1, max_nodes=2)
    run.state.forgiven = 3600.0
    run.start("a")
    run.let_in("b")
    run.run_round()
    run.later(PROBATION)
    run.leave("b")
    ended = run.of_type(facts.RoundEnded)[-1]
    assert (ended.newcomers_passed, ended.failed_scale_ups) == (True, 0)
