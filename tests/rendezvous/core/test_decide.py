"""A run goes JOINABLE → FROZEN → FINAL → JOINABLE …, and ends CLOSED, by the rules of the design."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.core import commands, facts
from rallypoint.rendezvous.core.commands import LeaseLost, RevisionAhead, RunIsClosed, SettingsDiffer
from rallypoint.rendezvous.core.decide import check_lease, check_revision, decide
from rallypoint.rendezvous.core.failures import SETTLE_WINDOW
from rallypoint.rendezvous.core.newcomers import READY_AFTER
from rallypoint.rendezvous.core.state import (
    LossReason,
    Outcome,
    Phase,
    Reopen,
    RoundEndCause,
    RunSettings,
    RunState,
    ScaleUpPolicy,
)
from rendezvous.core.scripted_run import ScriptedRun


class TestJoining:
    """The start of a round."""

    def test_the_first_node_brings_the_settings(self) -> None:
        """The first node's settings become those of the run, and its lease is the revision of its joining."""
        run = ScriptedRun(min_nodes=2, max_nodes=4)
        assert run.join("a") == 2
        assert run.facts[0] == facts.RunCreated(run.settings)
        assert run.phase is Phase.JOINABLE

    def test_lease_numbers_grow_and_are_revisions(self) -> None:
        """Every lease is the revision of the fact that gave it, so none comes twice."""
        run = ScriptedRun(min_nodes=3, max_nodes=3)
        assert [run.join("a"), run.join("b"), run.join("a")] == [2, 3, 5]

    def test_below_min_nothing_starts(self) -> None:
        """Fewer than min_nodes form no round, however long they wait, and no last call is on."""
        run = ScriptedRun(min_nodes=3, max_nodes=3)
        run.join("a", "b")
        assert run.later(599) == []
        assert run.state.last_call_deadline is None

    def test_the_last_call_starts_at_min_nodes(self) -> None:
        """With min_nodes there, the round freezes when the last call is over, and not a moment before."""
        run = ScriptedRun(min_nodes=2, max_nodes=4, last_call_timeout=30.0)
        run.join("a")
        run.later(5)
        run.join("b")
        run.later(29.9)
        assert run.phase is Phase.JOINABLE
        run.later(0.1)
        assert (run.phase, run.ranks) == (Phase.FROZEN, ["a", "b"])

    def test_a_node_that_comes_during_the_last_call_is_in(self) -> None:
        """A node that joins before the last call is over has a seat; it doesn't prolong the call."""
        run = ScriptedRun(min_nodes=1, max_nodes=4, last_call_timeout=30.0)
        run.join("a")
        run.later(29)
        run.join("b")
        run.later(1)
        assert (run.phase, run.ranks) == (Phase.FROZEN, ["a", "b"])

    def test_the_last_call_is_off_below_min_nodes(self) -> None:
        """When a node goes and too few are left, the call is off; it starts again with the next that comes."""
        run = ScriptedRun(min_nodes=2, max_nodes=4, last_call_timeout=30.0)
        run.join("a", "b")
        run.later(20)
        run.leave("b")
        assert run.state.last_call_deadline is None
        run.later(20)
        run.join("c")
        run.later(29)
        assert run.phase is Phase.JOINABLE
        run.later(1)
        assert run.ranks == ["a", "c"]

    def test_max_nodes_freeze_at_once(self) -> None:
        """With max_nodes present, the round waits for no other node."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, last_call_timeout=1000.0)
        run.join("a", "b", "c")
        assert (run.phase, run.ranks) == (Phase.FROZEN, ["a", "b", "c"])

    def test_a_node_that_comes_after_max_nodes_waits(self) -> None:
        """More nodes than max_nodes close no run: the rest wait, in the order they came."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        run.join("d", "c")
        assert (run.phase, run.ranks, run.waiting) == (Phase.FINAL, ["a", "b"], ["d", "c"])

    def test_a_node_that_waits_too_long_is_turned_away(self) -> None:
        """Past join_timeout with fewer than min_nodes, each node goes when its own time is over, the eldest first."""
        run = ScriptedRun(min_nodes=3, max_nodes=3, join_timeout=600.0)
        run.join("a")
        run.later(100)
        run.join("b")
        assert run.later(500) == [facts.NodeLost("a", LossReason.JOIN_TIMED_OUT)]
        assert run.later(100) == [facts.NodeLost("b", LossReason.JOIN_TIMED_OUT)]
        assert run.phase is Phase.JOINABLE

    def test_spares_wait_without_limit(self) -> None:
        """The join timeout is about too few nodes: a node that waits for a seat in a running run is not turned away."""
        run = ScriptedRun(min_nodes=1, max_nodes=1, join_timeout=600.0)
        run.start("a")
        run.join("spare")
        assert run.later(10_000) == []

    def test_the_join_timeout_starts_again_when_a_round_ends(self) -> None:
        """Survivors of a round that can't re-form get a whole join_timeout for others to come."""
        run = ScriptedRun(min_nodes=2, max_nodes=2, join_timeout=600.0)
        run.start("a", "b")
        run.later(10_000)
        run.lose("b")
        assert run.phase is Phase.JOINABLE
        assert run.later(599) == []
        assert run.later(1) == [facts.NodeLost("a", LossReason.JOIN_TIMED_OUT)]

    def test_settings_that_differ_are_refused_by_name(self) -> None:
        """A node that joins with other settings is refused, with each difference in words."""
        run = ScriptedRun(min_nodes=1, max_nodes=2, restart_backoff=30.0)
        run.join("a")
        other = RunSettings(min_nodes=1, max_nodes=4, scale_up_policy=ScaleUpPolicy.ON_RESTART)
        with pytest.raises(SettingsDiffer) as refusal:
            run.do(commands.Join("b", other, "b.cluster", 1, "trainer"))
        assert refusal.value.differences == {
            "max_nodes": (2, 4),
            "scale_up_policy": (ScaleUpPolicy.IMMEDIATE, ScaleUpPolicy.ON_RESTART),
        }
        assert str(refusal.value) == (
            "run 'run' has other settings: max_nodes is 2, not 4, scale_up_policy is IMMEDIATE, not ON_RESTART; "
            "all its nodes must be started with the same"
        )
        assert "b" not in run.state.nodes


