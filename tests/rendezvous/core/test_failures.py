"""The first failure of a round, over all nodes, and its consequences for the run."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.core import commands, facts, failures
from rallypoint.rendezvous.core.apply import renew, restart_leases
from rallypoint.rendezvous.core.commands import NodeIsEvicted
from rallypoint.rendezvous.core.decide import execute, next_deadline, settle
from rallypoint.rendezvous.core.failures import MOST_FAILURES, SETTLE_WINDOW
from rallypoint.rendezvous.core.snapshot import restore, take_snapshot
from rallypoint.rendezvous.core.state import LossReason, Outcome, Phase, RoundEndCause, RunEnd, ScaleUpPolicy
from rendezvous.core.scripted_run import ScriptedRun


def running(*node_ids: str, workers: int = 1, **settings: object) -> ScriptedRun:
    """Return a run whose round of these nodes has run for an hour."""
    run = ScriptedRun(min_nodes=1, max_nodes=len(node_ids), **settings)
    run.join(*node_ids, workers=workers)
    run.run_round()
    run.later(3600)
    return run


def end_of(run: ScriptedRun) -> RunEnd:
    assert run.state.run_end is not None, "the run has not ended"
    return run.state.run_end


def first_of(run: ScriptedRun) -> str:
    """Return the node whose failure ended the run."""
    failure = end_of(run).failure
    assert failure is not None
    return failure.node_id


class TestTheEndOfARun:
    def test_it_names_the_earliest_failure_in_any_order_of_reports(self) -> None:
        """Reports come in any order; the age of each gives its time, by the server's clock."""
        run = running("a", "b", "c")
        run.fail("b", "connection reset", age=0.01)
        assert run.phase is Phase.FINAL
        run.later(0.1)
        run.fail("a", "CUDA error", age=0.3)
        run.later(SETTLE_WINDOW)
        end = end_of(run)
        assert (end.outcome, first_of(run)) == (Outcome.FAILED, "a")
        assert end.detail == "worker of rank 0 on node a failed: CUDA error; no restarts were allowed"

    def test_an_older_report_that_is_younger_is_not_the_first(self) -> None:
        """A later report of a later failure changes nothing but the event log."""
        run = running("a", "b", "c")
        run.fail("b", age=0.2)
        run.later(0.1)
        run.fail("a", age=0.1)
        run.later(SETTLE_WINDOW)
        assert first_of(run) == "b"
        assert [fact.earliest for fact in run.of_type(facts.WorkerFailed)] == [True, False]

    def test_several_workers_of_one_node_may_fail(self) -> None:
        """The earliest of them counts, each is known once, and an unknown rank counts as one of the node's workers."""
        run = running("a", "b", workers=2)
        run.fail("a", "second", local_rank=1, age=0.1)
        run.fail("a", "first", local_rank=0, age=0.4)
        assert run.fail("a", "again", local_rank=0, age=0.5) == []
        assert run.fail("a", "no such worker", local_rank=7) == []
        assert run.phase is Phase.FINAL
        run.later(SETTLE_WINDOW)
        failure = end_of(run).failure
        assert failure is not None
        assert (failure.node_id, failure.message) == ("a", "first")

    def test_it_waits_for_half_a_second_and_no_longer(self) -> None:
        """A node that shows that it is alive, and reports nothing, does not keep the run from ending."""
        run = running("a", "b")
        run.fail("a")
        run.resume("b")
        deadline = next_deadline(run.state)
        assert deadline == run.now + SETTLE_WINDOW
        assert settle(run.state, deadline - 0.01) == []
        (closed,) = settle(run.state, deadline)
        assert isinstance(closed, facts.RunClosed)

    def test_one_participant_waits_for_no_other(self) -> None:
        """There is no other whose failure could have been the first."""
        run = running("a")
        run.join("spare")
        run.fail("a")
        assert run.phase is Phase.CLOSED

    @pytest.mark.parametrize("how", ["departs", "has succeeded", "leaves", "is evicted"])
    def test_it_waits_only_for_nodes_that_may_still_report(self, how: str) -> None:
        """Once all others have gone or succeeded, none is waited for."""
        run = running("a", "b")
        if how == "has succeeded":
            run.succeed("b")
        run.fail("a")
        match how:
            case "departs":
                run.depart("b")
            case "leaves":
                run.leave("b")
            case "is evicted":
                run.evict("b")
        assert run.phase is Phase.CLOSED
        assert first_of(run) == "a"

    def test_a_lost_participant_that_comes_back_has_no_seat(self) -> None:
        """A node that joins under its name during the settle window is a new one: the one before is lost."""
        run = running("a", "b", "c")
        run.fail("a")
        happened = run.do(commands.Join("b", run.settings, "b.cluster", 1, "trainer"))
        assert [type(fact) for fact in happened[:3]] == [facts.NodeLost, facts.NodeJoined, facts.RoundEnded]
        assert run.of_type(facts.RoundEnded)[0].end.cause is RoundEndCause.NODE_LOST

    def test_an_operators_restart_comes_too_late(self) -> None:
        """The run is about to end: it is not restarted against its budget."""
        run = running("a", "b")
        run.fail("a")
        assert run.restart() == []
        run.later(SETTLE_WINDOW)
        assert run.phase is Phase.CLOSED

    def test_an_operator_may_close_it_meanwhile(self) -> None:
        """Then the close is the end, and the settle window is over."""
        run = running("a", "b")
        run.fail("a")
        run.do(commands.Close("enough"))
        assert (end_of(run).outcome, run.state.settle_deadline) == (Outcome.CANCELLED, None)
        assert run.later(SETTLE_WINDOW) == []

    def test_a_newcomer_changes_nothing_meanwhile(self) -> None:
        """Also if the round has room for it: it would join a run that is over."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, last_call_timeout=1.0)
        run.start("a", "b")
        run.fail("a")
        run.join("c")
        assert run.phase is Phase.FINAL
        run.later(SETTLE_WINDOW)
        assert first_of(run) == "a"

    def test_many_failures_are_not_all_kept(self) -> None:
        """When one worker of thousands fails, all may follow: the first is found, and the journal stays short."""
        names = [f"n{number:02}" for number in range(MOST_FAILURES + 10)]
        run = running(*names)
        for number, name in enumerate(names):
            run.fail(name, age=0.4 if number == len(names) - 1 else 0.1)
        assert len(run.of_type(facts.WorkerFailed)) == MOST_FAILURES + 1
        assert run.phase is Phase.FINAL  # some received failures are not kept: the round waits its full time
        run.later(SETTLE_WINDOW)
        assert first_of(run) == names[-1]


class TestARestart:
    def test_it_is_decided_at_once(self) -> None:
        """It waits for no other reports: the workers are down all the while."""
        run = running("a", "b", max_restarts=1)
        happened = run.fail("a")
        assert [type(fact) for fact in happened] == [facts.WorkerFailed, facts.RoundEnded, facts.RoundFrozen]

    def test_an_earlier_failure_that_is_reported_late_is_named_from_then_on(self) -> None:
        """Nodes have the old cause already; reads, the event log and the budgets of nodes get the right one."""
        run = running("a", "b", max_restarts=3, max_restarts_per_node=2)
        run.fail("b", "connection reset")
        assert run.state.last_round_end is not None
        assert run.state.last_round_end.node_id == "b"
        (late,) = run.fail("a", "CUDA error", round_=1, age=0.5)
        assert late == facts.WorkerFailed(late.failure, earliest=True)  # type: ignore[union-attr]
        assert run.state.last_round_end.node_id == "a"
        assert run.state.last_round_end.detail.endswith("CUDA error")
        assert [restart.node_id for restart in run.state.restarts] == ["a"]
        assert run.phase is Phase.FROZEN

    def test_late_reports_count_until_the_next_round_runs(self) -> None:
        """Then they belong to a round that is over."""
        run = running("a", "b", max_restarts=3)
        run.fail("b")
        run.confirm("a", "b")
        assert run.fail("a", round_=1, age=0.5) == []

    def test_late_reports_of_a_round_that_no_failure_ended_are_ignored(self) -> None:
        """Workers that die because a node was lost give no new information."""
        run = running("a", "b", max_restarts=3)
        run.lose("b")
        assert run.fail("a", round_=1, age=5.0) == []

    def test_a_node_that_joined_again_can_not_report_for_the_round_before(self) -> None:
        """It was not in it, under any name."""
        run = running("a", "b", "c", max_restarts=3)
        run.fail("b")
        run.join("a")
        assert run.fail("a", round_=1, age=0.5) == []


class TestAges:
    @pytest.mark.parametrize("age", [3600.0, 1e9])
    def test_no_failure_is_older_than_its_round(self, age: float) -> None:
        """An absurd age counts from the start of the round: it is before all others, but for one as old."""
        run = running("a", "b", "c")
        run.fail("b", age=age)
        run.fail("a", age=1e12)
        run.later(SETTLE_WINDOW)
        assert first_of(run) == "b"

    def test_no_failure_is_yet_to_come(self) -> None:
        """A negative age counts as 0."""
        run = running("a", "b", "c")
        run.fail("b", age=-50.0)
        run.later(0.1)
        run.fail("a", age=0.05)
        run.later(SETTLE_WINDOW)
        assert first_of(run) == "b"

    def test_a_failure_that_was_durable_before_the_server_started_again_stays_the_first(self) -> None:
        """Its time by the server's clock is lost: a new report may be as old as the time that the server was away."""
        run = running("a", "b", "c")
        run.fail("b", age=0.1)
        restart_leases(run.state, run.now)
        run.resume("a", "b", "c")
        run.fail("a", age=30.0)
        run.later(SETTLE_WINDOW)
        assert first_of(run) == "b"


