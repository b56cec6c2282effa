"""A step includes all its consequences, and `next_deadline` is the time of the next one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rallypoint.rendezvous.core import apply, commands, facts
from rallypoint.rendezvous.core.commands import SettingsDiffer
from rallypoint.rendezvous.core.decide import next_deadline, settle
from rallypoint.rendezvous.core.state import LossReason, RunSettings, RunState
from rendezvous.core.scripted_run import ScriptedRun


def test_a_command_brings_everything_that_follows_from_it() -> None:
    """The last confirmation of a round that a newcomer waits for: FINAL, its end, and the next round, in one step."""
    run = ScriptedRun(min_nodes=1, max_nodes=2, last_call_timeout=0.0)
    run.join("a")
    run.later(1)
    run.let_in("b")
    happened = run.do(commands.Confirm("a", run.lease("a"), 1, 29500))
    assert [type(fact) for fact in happened] == [
        facts.NodeConfirmed,
        facts.RoundFinalized,
        facts.RoundEnded,
        facts.RoundFrozen,
    ]


def test_a_settled_run_stays_settled() -> None:
    """At the same moment nothing more happens by itself."""
    run = ScriptedRun(min_nodes=1, max_nodes=3)
    run.start("a", "b")
    run.lose("b")
    assert settle(run.state, run.now) == []


def test_a_refused_command_changes_nothing() -> None:
    """No fact, no revision."""
    run = ScriptedRun(min_nodes=2, max_nodes=2)
    run.join("a")
    revision = run.state.revision
    with pytest.raises(SettingsDiffer):
        run.do(commands.Join("b", RunSettings(), "b.cluster", 1, "trainer"))
    assert (run.state.revision, list(run.state.nodes)) == (revision, ["a"])


def test_a_run_without_nodes_waits_for_nothing() -> None:
    """Nor does one that is closed, once the leases of its nodes are over."""
    run = ScriptedRun(min_nodes=1, max_nodes=2)
    assert next_deadline(RunState("run")) is None
    run.start("a", "b")
    run.do(commands.Close("enough"))
    run.later(run.settings.time_to_live)
    assert next_deadline(run.state) is None


def last_call(run: ScriptedRun) -> None:
    run.join("a", "b")


def confirm_timeout(run: ScriptedRun) -> None:
    run.join("a", "b", "c")


def join_timeout(run: ScriptedRun) -> None:
    run.join("a")


def departure(run: ScriptedRun) -> None:
    run.start("a", "b", "c")
    run.depart("a")


def disconnect_grace(run: ScriptedRun) -> None:
    run.start("a", "b", "c")
    apply.disconnect(run.state, "b", run.now)


def lease(run: ScriptedRun) -> None:
    run.start("a", "b", "c")


def exit_barrier(run: ScriptedRun) -> None:
    run.start("a", "b", "c")
    run.succeed("a")


def exit_barrier_whose_first_has_gone(run: ScriptedRun) -> None:
    exit_barrier(run)
    run.leave("a")


@pytest.mark.parametrize(
    ("set_up", "seconds", "happens"),
    [
        (last_call, 3.0, facts.RoundFrozen),
        (confirm_timeout, 4.0, facts.NodeLost("a", LossReason.CONFIRM_TIMED_OUT)),
        (join_timeout, 5.0, facts.NodeLost("a", LossReason.JOIN_TIMED_OUT)),
        (departure, 4.0, facts.NodeLost("a", LossReason.DEPARTURE_TIMED_OUT)),
        (disconnect_grace, 2.0, facts.NodeLost("b", LossReason.DISCONNECTED)),
        (lease, 90.0, facts.NodeLost("a", LossReason.LEASE_EXPIRED)),
        (exit_barrier, 6.0, facts.ExitBarrierPassed(1)),
        (exit_barrier_whose_first_has_gone, 6.0, facts.ExitBarrierPassed(1)),
    ],
)
def test_the_next_deadline_is_when_something_happens(
    set_up: Callable[[ScriptedRun], None], seconds: float, happens: object
) -> None:
    """A caller that sleeps until then misses nothing, and has something to do."""
    run = ScriptedRun(
        min_nodes=2,
        max_nodes=3,
        last_call_timeout=3.0,
        confirm_timeout=4.0,
        join_timeout=5.0,
        exit_barrier_timeout=6.0,
        disconnect_grace=2.0,
        keep_alive_interval=30.0,
    )
    set_up(run)
    assert next_deadline(run.state) == run.now + seconds
    assert settle(run.state, run.now + seconds - 0.001) == []
    first = settle(run.state, run.now + seconds)[0]
    assert first == happens or type(first) is happens


def test_a_last_call_that_is_over_is_no_deadline_while_a_node_departs() -> None:
    """No round is formed before the node has gone, so the server must not wake up repeatedly."""
    run = ScriptedRun(min_nodes=1, max_nodes=3, last_call_timeout=30.0, confirm_timeout=60.0)
    run.start("a", "b", "c")
    run.depart("a")
    run.later(31)
    deadline = next_deadline(run.state)
    assert deadline is not None
    assert deadline > run.now
    run.leave("a")
    assert sorted(run.ranks) == ["b", "c"]