class TestConfirming:
    """The confirmation of a round, until it is FINAL."""

    def test_a_round_is_final_when_all_confirmed(self) -> None:
        """Not one participant less; the port is that of the node of group rank 0."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.join("a", "b")
        run.confirm("b", port=1)
        assert run.phase is Phase.FROZEN
        run.confirm("a", port=2)
        assert (run.phase, run.state.master_port) == (Phase.FINAL, 2)
        assert run.state.master_address == "a.cluster"

    def test_confirming_twice_changes_nothing(self) -> None:
        """A node that repeats its message after a reconnect does no harm."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.join("a", "b")
        run.confirm("a")
        assert run.do(commands.Confirm("a", run.lease("a"), 1, 7)) == []

    @pytest.mark.parametrize("round_", [-1, 0, 1, 3])
    def test_another_round_is_not_confirmed(self, round_: int) -> None:
        """A confirmation of another round, past or future, does not count for the present one."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.join("a", "b")
        run.lose("b")
        run.later(30)
        assert (run.phase, run.round) == (Phase.FROZEN, 2)
        run.confirm("a", round_=round_)
        assert run.phase is Phase.FROZEN

    def test_all_nodes_silent_for_the_confirm_timeout_are_dropped_at_once(self) -> None:
        """One timeout finds all of them; a node that confirmed stays, and the number of the round is used up."""
        run = ScriptedRun(min_nodes=1, max_nodes=4, confirm_timeout=60.0)
        run.join("a", "b", "c", "d")
        run.confirm("b", "d")
        assert run.later(59.9) == []
        *lost, ended = run.later(0.1)
        assert lost == [facts.NodeLost(node_id, LossReason.CONFIRM_TIMED_OUT) for node_id in ("a", "c")]
        assert isinstance(ended, facts.RoundEnded)
        assert (run.phase, list(run.state.nodes)) == (Phase.JOINABLE, ["b", "d"])
        run.later(30)
        assert (run.phase, run.round) == (Phase.FROZEN, 2)

    def test_a_node_lost_before_it_confirms_ends_the_round(self) -> None:
        """Back to JOINABLE, with a reason; the number is never used again."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.join("a", "b")
        run.lose("b")
        (end,) = run.of_type(facts.RoundEnded)
        assert (end.end.round, end.end.cause, end.end.node_id) == (1, RoundEndCause.NODE_LOST, "b")
        run.later(30)
        assert run.of_type(facts.RoundFrozen)[-1].round == 2

    def test_a_spare_takes_no_part_in_confirming(self) -> None:
        """A node without a seat has nothing to confirm, and is not waited for."""
        run = ScriptedRun(min_nodes=1, max_nodes=1)
        run.join("a", "spare")
        assert run.do(commands.Confirm("spare", run.lease("spare"), 1, 1)) == []
        run.confirm("a")
        assert run.phase is Phase.FINAL