def test_a_round_that_is_about_to_end_waits_for_nothing_else() -> None:
    """A newcomer that waits, and an exit barrier that is over, must not wake the server all the time
    (seed 7000985)."""
    delayed = {"scale_up_policy": ScaleUpPolicy.DELAYED, "scale_up_delay": 0.1, "exit_barrier_timeout": 0.1}
    run = ScriptedRun(min_nodes=2, max_nodes=4, **delayed)
    run.start("a", "b", "c")
    run.succeed("c")
    run.fail("b")
    run.join("d")
    run.later(0.2)
    deadline = next_deadline(run.state)
    assert run.phase is Phase.FINAL
    assert deadline is not None
    assert deadline > run.now


def test_ages_are_those_of_a_clock_that_forgives_no_pause() -> None:
    """A failure during a pause came after the one before it, although the clock of leases has not moved."""
    run = running("a", "b", "c")
    run.fail("a")
    run.state.forgiven = 20.0
    run.fail("b", age=5.0)
    run.later(SETTLE_WINDOW)
    assert first_of(run) == "a"


class TestAPermanentFailure:
    def test_it_ends_the_run_with_any_budget(self) -> None:
        """After the settle window, and the sentence has the reason."""
        run = running("a", "b", max_restarts=10)
        run.fail("a", "no such data set", permanent=True)
        assert run.phase is Phase.FINAL
        run.later(SETTLE_WINDOW)
        end = end_of(run)
        assert end.outcome is Outcome.FAILED
        assert end.failure is not None
        assert end.failure.permanent
        expected = (
            "worker of rank 0 on node a failed: no such data set; reported as permanent, so not restarted"
        )
        assert end.detail == expected

    def test_it_is_named_even_if_others_failed_before(self) -> None:
        """The run ends because of it, not of an earlier failure that a restart might have repaired."""
        run = running("a", "b", "c")
        run.fail("b", age=0.2)
        run.fail("a", permanent=True)
        run.later(SETTLE_WINDOW)
        assert first_of(run) == "a"

    def test_it_ends_a_round_that_is_being_formed_again(self) -> None:
        """Another failure came first, and a restart was announced: it is taken back."""
        run = running("a", "b", max_restarts=10)
        run.fail("b")
        assert run.phase is Phase.FROZEN
        happened = run.fail("a", round_=1, permanent=True)
        assert [type(fact) for fact in happened] == [facts.WorkerFailed, facts.RunClosed]
        assert first_of(run) == "a"


