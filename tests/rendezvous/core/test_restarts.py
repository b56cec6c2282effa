"""Budgets of restarts, their window, and the back-off of restarts."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.core import commands, facts, failures
from rallypoint.rendezvous.core.decide import next_deadline
from rallypoint.rendezvous.core.failures import SETTLE_WINDOW, STEADY_AFTER, hold
from rallypoint.rendezvous.core.snapshot import restore, take_snapshot
from rallypoint.rendezvous.core.state import FailureKind, Phase, RunSettings
from rendezvous.core.scripted_run import ScriptedRun


def fail_again(run: ScriptedRun, node_id: str = "a", *, after: float = 0.0) -> None:
    """Let a round run for `after` seconds and fail; wait for the back-off, and confirm the next round."""
    run.later(after)
    run.fail(node_id)
    while run.state.hold_until is not None:
        run.later(run.state.hold_until - run.now)
    if run.phase is Phase.FROZEN:
        run.run_round()


class TestAPortThatWasTaken:
    @pytest.mark.parametrize("budget", [{"max_restarts": 0}, {"max_restarts": 3, "max_restarts_per_node": 1}])
    def test_it_costs_no_restart(self, budget: dict[str, int]) -> None:
        """However often it happens, and also if peers fail because of it; the next round forms at once."""
        run = ScriptedRun(min_nodes=2, max_nodes=2, **budget)
        run.start("a", "b")
        for round_ in (2, 3, 4):
            run.later(5.0)
            if not budget["max_restarts"]:
                run.fail("b", "connection reset", age=1.0)
            run.fail("a", "MASTER_PORT was taken", age=5.0, kind=FailureKind.PORT_TAKEN)
            assert (run.phase, run.state.round) == (Phase.FROZEN, round_)
            run.run_round()
        assert (run.state.restart_count, failures.counted(run.state), run.state.restarts) == (0, 0, [])
        assert run.state.last_round_end is not None
        assert (run.state.last_round_end.node_id, run.state.run_end, run.state.evicted) == ("a", None, {})

    def test_the_first_is_tried_again_at_once_and_many_are_held_back(self) -> None:
        """An endless failure must not keep the run's hosts busy."""
        run = ScriptedRun(restart_backoff=60.0)
        run.start("a")
        holds = []
        for _ in range(4):
            began = run.now
            run.fail("a", kind=FailureKind.PORT_TAKEN)
            while run.state.hold_until is not None:
                run.later(run.state.hold_until - run.now)
            holds.append(run.now - began)
            run.run_round()
        assert holds == [0.0, 1.0, 2.0, 4.0]


class TestTheWindow:
    def test_restarts_that_are_older_no_longer_count(self) -> None:
        """A job may live for ever with a failure now and then; the count that workers get keeps growing."""
        run = ScriptedRun(max_restarts=2, restart_window=600.0)
        run.start("a")
        for _ in range(20):
            fail_again(run, after=400.0)
        assert run.phase is Phase.FINAL
        assert run.state.restart_count == 20

    def test_as_many_within_it_as_the_budget_has_end_the_run(self) -> None:
        """And the sentence has the length of the window."""
        run = ScriptedRun(max_restarts=2, restart_window=600.0)
        run.start("a")
        fail_again(run)
        fail_again(run, after=599.0)
        run.later(0.5)
        run.fail("a")
        assert run.state.run_end is not None
        assert run.state.run_end.detail.endswith("all 2 restarts were used up in 600 s")

    def test_restarts_that_have_left_it_are_forgotten_in_time(self) -> None:
        """The state shows the current count, also if nothing else happens."""
        run = ScriptedRun(max_restarts=2, restart_window=600.0, keep_alive_interval=1e6)
        run.start("a")
        fail_again(run)
        assert failures.counted(run.state) == 1
        assert next_deadline(run.state) == run.now + 600.0
        run.later(600.0)
        assert failures.counted(run.state) == 0
        assert run.state.restarts == []

    def test_nodes_have_it_too(self) -> None:
        """Only failures within the window exhaust a node's budget."""
        run = ScriptedRun(
            min_nodes=1, max_nodes=2, max_restarts=9, max_restarts_per_node=2, restart_window=600.0
        )
        run.start("a", "b")
        for _ in range(6):
            fail_again(run, "b", after=400.0)
        assert not run.state.evicted
        fail_again(run, "b")
        run.fail("b")
        run.later(SETTLE_WINDOW)
        assert (
            run.state.evicted["b"].reason
            == "its workers failed 3 times in 600 s, last that of rank 1: it broke"
        )

    def test_without_one_all_count(self) -> None:
        """As with torch."""
        run = ScriptedRun(max_restarts=2)
        run.start("a")
        fail_again(run, after=1e5)
        fail_again(run, after=1e5)
        run.later(1e5)
        run.fail("a")
        assert run.phase is Phase.CLOSED

    @pytest.mark.parametrize(("away", "counted"), [(0.0, 2), (300.0, 2), (450.0, 1), (700.0, 0)])
    def test_a_server_that_starts_again_knows_how_long_ago_they_were(self, away: float, counted: int) -> None:
        """By the wall clock: restarts must neither be dropped nor count for longer because the server was away."""
        run = ScriptedRun(max_restarts=5, restart_window=600.0)
        run.start("a")
        fail_again(run)
        fail_again(run, after=200.0)
        snapshot = take_snapshot(run.state, 1.7e9)
        again = restore(snapshot, 7.0, 1.7e9 + run.now + away - 7.0)
        assert failures.counted(again) == counted

    def test_a_wall_clock_that_was_put_back_makes_no_restart_of_the_future(self) -> None:
        """It counts as just made."""
        run = ScriptedRun(max_restarts=5, restart_window=600.0)
        run.start("a")
        fail_again(run)
        again = restore(take_snapshot(run.state, 1.7e9), 7.0, 1.6e9)
        assert [restart.at for restart in again.restarts] == [7.0]