class TestReforming:
    """The next round after a change."""

    def test_the_same_nodes_freeze_at_once(self) -> None:
        """A failed worker with no node lost: the round waits for no node, and survivors need not join again."""
        run = ScriptedRun(min_nodes=1, max_nodes=4, max_restarts=3, last_call_timeout=30.0)
        run.start("a", "b")
        run.fail("a")
        assert (run.phase, run.round, run.ranks) == (Phase.FROZEN, 2, ["a", "b"])

    def test_a_spare_for_each_lost_node_freezes_at_once(self) -> None:
        """With a replacement for every lost node, the round waits for no other."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.start("a", "b")
        run.join("c", "d")
        run.lose("a", "b")
        assert (run.phase, run.round, sorted(run.ranks)) == (Phase.FROZEN, 2, ["c", "d"])

    def test_a_loss_without_a_spare_has_a_last_call(self) -> None:
        """The lost node, or another, gets the time of a last call to come back; then it goes on without."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, last_call_timeout=30.0)
        run.start("a", "b", "c")
        run.lose("b")
        assert run.phase is Phase.JOINABLE
        run.later(29.9)
        assert run.phase is Phase.JOINABLE
        run.later(0.1)
        assert (run.phase, run.ranks) == (Phase.FROZEN, ["a", "c"])

    def test_a_replacement_during_the_last_call_ends_it(self) -> None:
        """As soon as the round is whole again, it freezes."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, last_call_timeout=30.0)
        run.start("a", "b")
        run.lose("b")
        run.later(1)
        run.join("c")
        assert (run.phase, run.ranks) == (Phase.FROZEN, ["a", "c"])

    def test_spares_get_the_free_seats_in_the_order_they_came(self) -> None:
        """And no spare takes the seat of a survivor."""
        run = ScriptedRun(min_nodes=1, max_nodes=2, max_restarts=1)
        run.start("a", "b")
        run.join("z", "c")
        run.lose("a")
        assert (sorted(run.ranks), run.waiting) == (["b", "z"], ["c"])

    def test_survivors_keep_their_ranks(self) -> None:
        """In a smaller round as in a larger one; a rank changes only if it must."""
        run = ScriptedRun(min_nodes=1, max_nodes=4)
        run.start("a", "b", "c", "d")
        run.lose("a")
        run.run_round()
        assert run.ranks == ["d", "b", "c"]
        run.let_in("a")
        assert run.ranks == ["d", "b", "c", "a"]

    def test_a_node_that_joins_again_goes_before_a_spare(self) -> None:
        """Although the spare has waited longer: a former participant comes first."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        run.join("spare")
        run.join("a")
        assert (run.ranks, run.waiting) == (["a", "b"], ["spare"])

    def test_a_spare_takes_no_seat_that_is_not_free(self) -> None:
        """A restart for a failed worker has the same participants."""
        run = ScriptedRun(min_nodes=1, max_nodes=2, max_restarts=1)
        run.start("b", "c")
        run.join("a")
        run.fail("b")
        assert (run.ranks, run.waiting) == (["b", "c"], ["a"])

    def test_a_node_that_joins_again_supersedes_itself(self) -> None:
        """An agent that was killed and started again: its old lease is invalid, the round re-forms at once."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        old = run.lease("a")
        run.join("a")
        assert (run.phase, run.round, run.ranks) == (Phase.FROZEN, 2, ["a", "b"])
        assert facts.NodeLost("a", LossReason.SUPERSEDED) in run.facts
        with pytest.raises(LeaseLost, match="superseded"):
            check_lease(run.state, "a", old)

    def test_leaving_in_good_order_ends_the_round_and_not_the_run(self) -> None:
        """The others go on without it, and get the reason."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        run.leave("a", "SIGTERM")
        (ended,) = run.of_type(facts.RoundEnded)
        assert (ended.end.cause, ended.end.detail) == (RoundEndCause.NODE_LEFT, "node a left: SIGTERM")
        run.later(30)
        assert (run.phase, run.ranks) == (Phase.FROZEN, ["b"])


