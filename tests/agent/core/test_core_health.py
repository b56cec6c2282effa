"""The agent's decisions about its host's health: a host confirms no round without a check."""

from __future__ import annotations

from agent.core.test_core import CLOSED, final, frozen, joinable, play, seat
from rallypoint.agent.core import core
from rallypoint.agent.core.core import AgentState
from rallypoint.rendezvous.core.state import Phase

CHECKED = AgentState(checks=True)
FOUND = core.HealthChecked()
FULL = core.NodeUnhealthy("disk: 0.3 GiB are free")
RUNNING, _ = play(frozen(1), FOUND, final(1), state=CHECKED)


def test_without_checks_nothing_is_examined() -> None:
    """A job without checks has no cost."""
    assert play(joinable(), frozen(1))[1] == [core.SendConfirm(1)]


def test_the_first_round_is_confirmed_once_the_host_was_found_healthy() -> None:
    """The host is checked while the node waits for others, and again only if the last check is old."""
    state, effects = play(joinable(), state=CHECKED)
    assert effects == [core.CheckHealth(fresh=False)]
    state, effects = play(FOUND, joinable(), state=state)
    assert effects == []
    state, effects = play(frozen(1), state=state)
    assert effects == [core.CheckHealth(fresh=False)]
    assert play(FOUND, state=state)[1] == [core.SendConfirm(1)]


def test_a_check_that_ends_after_the_freeze_is_enough() -> None:
    """One slow check serves both phases."""
    state, effects = play(joinable(), frozen(1), state=CHECKED)
    assert effects == []
    assert play(FOUND, state=state)[1] == [core.SendConfirm(1)]


def test_a_confirmed_round_causes_no_second_check() -> None:
    """Updates are repeated."""
    state, _ = play(frozen(1), FOUND, state=CHECKED)
    assert play(frozen(1), state=state)[1] == []
    assert play(final(1), state=state)[1] == [core.StartWorkers(seat(1), 0)]


def test_after_a_failure_here_the_host_is_checked_again() -> None:
    """Earlier results are invalid; the check waits for the end of the workers, and the confirmation for the check."""
    state, effects = play(core.GroupFailed(), joinable(), state=RUNNING)
    assert effects == []
    state, effects = play(core.GroupStopped(), state=state)
    assert effects == [core.CheckHealth(fresh=True)]
    state, effects = play(frozen(2), state=state)
    assert effects == []
    assert play(FOUND, state=state)[1] == [core.SendConfirm(2)]


def test_after_a_failure_on_another_host_a_recent_check_is_enough() -> None:
    """The same applies to a round that grows."""
    assert play(joinable(), core.GroupStopped(), state=RUNNING)[1] == [core.CheckHealth(fresh=False)]


def test_a_node_that_lost_its_lease_is_checked_again() -> None:
    """The reason for its missing heartbeats is unknown."""
    _, effects = play(core.LeaseEnded("no heartbeat"), core.GroupStopped(), state=RUNNING)
    assert effects == [core.CheckHealth(fresh=True)]


def test_a_spare_is_checked_when_it_joins_a_round() -> None:
    """This holds also if it was healthy when it began to wait."""
    state, effects = play(joinable(), FOUND, core.RunUpdated(Phase.FINAL), joinable(), state=CHECKED)
    assert effects == []
    assert play(frozen(3), state=state)[1] == [core.CheckHealth(fresh=False)]


def test_a_host_that_is_not_healthy_leaves_with_the_reason() -> None:
    """The others are informed at once, and no worker was started here."""
    state, effects = play(joinable(), FULL, state=CHECKED)
    assert effects == [core.SendDeparture(FULL.detail), core.SendLeave(FULL.detail)]
    assert state.unhealthy == FULL.detail
    assert play(frozen(1), FOUND, state=state)[1] == []


def test_a_stop_request_does_not_wait_for_the_check() -> None:
    """A closed run does not wait for it either."""
    state, _ = play(joinable(), state=CHECKED)
    stop = core.StopRequested("got SIGTERM")
    assert play(stop, state=state)[1] == [core.SendDeparture("got SIGTERM"), core.SendLeave("got SIGTERM")]
    assert play(CLOSED, core.MembershipEnded(), state=state)[1] == [core.Finish()]


def test_a_host_is_not_checked_for_a_run_that_is_over() -> None:
    """Its workers failed, and there is no other round."""
    state, _ = play(core.GroupFailed(), CLOSED, core.GroupStopped(), state=RUNNING)
    assert not state.examining
