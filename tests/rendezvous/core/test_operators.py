"""The actions of operators on a run: restart it, evict a node, readmit it."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.core import commands, decide, facts
from rallypoint.rendezvous.core.commands import (
    LeaseLost,
    NodeIsEvicted,
    RoundOver,
    RunIsClosed,
    TooManyEvicted,
)
from rallypoint.rendezvous.core.decide import check_lease
from rallypoint.rendezvous.core.state import Eviction, Phase, RoundEndCause, ScaleUpPolicy
from rallypoint.rendezvous.runs.run import run_message
from rendezvous.core.scripted_run import ScriptedRun


class TestRestarting:
    """RestartRun."""

    def test_the_same_nodes_start_again_at_once(self) -> None:
        """No last call, the same ranks, and no restart of the budget is used up."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, last_call_timeout=30.0)
        run.start("a", "b")
        happened = run.restart("new data")
        assert [type(fact) for fact in happened] == [
            facts.RestartRequested,
            facts.RoundEnded,
            facts.RoundFrozen,
        ]
        assert (run.phase, run.round, run.ranks) == (Phase.FROZEN, 2, ["a", "b"])
        assert run.state.restart_count == 0
        end = run.state.last_round_end
        assert end is not None
        assert (end.cause, end.node_id, end.detail) == (
            RoundEndCause.RESTART_REQUESTED,
            "",
            "an operator requested a restart: new data",
        )

    def test_newcomers_that_were_held_back_are_let_in(self) -> None:
        """Both delays end, the run's and the node's own: its host may be repaired."""
        run = ScriptedRun(min_nodes=1, max_nodes=3)
        run.start("a")
        for _ in range(2):
            run.let_in("b")
            run.run_round()
            run.lose("b")
            run.run_round()
        run.let_in("b")
        assert run.ranks == ["a"]
        run.restart("the host of b is repaired")
        assert run.ranks == ["a", "b"]

    def test_a_round_that_is_being_confirmed_is_burnt(self) -> None:
        """And all confirm the next, also those that had confirmed this one."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.join("a", "b")
        run.confirm("a")
        run.restart()
        assert (run.phase, run.round, run.state.unconfirmed) == (Phase.FROZEN, 2, {"a", "b"})

    def test_a_repeated_request_with_its_round_restarts_once(self) -> None:
        """The reply to the first may have been lost."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        request = commands.Restart("new data", round=run.round)
        assert type(run.do(request)[0]) is facts.RestartRequested
        with pytest.raises(RoundOver) as refused:
            run.do(request)
        assert (refused.value.round, refused.value.current_round) == (1, 2)
        assert (run.phase, run.round) == (Phase.FROZEN, 2)

    def test_a_run_without_a_round_stays_as_it_is(self) -> None:
        """There is nothing to restart, also once it is closed."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.join("a")
        assert run.restart() == []
        run.do(commands.Close("enough"))
        assert run.restart() == []

    def test_succeeded_work_is_done_again(self) -> None:
        """All workers start again, and the exit barrier with them."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.start("a", "b")
        run.succeed("a")
        run.restart()
        run.run_round()
        assert (run.ranks, run.state.succeeded, run.state.exit_barrier_deadline) == (["a", "b"], set(), None)

    def test_waiting_nodes_are_let_in_by_it(self) -> None:
        """The round ends anyway, so it re-forms as large as possible."""
        run = ScriptedRun(min_nodes=1, max_nodes=2, scale_up_policy=ScaleUpPolicy.ON_RESTART)
        run.start("a")
        run.join("b")
        run.restart()
        assert run.ranks == ["a", "b"]