class TestDeparting:
    """A node announces that it will leave: the round ends at once, and the next waits until its workers are gone."""

    def test_the_round_ends_at_once(self) -> None:
        """The others need not find out by failing."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        run.depart("a", "SIGTERM")
        (ended,) = run.of_type(facts.RoundEnded)
        assert (run.phase, ended.end.cause, ended.end.node_id) == (
            Phase.JOINABLE,
            RoundEndCause.NODE_LEFT,
            "a",
        )

    def test_no_round_is_formed_before_it_has_gone(self) -> None:
        """Even if there is a spare: its old workers may still be alive."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        run.join("spare")
        run.depart("a")
        run.later(20)
        assert run.phase is Phase.JOINABLE
        run.leave("a")
        assert (run.phase, sorted(run.ranks)) == (Phase.FROZEN, ["b", "spare"])

    def test_it_is_dropped_after_the_confirm_timeout(self) -> None:
        """A node that hangs while it leaves delays the others no longer than that."""
        run = ScriptedRun(min_nodes=1, max_nodes=1, confirm_timeout=60.0)
        run.start("a")
        run.join("spare")
        run.depart("a")
        assert run.later(59.9) == []
        assert facts.NodeLost("a", LossReason.DEPARTURE_TIMED_OUT) in run.later(0.1)
        assert run.ranks == ["spare"]

    def test_it_does_not_count_as_present(self) -> None:
        """min_nodes are counted without it: no last call starts for a node that leaves."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.start("a", "b")
        run.depart("a")
        run.leave("a")
        assert run.state.last_call_deadline is None
        run.later(100)
        assert run.phase is Phase.JOINABLE

    def test_a_repeated_message_changes_nothing(self) -> None:
        """A node that repeats its message after a reconnect gets no more time by that."""
        run = ScriptedRun(min_nodes=1, max_nodes=1)
        run.start("a")
        run.depart("a")
        assert run.do(commands.Depart("a", run.lease("a"), "again")) == []

    def test_a_node_that_has_succeeded_ends_no_round_by_departing(self) -> None:
        """Its part is done: the others finish without it."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        run.succeed("a")
        run.depart("a")
        assert run.phase is Phase.FINAL
        run.leave("a")
        run.succeed("b")
        assert run.state.run_end is not None
        assert run.state.run_end.outcome is Outcome.SUCCEEDED


class TestScalingUp:
    """The effect of a newcomer on a round with room to spare."""

    def test_immediate_ends_the_round_for_a_newcomer(self) -> None:
        """As soon as it is ready, the round re-forms with the newcomer in, and with that reason."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, last_call_timeout=30.0)
        run.start("a")
        run.join("b")
        assert run.later(READY_AFTER - 0.1) == []
        run.later(0.1)
        (ended,) = run.of_type(facts.RoundEnded)
        assert (ended.end.cause, ended.end.detail) == (RoundEndCause.NODE_JOINED, "node b joined")
        assert (run.phase, run.ranks, run.state.restart_count) == (Phase.FROZEN, ["a", "b"], 0)

    def test_on_restart_lets_a_newcomer_wait(self) -> None:
        """Until the round ends for another reason; then it is in."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, scale_up_policy=ScaleUpPolicy.ON_RESTART, max_restarts=1)
        run.start("a")
        run.join("b")
        assert (run.phase, run.waiting) == (Phase.FINAL, ["b"])
        run.fail("a")
        assert run.ranks == ["a", "b"]

    def test_a_newcomer_while_the_round_is_frozen_is_let_in_after_it(self) -> None:
        """A round that is being confirmed is not disturbed; the newcomer is in the one right after it."""
        run = ScriptedRun(min_nodes=1, max_nodes=2, last_call_timeout=0.0)
        run.join("a")
        run.later(1)
        run.join("b")
        assert (run.phase, run.round, run.ranks) == (Phase.FROZEN, 1, ["a"])
        run.later(READY_AFTER)
        run.confirm("a")
        assert (run.phase, run.round, run.ranks) == (Phase.FROZEN, 2, ["a", "b"])

    def test_not_once_a_node_has_succeeded(self) -> None:
        """The run is about to end: a restart would take finished work back."""
        run = ScriptedRun(min_nodes=1, max_nodes=3)
        run.start("a", "b")
        run.succeed("a")
        run.join("c")
        assert run.phase is Phase.FINAL
        run.leave("a")
        run.join("d")
        assert run.phase is Phase.FINAL