class TestHoldingBack:
    def test_the_pauses_grow_up_to_the_longest(self) -> None:
        """The first restart comes at once; then 1, 2, 4 … seconds."""
        settings = RunSettings(restart_backoff=30.0)
        assert [hold(settings, quick) for quick in range(1, 9)] == [0, 1, 2, 4, 8, 16, 30, 30]
        assert hold(settings, 100_000) == 30
        assert hold(RunSettings(restart_backoff=0.0), 100_000) == 0
        assert hold(RunSettings(restart_backoff=0.5), 2) == 0.5

    def test_rounds_that_fail_soon_wait(self) -> None:
        """The round is not formed, and no node starts workers, until the pause is over."""
        run = ScriptedRun(2, 2, max_restarts=9, restart_backoff=30.0, keep_alive_interval=60.0)
        run.start("a", "b")
        run.fail("a")
        assert run.state.hold_until is None
        run.run_round()
        for seconds in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
            run.fail("a")
            assert run.phase is Phase.JOINABLE
            assert next_deadline(run.state) == run.now + seconds
            run.later(seconds - 0.01)
            assert run.phase is Phase.JOINABLE
            (frozen,) = run.later(0.01)
            assert isinstance(frozen, facts.RoundFrozen)
            run.run_round()

    def test_a_round_that_ran_for_a_while_is_restarted_at_once(self) -> None:
        """Its failure has another cause."""
        run = ScriptedRun(max_restarts=99, restart_backoff=30.0)
        run.start("a")
        for _ in range(5):
            fail_again(run)
        run.later(STEADY_AFTER)
        run.fail("a")
        assert run.phase is Phase.FROZEN
        assert run.state.quick_restarts == 1

    def test_a_while_is_longer_where_pauses_are(self) -> None:
        """A minute of running does not make up for a pause of ten minutes."""
        run = ScriptedRun(max_restarts=99, restart_backoff=600.0)
        run.start("a")
        for _ in range(9):
            fail_again(run)
        assert hold(run.settings, 9) == 128
        run.later(255)
        run.fail("a")
        assert run.phase is Phase.JOINABLE
        assert run.state.quick_restarts == 10

    def test_changes_of_membership_are_not_held_back(self) -> None:
        """However the previous rounds ended; and they don't reset the count of quick failures."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, max_restarts=9, restart_backoff=30.0)
        run.start("a", "b")
        fail_again(run)
        fail_again(run)
        run.let_in("c")
        assert run.phase is Phase.FROZEN
        run.run_round()
        run.fail("a")
        assert run.state.hold_until == run.now + 2.0

    def test_an_operators_restart_breaks_the_row(self) -> None:
        """The operator may have repaired the cause."""
        run = ScriptedRun(max_restarts=9, restart_backoff=30.0)
        run.start("a")
        fail_again(run)
        fail_again(run)
        run.restart()
        assert run.phase is Phase.FROZEN
        run.run_round()
        run.fail("a")
        assert run.phase is Phase.FROZEN

    def test_an_operator_may_end_the_pause(self) -> None:
        """After a repair an operator need not wait for its end; the budget is unchanged."""
        run = ScriptedRun(max_restarts=9, restart_backoff=30.0)
        run.start("a")
        fail_again(run)
        run.fail("a")
        assert run.state.hold_until is not None
        happened = run.restart("the storage is back")
        assert happened[0] == facts.RestartRequested(2, "the storage is back")
        assert (run.phase, run.round, run.state.restart_count) == (Phase.FROZEN, 3, 2)
        run.run_round()
        run.fail("a")
        assert run.phase is Phase.FROZEN

    def test_a_pause_that_an_operator_has_ended_does_not_come_again(self) -> None:
        """Also not if the server starts again while there are too few nodes."""
        settings = {"restart_backoff": 30.0, "disconnect_grace": 0.25}
        run = ScriptedRun(min_nodes=2, max_nodes=2, max_restarts=9, **settings)
        run.start("a", "b")
        fail_again(run)
        run.fail("a")
        run.later(0.6)  # otherwise the failure of a would be attributed to the loss of b
        run.lose("b")
        assert len(run.restart()) == 1
        assert run.restart() == []
        assert (run.phase, run.state.hold_until) == (Phase.JOINABLE, None)
        assert restore(take_snapshot(run.state), 500.0).hold_until is None
        run.join("b")
        assert run.phase is Phase.FROZEN

    def test_a_run_whose_budget_is_used_up_ends_without_a_pause(self) -> None:
        """There is nothing to wait for."""
        run = ScriptedRun(max_restarts=2, restart_backoff=30.0)
        run.start("a")
        fail_again(run)
        fail_again(run)
        run.fail("a")
        assert run.phase is Phase.CLOSED

    def test_nodes_that_come_and_go_meanwhile_change_nothing(self) -> None:
        """The pause belongs to the run; the nodes present at its end take part, and a last call runs beside it."""
        settings = {"restart_backoff": 30.0, "last_call_timeout": 3.0, "disconnect_grace": 0.25}
        run = ScriptedRun(min_nodes=1, max_nodes=3, max_restarts=9, **settings)
        run.start("a", "b")
        fail_again(run)
        run.fail("a")
        run.later(0.6)  # otherwise the failure of a would be attributed to the loss of b
        run.lose("b")
        run.join("c")
        assert run.phase is Phase.JOINABLE
        run.later(0.15)
        assert run.ranks == ["a", "c"]

    def test_it_ends_although_all_nodes_have_gone(self) -> None:
        """Once it is over nothing is waited for, and the next node that joins gets a round at once."""
        run = ScriptedRun(max_restarts=9, restart_backoff=30.0)
        run.start("a")
        fail_again(run)
        run.fail("a")
        run.leave("a")
        assert next_deadline(run.state) == run.now + 1.0
        run.later(1.0)
        assert (run.phase, run.state.hold_until) == (Phase.JOINABLE, None)
        run.join("b")
        assert run.ranks == ["b"]

    def test_it_may_be_closed_meanwhile(self) -> None:
        """No round follows."""
        run = ScriptedRun(max_restarts=9, restart_backoff=30.0)
        run.start("a")
        fail_again(run)
        run.fail("a")
        run.do(commands.Close("enough"))
        assert run.state.hold_until is None
        assert run.later(60.0) == []

    def test_it_is_held_back_again_by_a_server_that_starts_again(self) -> None:
        """Like every deadline."""
        run = ScriptedRun(max_restarts=9, restart_backoff=30.0)
        run.start("a")
        fail_again(run)
        run.fail("a")
        run.later(0.9)
        again = restore(take_snapshot(run.state), 500.0)
        assert again.hold_until == 501.0

    def test_the_numbers_are_in_the_journal(self) -> None:
        """So they can be reported, and outlive the server."""
        run = ScriptedRun(max_restarts=9, restart_backoff=30.0)
        run.start("a")
        fail_again(run)
        fail_again(run)
        ended = run.of_type(facts.RoundEnded)
        assert [(fact.restart_count, fact.counted_restarts, fact.quick_restarts) for fact in ended] == [
            (1, 1, 1),
            (2, 2, 2),
        ]