class TestEvicting:
    """EvictNode."""

    def test_the_round_re_forms_without_the_node(self) -> None:
        """A spare takes its place at once; the end of the round has the reason."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.start("a", "b")
        run.join("spare")
        lease = run.lease("a")
        run.evict("a", reason="bad memory")
        assert facts.NodeEvicted("a", "bad memory", lease) in run.facts
        assert (run.phase, sorted(run.ranks)) == (Phase.FROZEN, ["b", "spare"])
        end = run.state.last_round_end
        assert end is not None
        assert (end.cause, end.node_id, end.detail) == (
            RoundEndCause.NODE_EVICTED,
            "a",
            "node a was taken out by an operator: bad memory",
        )

    def test_without_a_spare_there_is_a_last_call(self) -> None:
        """As after any loss: another node may come."""
        run = ScriptedRun(min_nodes=1, max_nodes=2, last_call_timeout=30.0)
        run.start("a", "b")
        run.evict("a")
        assert run.phase is Phase.JOINABLE
        run.later(30)
        assert (run.phase, run.ranks) == (Phase.FROZEN, ["b"])

    def test_a_round_that_is_being_confirmed_waits_for_it_no_longer(self) -> None:
        """Its number is used up, and the next has the others."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, last_call_timeout=0.0)
        run.join("a", "b", "c")
        run.confirm("b", "c")
        run.evict("a")
        assert (run.phase, run.round, sorted(run.ranks)) == (Phase.FROZEN, 2, ["b", "c"])

    def test_while_nodes_gather_it_counts_no_longer(self) -> None:
        """Below min_nodes the last call is off."""
        run = ScriptedRun(min_nodes=2, max_nodes=3)
        run.join("a", "b")
        run.evict("b")
        assert run.state.last_call_deadline is None
        assert run.later(60) == []

    def test_a_departing_node_delays_no_round_once_it_is_evicted(self) -> None:
        """The operator knows the state of its workers."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        run.join("spare")
        run.depart("a")
        assert run.phase is Phase.JOINABLE
        run.evict("a")
        assert (run.phase, run.state.departing) == (Phase.FROZEN, {})

    def test_a_node_that_has_succeeded_ends_no_round_by_it(self) -> None:
        """Its part is done."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.start("a", "b")
        run.succeed("a")
        run.evict("a")
        assert (run.phase, run.ranks) == (Phase.FINAL, ["b"])

    def test_a_name_with_a_star_refuses_those_that_come(self) -> None:
        """And removes no present node; all nodes of a host have such a name, with different ends."""
        run = ScriptedRun(min_nodes=1, max_nodes=3)
        run.start("host_1", "other")
        run.evict("host_*", reason="bad memory")
        assert (run.phase, sorted(run.ranks)) == (Phase.FINAL, ["host_1", "other"])
        with pytest.raises(NodeIsEvicted, match=r"host_2.*bad memory"):
            run.join("host_2")
        run.join("host", "host-2")
        run.readmit("host_*")
        run.join("host_2")
        assert set(run.state.nodes) == {"host_1", "other", "host", "host-2", "host_2"}

    def test_its_commands_are_refused_and_it_can_not_join(self) -> None:
        """The refusal names the operator and the reason, not a lost lease: it must not try again."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        lease = run.lease("a")
        run.evict("a", reason="bad memory")
        said: list[commands.Command] = [
            commands.Confirm("a", lease, 1, 1),
            commands.ReportSuccess("a", lease, 1),
            commands.ReportFailure("a", lease, run.failure("a", round_=1)),
            commands.Depart("a", lease, "bye"),
            commands.Leave("a", lease, "bye"),
            commands.Join("a", run.settings, "a.cluster", 1, "trainer"),
        ]
        for command in said:
            with pytest.raises(NodeIsEvicted, match="by an operator \\(bad memory\\)"):
                run.do(command)
        with pytest.raises(NodeIsEvicted):
            check_lease(run.state, "a", lease)

    def test_a_node_that_is_not_there_can_be_barred(self) -> None:
        """Before it comes: that disturbs no node, and the fact has lease 0."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        run.evict("c")
        assert run.facts[-1] == facts.NodeEvicted("c", "bad memory", 0)
        assert run.phase is Phase.FINAL
        with pytest.raises(NodeIsEvicted):
            run.join("c")

    def test_a_node_that_has_joined_again_since_is_not_meant(self) -> None:
        """It holds another lease; with its present lease, the request is carried out."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        former = run.state.nodes["a"].lease
        run.lose("a")
        for present in (None, "a"):
            if present:
                run.join(present)
            with pytest.raises(LeaseLost):
                run.do(commands.Evict("a", "old news", former))
            assert run.state.evicted == {}
        run.do(commands.Evict("a", "bad memory", run.state.nodes["a"].lease))
        assert run.state.evicted == {"a": Eviction("bad memory")}

    def test_twice_changes_nothing(self) -> None:
        """The first reason stands."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        run.evict("a", reason="bad memory")
        assert run.do(commands.Evict("a", "again")) == []
        assert run.state.evicted == {"a": Eviction("bad memory")}

    def test_the_number_of_evicted_nodes_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One more is refused, and disturbs no node; evicting one of them again is not one more."""
        monkeypatch.setattr(decide, "MOST_EVICTED", 2)
        run = ScriptedRun(min_nodes=1, max_nodes=4)
        run.start("a", "b", "c", "d")
        run.evict("x", "y")
        with pytest.raises(TooManyEvicted, match="refuses 2 nodes already; readmit some of them first"):
            run.evict("a")
        assert run.phase is Phase.FINAL
        assert run.do(commands.Evict("x", "again")) == []
        run.readmit("x")
        run.evict("a")
        assert "a" not in run.state.nodes

    def test_evicted_nodes_are_listed(self) -> None:
        """By name, in order."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        run.evict("c", "b")
        assert list(run_message(run.state).evicted_node_ids) == ["b", "c"]

    def test_a_closed_run_has_no_node_to_evict(self) -> None:
        """And the refusal has its outcome."""
        run = ScriptedRun()
        run.start("a")
        run.do(commands.Close("enough"))
        with pytest.raises(RunIsClosed):
            run.evict("a")
        assert run.readmit("a") == []


class TestReadmitting:
    """ReadmitNode."""

    def test_the_node_may_join_again_as_a_newcomer(self) -> None:
        """Under a new lease; the old one stays invalid."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        old = run.lease("a")
        run.evict("a")
        assert run.readmit("a") == [facts.NodeReadmitted("a", "mended")]
        assert run.join("a") > old
        assert sorted(run.ranks) == ["a", "b"]

    def test_readmitting_alone_brings_no_node_back(self) -> None:
        """The node has to join by itself."""
        run = ScriptedRun(min_nodes=2, max_nodes=2)
        run.start("a", "b")
        run.evict("a")
        run.readmit("a")
        assert list(run.state.nodes) == ["b"]
        assert run.phase is Phase.JOINABLE

    def test_a_node_that_may_join_anyway_is_not_readmitted(self) -> None:
        """Nothing changes."""
        run = ScriptedRun(min_nodes=1, max_nodes=2)
        run.start("a", "b")
        assert run.readmit("a") == []
        assert run.readmit("nobody") == []