class TestFailing:
    """Failed workers, and the budget of restarts."""

    def test_restarts_are_counted_per_run(self) -> None:
        """There is one count for the workers of all nodes, and all nodes see it."""
        run = ScriptedRun(min_nodes=1, max_nodes=2, max_restarts=3)
        run.start("a", "b")
        run.fail("a")
        run.run_round()
        run.fail("b")
        assert run.state.restart_count == 2
        assert [ended.restart_count for ended in run.of_type(facts.RoundEnded)] == [1, 2]

    def test_the_reason_names_rank_node_and_message(self) -> None:
        """The sentence for people names the failed worker and its error."""
        run = ScriptedRun(min_nodes=2, max_nodes=2, max_restarts=1)
        run.start("a", "b")
        run.fail("b", "CUDA out of memory")
        assert run.state.last_round_end is not None
        detail = run.state.last_round_end.detail
        assert detail == "worker of rank 1 on node b failed: CUDA out of memory"

    def test_no_restart_left_closes_the_run(self) -> None:
        """CLOSED/FAILED, with the failure that was reported first."""
        run = ScriptedRun(min_nodes=2, max_nodes=2, max_restarts=1)
        run.start("a", "b")
        run.fail("a", "first")
        run.run_round()
        run.fail("b", "second")
        run.later(SETTLE_WINDOW)
        end = run.state.run_end
        assert end is not None
        assert (run.phase, end.outcome) == (Phase.CLOSED, Outcome.FAILED)
        assert end.failure is not None
        assert (end.failure.message, end.failure.node_id, end.failure.round) == ("second", "b", 2)
        assert end.detail == "worker of rank 1 on node b failed: second; the only restart was used up"

    def test_without_a_budget_the_first_failure_closes_the_run(self) -> None:
        """max_restarts 0 allows none, and the sentence has that reason."""
        run = ScriptedRun()
        run.start("a")
        run.fail("a")
        assert run.state.run_end is not None
        assert run.state.run_end.detail.endswith("no restarts were allowed")

    def test_the_failures_that_follow_from_the_first_count_for_nothing(self) -> None:
        """When one worker fails, its peers fail because of it: one round ends once."""
        run = ScriptedRun(min_nodes=2, max_nodes=2, max_restarts=3)
        run.start("a", "b")
        run.fail("a")
        run.fail("b", round_=1)
        assert run.state.restart_count == 1

    def test_a_change_of_membership_is_no_restart(self) -> None:
        """Loss, leaving and joining cost nothing of the budget."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, max_restarts=0)
        run.start("a", "b")
        run.lose("b")
        run.run_round()
        run.let_in("c")
        run.run_round()
        run.leave("c")
        run.run_round()
        assert (run.phase, run.round, run.state.restart_count) == (Phase.FINAL, 4, 0)

    @pytest.mark.parametrize("round_", [0, 1, 7])
    def test_a_failure_in_another_round_is_not_taken(self, round_: int) -> None:
        """A report that arrives late ends nothing."""
        run = ScriptedRun(min_nodes=1, max_nodes=1, max_restarts=3)
        run.start("a")
        run.fail("a")
        run.run_round()
        assert run.round == 2
        run.fail("a", round_=round_)
        assert (run.phase, run.state.restart_count) == (Phase.FINAL, 1)


class TestSucceeding:
    """The end of a run that succeeds."""

    def test_the_success_of_all_closes_the_run(self) -> None:
        """CLOSED/SUCCEEDED once the last participant has reported success; that is the exit barrier."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.start("a", "b")
        run.succeed("b")
        assert run.phase is Phase.FINAL
        run.succeed("a")
        assert run.state.run_end is not None
        assert (run.phase, run.state.run_end.outcome) == (Phase.CLOSED, Outcome.SUCCEEDED)
        assert run.state.run_end.detail == "all 2 workers of round 1 succeeded"

    def test_a_repeated_message_changes_nothing(self) -> None:
        """A node that repeats its message after a reconnect counts once."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.start("a", "b")
        run.succeed("a")
        assert run.do(commands.ReportSuccess("a", run.lease("a"), 1)) == []
        assert run.phase is Phase.FINAL

    def test_a_node_lost_after_it_succeeded_ends_no_round(self) -> None:
        """It has done its part; the rest finish, and the run succeeds."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.start("a", "b")
        run.succeed("a")
        run.lose("a")
        assert run.of_type(facts.RoundEnded) == []
        run.succeed("b")
        assert run.phase is Phase.CLOSED

    def test_the_success_of_a_spare_does_not_count(self) -> None:
        """The success of a node without a seat is neither needed nor counted."""
        run = ScriptedRun(min_nodes=1, max_nodes=1)
        run.start("a")
        run.join("spare")
        run.succeed("spare")
        assert run.phase is Phase.FINAL

    def test_a_failure_takes_the_success_of_others_back(self) -> None:
        """In the next round all workers run again, and all must succeed again."""
        run = ScriptedRun(min_nodes=2, max_nodes=2, max_restarts=1)
        run.start("a", "b")
        run.succeed("a")
        run.fail("b")
        run.run_round()
        run.succeed("b")
        assert run.state.run_end is None
        run.succeed("a")
        assert run.phase is Phase.CLOSED