class TestANodeThatFailsTooOften:
    def test_it_is_taken_out_and_the_others_go_on(self) -> None:
        """By the service itself, with the reason; that does not use the run's budget."""
        run = running("a", "b", "c", max_restarts=9, max_restarts_per_node=2, last_call_timeout=1.0)
        for _ in range(2):
            run.fail("b")
            run.run_round()
        happened = [*run.fail("b", "bad memory"), *run.later(SETTLE_WINDOW), *run.later(1.0)]
        failed, evicted, ended, frozen = happened
        assert isinstance(failed, facts.WorkerFailed)
        assert evicted == facts.NodeEvicted(
            "b", "its workers failed 3 times, last that of rank 1: bad memory", 3, by_service=True
        )
        assert isinstance(ended, facts.RoundEnded)
        assert (ended.end.cause, ended.end.node_id) == (RoundEndCause.NODE_EVICTED, "b")
        assert (ended.restart_count, ended.counted_restarts) == (2, 2)
        assert isinstance(frozen, facts.RoundFrozen)
        assert run.ranks == ["a", "c"]

    def test_a_spare_takes_its_place(self) -> None:
        """At once, without a last call."""
        run = running("a", "b", max_restarts=9, max_restarts_per_node=1)
        run.join("spare")
        run.fail("b")
        run.run_round()
        run.fail("b")
        run.later(SETTLE_WINDOW)
        assert run.ranks == ["a", "spare"]

    def test_it_is_taken_out_when_the_budget_of_the_run_is_used_up_too(self) -> None:
        """The others have not failed."""
        run = running("a", "b", "c", max_restarts=2, max_restarts_per_node=2, last_call_timeout=1.0)
        for _ in range(2):
            run.fail("b")
            run.run_round()
        run.fail("b")
        run.later(SETTLE_WINDOW)
        run.later(1.0)
        assert run.phase is Phase.FROZEN
        assert run.ranks == ["a", "c"]

    def test_without_enough_nodes_the_others_wait_for_another(self) -> None:
        """For the join timeout, with the reason; the removed node does not count."""
        settings = {"max_restarts": 9, "max_restarts_per_node": 1, "join_timeout": 600.0}
        run = ScriptedRun(min_nodes=2, max_nodes=2, **settings)
        run.start("a", "b")
        run.fail("b")
        run.run_round()
        run.fail("b", "bad memory")
        run.later(SETTLE_WINDOW)
        end = run.state.last_round_end
        assert end is not None
        assert (run.phase, end.cause) == (Phase.JOINABLE, RoundEndCause.NODE_EVICTED)
        assert (
            end.detail == "node b was taken out: its workers failed 2 times, last that of rank 1: bad memory"
        )
        with pytest.raises(NodeIsEvicted):
            run.join("b")
        run.later(599.0)
        assert run.waiting == ["a"]
        run.join("c")
        assert (run.phase, run.ranks) == (Phase.FROZEN, ["a", "c"])
        run.lose("c")
        run.later(600.0)
        assert run.of_type(facts.NodeLost)[-1] == facts.NodeLost("a", LossReason.JOIN_TIMED_OUT)

    def test_the_last_node_may_be_taken_out_too(self) -> None:
        """Then the run has no node, is not over, and goes on with the next that joins."""
        run = running("a", max_restarts=9, max_restarts_per_node=1)
        run.fail("a")
        run.run_round()
        run.fail("a")
        assert (run.phase, run.state.nodes) == (Phase.JOINABLE, {})
        assert run.later(3600) == []
        run.join("b")
        assert run.ranks == ["b"]

    def test_the_node_that_failed_first_is_blamed(self) -> None:
        """Its removal has the settle window of the end of a run: failures caused by another's must not count."""
        run = running("a", "b", "c", max_restarts=9, max_restarts_per_node=1)
        run.fail("b")
        run.run_round()
        run.later(10)
        run.fail("b", age=0.1)
        happened = run.fail("a", age=0.4)
        assert isinstance(happened[1], facts.RoundEnded)
        assert happened[1].end.node_id == "a"
        assert not run.state.evicted

    def test_once_readmitted_it_has_its_whole_budget_again(self) -> None:
        """An operator has checked it: its node's budget is whole again, the run's is not."""
        run = running("a", "b", max_restarts=9, max_restarts_per_node=1, last_call_timeout=1.0)
        run.fail("b")
        run.run_round()
        run.fail("b")
        run.later(SETTLE_WINDOW)
        run.run_round()
        run.readmit("b")
        run.let_in("b")
        run.run_round()
        run.fail("b")
        assert run.state.restart_count == 2
        assert not run.state.evicted

    def test_a_run_that_can_evict_no_more_nodes_counts_it_as_a_restart(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The list of evicted nodes is bounded."""
        monkeypatch.setattr(failures, "MOST_EVICTED", 1)
        run = running("a", "b", max_restarts=9, max_restarts_per_node=1)
        run.evict("x")
        run.fail("b")
        run.run_round()
        run.fail("b")
        assert run.state.restart_count == 2

    def test_one_that_has_gone_meanwhile_is_refused_all_the_same(self) -> None:
        """It left while its failure settled, and must not come back to fail again."""
        run = running("a", "b", "c", max_restarts=9, max_restarts_per_node=1)
        run.fail("b")
        run.run_round()
        run.fail("b")
        run.leave("b")
        run.later(SETTLE_WINDOW)
        assert run.state.evicted["b"].by_service
        assert run.of_type(facts.NodeEvicted)[-1].lease == 0


def test_a_restarted_server_lets_the_end_settle_again() -> None:
    """Nodes repeat their reports on new streams: a server that was away has received none of them."""
    run = running("a", "b")
    run.fail("a")
    state = restore(take_snapshot(run.state), 5000.0)
    restart_leases(state, 5000.0)
    assert settle(state, 5000.0) == []
    failure = run.failure("a")
    assert execute(state, commands.ReportFailure("a", run.lease("a"), failure), 5000.1) == []
    assert next_deadline(state) == 5000.0 + SETTLE_WINDOW
    for node_id in ("a", "b"):
        renew(state, node_id, 5000.2)
    (closed,) = settle(state, 5000.0 + SETTLE_WINDOW)
    assert isinstance(closed, facts.RunClosed)
