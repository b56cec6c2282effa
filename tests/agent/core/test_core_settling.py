"""The agent's decisions in the settle window at the end of a run: it reports earlier failures before it is too late."""

from __future__ import annotations

import pytest

from agent.core.test_core import RUNNING, play, seat
from rallypoint.agent.core import core
from rallypoint.agent.core.core import Workers
from rallypoint.rendezvous.core.state import Phase

SETTLING = core.RunUpdated(Phase.FINAL, seat(1), settling=True)


def test_a_node_with_running_workers_collects_failures() -> None:
    """Its worker may have been the first to fail, and slow to exit. The workers run on meanwhile."""
    state, effects = play(SETTLING, state=RUNNING)
    assert effects == [core.CollectFailures()]
    assert state.workers is Workers.RUNNING
    assert play(core.GroupFailed(), state=state)[1][0] == core.SendFailure(1)


@pytest.mark.parametrize(
    "events",
    [
        (core.GroupFailed(),),
        (core.GroupSucceeded(),),
        (core.StopRequested("told to stop"),),
        (core.RunUpdated(Phase.FROZEN, seat(2)),),
    ],
)
def test_a_node_without_running_workers_collects_nothing(events: tuple[core.Event, ...]) -> None:
    """Failures were already reported when the workers were stopped."""
    state, _ = play(*events, state=RUNNING)
    assert core.CollectFailures() not in play(SETTLING, state=state)[1]


def test_no_failures_are_collected_for_another_round() -> None:
    """The workers here belong to another round, and are stopped."""
    later = core.RunUpdated(Phase.FINAL, seat(2), settling=True)
    assert [type(effect) for effect in play(later, state=RUNNING)[1]] == [core.StopWorkers]