class TestClosed:
    """A run that is over stays over."""

    def test_an_operator_closes_a_run(self) -> None:
        """CLOSED/CANCELLED, in any phase, with the reason."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.join("a")
        run.do(commands.Close("wrong data"))
        assert run.state.run_end is not None
        assert (run.phase, run.state.run_end.outcome) == (Phase.CLOSED, Outcome.CANCELLED)
        assert run.state.run_end.detail == "closed by an operator: wrong data"

    def test_a_closed_run_refuses_every_command(self) -> None:
        """The refusal has the outcome, and the advice to use another run id."""
        run = ScriptedRun(reopen=Reopen.NEVER)
        lease = run.join("a")
        run.do(commands.Close("enough"))
        for command in (
            commands.Join("b", run.settings, "b.cluster", 1, "trainer"),
            commands.Confirm("a", lease, 1, 1),
            commands.ReportSuccess("a", lease, 1),
            commands.Depart("a", lease, "bye"),
            commands.Leave("b", lease, "bye"),
        ):
            with pytest.raises(RunIsClosed, match=r"closed \(CANCELLED: .*another run id"):
                run.do(command)
        with pytest.raises(RunIsClosed):
            check_lease(run.state, "a", lease)

    def test_closing_it_again_changes_nothing(self) -> None:
        """The first end counts."""
        run = ScriptedRun()
        run.start("a")
        run.succeed("a")
        assert run.do(commands.Close("too late")) == []
        assert run.state.run_end is not None
        assert run.state.run_end.outcome is Outcome.SUCCEEDED

    def test_nothing_happens_to_it_any_more(self) -> None:
        """No lease, no deadline, no consequence."""
        run = ScriptedRun(min_nodes=1, max_nodes=3)
        run.start("a", "b")
        run.join("c")
        run.do(commands.Close("enough"))
        assert run.later(100_000) == []
        assert run.state.nodes == {}


class TestRefusing:
    """Every write carries a lease, and any write with a stale one is refused."""

    @pytest.mark.parametrize("how", ["never held", "superseded", "left", "expired"])
    def test_a_stale_lease_is_refused(self, how: str) -> None:
        """And the state stays as it was."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, scale_up_policy=ScaleUpPolicy.ON_RESTART)
        run.start("a", "b")
        lease = run.lease("a")
        match how:
            case "never held":
                lease = 999
            case "superseded":
                run.join("a")
            case "left":
                run.leave("a")
            case "expired":
                run.later(15, silent=("a",))
        revision = run.state.revision
        for command in (
            commands.Confirm("a", lease, run.round, 1),
            commands.ReportFailure("a", lease, run.failure("a")),
            commands.ReportSuccess("a", lease, run.round),
            commands.Depart("a", lease, "bye"),
            commands.Leave("a", lease, "bye"),
        ):
            with pytest.raises(LeaseLost):
                run.do(command)
        assert run.state.revision == revision

    def test_the_refusal_explains_the_loss_of_the_lease(self) -> None:
        """It shows whether another agent is the reason."""
        assert str(LeaseLost("r", "n", 3, 7)) == (
            "node 'n' no longer holds lease 3 in run 'r': lease 7 superseded it"
        )
        assert str(LeaseLost("r", "n", 3, None)).endswith(": it expired, or was given back")

    def test_a_cursor_from_the_future_is_refused(self) -> None:
        """The client saw another run, or another journal."""
        state = RunState("run", revision=5)
        check_revision(state, 5)
        with pytest.raises(RevisionAhead, match="revision 6 of run 'run' was never given out; it is at 5"):
            check_revision(state, 6)

    def test_a_value_that_is_no_command_is_a_bug(self) -> None:
        """It is not ignored."""
        with pytest.raises(TypeError, match="not a command"):
            decide(RunState("run", revision=1), "join", 1.0)  # type: ignore[arg-type]
