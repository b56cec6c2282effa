"""The agent's decisions about a drain: workers get their grace period, and no node waits in vain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.core.test_core import CLOSED, RUNNING, final, frozen, joinable, play
from rallypoint.agent.core import core
from rallypoint.agent.core.core import Workers
from rallypoint.rendezvous.core.state import Phase

DRAIN = core.DrainRequested("drained: maintenance at 10:00")
SAVED = core.DrainOver("its workers saved their state")


def test_workers_are_warned_and_run_on() -> None:
    """The agent reports nothing to the other hosts yet: the round is complete until this node leaves."""
    state, effects = play(DRAIN, state=RUNNING)
    assert effects == [core.WarnWorkers(DRAIN.detail)]
    assert (state.workers, state.leaving) == (Workers.RUNNING, None)


def test_a_second_drain_changes_nothing() -> None:
    """The core does not know the length of the grace period."""
    state, _ = play(DRAIN, state=RUNNING)
    assert play(core.DrainRequested("again"), state=state) == (state, [])


def test_a_node_whose_workers_saved_their_state_leaves() -> None:
    """So does a node whose workers' grace period is over. The reason includes the result of the drain."""
    state, effects = play(DRAIN, SAVED, state=RUNNING)
    why = "drained: maintenance at 10:00 (its workers saved their state)"
    assert effects == [core.SendDeparture(why), core.StopWorkers(why)]
    state, effects = play(core.GroupStopped(), state=state)
    assert effects == [core.SendLeave(why)]
    assert play(core.MembershipEnded(), state=state)[1] == [core.Finish()]


def test_the_end_of_a_drain_without_a_request_is_ignored() -> None:
    """A second end is ignored too."""
    assert play(SAVED, state=RUNNING) == (RUNNING, [])
    state, _ = play(DRAIN, SAVED, state=RUNNING)
    assert play(SAVED, state=state) == (state, [])


def test_workers_that_finish_have_succeeded_and_the_node_leaves_at_once() -> None:
    """The round does not need it: waiting for the others would keep a host that is about to go down."""
    state, effects = play(DRAIN, core.GroupSucceeded(), state=RUNNING)
    assert effects == [core.SendSuccess(1), core.SendLeave("its workers succeeded, and " + DRAIN.detail)]
    assert state.leaving is None


def test_a_node_that_waits_for_the_success_of_others_leaves_at_once() -> None:
    """Its workers had succeeded before the drain."""
    _, effects = play(core.GroupSucceeded(), DRAIN, state=RUNNING)
    assert effects == [core.SendLeave("its workers succeeded, and " + DRAIN.detail)]


def test_a_node_without_workers_leaves_at_once() -> None:
    """There are no workers to warn, whether a round is being formed or other nodes run one."""
    for told in (joinable(), frozen(1), core.RunUpdated(Phase.FINAL)):
        _, effects = play(told, DRAIN)
        assert effects == [core.SendDeparture(DRAIN.detail), core.SendLeave(DRAIN.detail)]


@pytest.mark.parametrize("event", [joinable(), frozen(2), core.LeaseEnded("it expired")])
def test_a_round_that_ends_meanwhile_goes_on_without_the_node(event: core.Event) -> None:
    """It must not take part in a round that it leaves a moment later."""
    state, effects = play(DRAIN, event, state=RUNNING)
    assert effects == [core.SendDeparture(DRAIN.detail), core.StopWorkers(DRAIN.detail)]
    assert play(frozen(2), core.GroupStopped(), state=state)[1] == [core.SendLeave(DRAIN.detail)]


def test_a_node_that_is_stopping_its_workers_departs_at_once() -> None:
    """The others form their round without it, and need not wait for its workers."""
    stopping, _ = play(joinable(), state=RUNNING)
    assert play(DRAIN, state=stopping)[1] == [core.SendDeparture(DRAIN.detail)]


def test_a_worker_that_fails_uses_up_no_restart() -> None:
    """For example by a warning signal that it does not catch: the node leaves in any case."""
    state, effects = play(DRAIN, core.GroupFailed(), state=RUNNING)
    why = DRAIN.detail + " (one of its workers failed meanwhile)"
    assert effects == [core.SendDeparture(why), core.StopWorkers("a worker failed")]
    assert play(core.GroupStopped(), state=state)[1] == [core.SendLeave(why)]


def test_a_stop_request_during_a_drain_takes_effect_at_once() -> None:
    """A sender of SIGTERM waits no longer."""
    _, effects = play(DRAIN, core.StopRequested("got SIGTERM"), state=RUNNING)
    assert effects == [core.SendDeparture("got SIGTERM"), core.StopWorkers("got SIGTERM")]


@pytest.mark.parametrize(
    "event", [core.StopRequested("got SIGTERM"), core.MembershipEnded(), core.NodeUnhealthy("bad memory")]
)
def test_a_node_that_already_leaves_is_not_drained(event: core.Event) -> None:
    """It has a reason, and its workers are being stopped."""
    state, _ = play(event, state=RUNNING)
    assert play(DRAIN, state=state) == (state, [])


def test_a_run_that_closes_meanwhile_ends_the_drain() -> None:
    """There is no run left to report to, and the run's result stands."""
    state, effects = play(DRAIN, CLOSED, state=RUNNING)
    assert effects == [core.StopWorkers("the run is closed")]
    state, effects = play(core.GroupStopped(), core.MembershipEnded(), state=state)
    assert (effects, state.leaving) == ([core.Finish()], None)


def test_the_exit_barrier_does_not_keep_a_drained_node() -> None:
    """This holds before and after it has passed."""
    barrier = replace(final(1), exit_barrier_passed=True)
    _, effects = play(DRAIN, barrier, core.GroupSucceeded(), state=RUNNING)
    assert effects == [
        core.SendSuccess(1),
        core.SendLeave("its workers succeeded, and the exit barrier is over"),
    ]
