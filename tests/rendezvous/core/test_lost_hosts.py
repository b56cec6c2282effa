"""A lost host costs no restart and no other node's budget, although its peers' workers fail before the loss is known.

Workers see a connection reset within milliseconds of their peer's end; the service knows of the loss after the
disconnect grace (2 s), or after a lease (15 s) if no connection was closed.
"""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.core import apply as leases
from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.apply import apply
from rallypoint.rendezvous.core.decide import next_deadline, settle
from rallypoint.rendezvous.core.failures import SETTLE_WINDOW
from rallypoint.rendezvous.core.snapshot import restore, take_snapshot
from rallypoint.rendezvous.core.state import LossReason, Outcome, Phase, RoundEndCause, RunState
from rendezvous.core.scripted_run import ScriptedRun


def running(*node_ids: str, **settings: object) -> ScriptedRun:
    """Return a run of these nodes whose round has run for an hour; it needs all but one of them."""
    run = ScriptedRun(min_nodes=len(node_ids) - 1, max_nodes=len(node_ids), **settings)
    run.start(*node_ids)
    run.later(3600)
    return run


def break_stream(run: ScriptedRun, node_id: str) -> None:
    leases.disconnect(run.state, node_id, run.now)
    run.facts += settle(run.state, run.now)


def pass_grace(run: ScriptedRun, *silent: str) -> None:
    run.later(run.settings.disconnect_grace, silent=silent)


def require_lost(run: ScriptedRun, node_id: str, *, rounds: int = 1) -> None:
    """Check that the round ended by the loss of that node, which cost nothing."""
    end = run.state.last_round_end
    assert end is not None
    assert (end.round, end.cause, end.node_id) == (rounds, RoundEndCause.NODE_LOST, node_id)
    assert (run.state.restart_count, run.state.restarts, run.state.evicted) == (0, [], {})
    assert run.state.quick_restarts == 0
    assert all(fact.end.outcome is not Outcome.FAILED for fact in run.of_type(facts.RunClosed))


@pytest.mark.parametrize("budget", [0, 3])
class TestAKilledAgent:
    """Its stream breaks at once."""

    def test_failures_that_follow_are_its_loss(self, budget: int) -> None:
        """They are held until the grace is over; then the round ends as NODE_LOST."""
        run = running("a", "b", "c", max_restarts=budget)
        break_stream(run, "c")
        run.fail("a", "connection reset")
        run.fail("b", "connection reset")
        assert run.phase is Phase.FINAL
        pass_grace(run)
        require_lost(run, "c")
        assert [type(fact) for fact in run.facts if isinstance(fact, facts.RoundEnded)] == [facts.RoundEnded]
        run.run_round()
        assert (run.round, run.ranks) == (2, ["a", "b"])

    def test_a_report_may_come_before_the_stream_breaks(self, budget: int) -> None:
        """By up to the settle window."""
        run = running("a", "b", "c", max_restarts=budget)
        run.fail("a", "connection reset")
        run.later(SETTLE_WINDOW - 0.01)
        break_stream(run, "c")
        pass_grace(run)
        require_lost(run, "c", rounds=run.round if budget else 1)

    def test_its_own_workers_may_be_reported_before_it_goes(self, budget: int) -> None:
        """A host's processes are killed in any order."""
        run = running("a", "b", "c", max_restarts=budget)
        run.fail("c", "killed by SIGKILL")
        break_stream(run, "c")
        pass_grace(run)
        require_lost(run, "c", rounds=run.round if budget else 1)

    def test_all_may_have_reported_before_it_goes(self, budget: int) -> None:
        """A decision that can't be taken back still waits for the settle window."""
        run = running("a", "b", "c", max_restarts=budget)
        for node_id in ("c", "a", "b"):
            run.fail(node_id, round_=1)
            run.later(0.01)
        break_stream(run, "c")
        pass_grace(run)
        require_lost(run, "c", rounds=run.round if budget else 1)

    def test_an_agent_that_starts_again_is_another_one(self, budget: int) -> None:
        """It joins under the name of the one that was killed: its peers failed because of that one."""
        run = running("a", "b", "c", max_restarts=budget)
        break_stream(run, "c")
        run.fail("a", "connection reset")
        run.join("c")
        require_lost(run, "c")
        assert (run.phase, sorted(run.ranks)) == (Phase.FROZEN, ["a", "b", "c"])


def test_a_departing_node_whose_stream_breaks_is_the_cause() -> None:
    """A server that was paused may read the failure of its peers before it reads that the node departs."""
    run = running("a", "b", "c", max_restarts=3)
    break_stream(run, "c")
    run.fail("a", "connection reset")
    run.depart("c")
    assert run.phase is Phase.FINAL
    pass_grace(run)
    require_lost(run, "c")


def test_a_node_that_comes_back_was_not_the_cause() -> None:
    """The failure counts as soon as the stream is open again."""
    run = running("a", "b", "c", max_restarts=3)
    break_stream(run, "c")
    assert run.fail("a")[1:] == []
    ended, frozen = run.resume("c")
    assert isinstance(ended, facts.RoundEnded)
    assert (ended.end.cause, ended.end.node_id, ended.restart_count) == (RoundEndCause.WORKER_FAILED, "a", 1)
    assert isinstance(frozen, facts.RoundFrozen)


def test_a_run_without_restarts_ends_once_the_node_is_back() -> None:
    """The failure is no longer held; but others have their moment to report."""
    run = running("a", "b", "c", max_restarts=0)
    break_stream(run, "c")
    run.fail("a")
    run.later(1.0)
    assert run.phase is Phase.FINAL
    (closed,) = run.resume("c")
    assert isinstance(closed, facts.RunClosed)
    assert closed.end.outcome is Outcome.FAILED


def test_a_participant_that_succeeded_may_go() -> None:
    """Its workers have ended normally, and no other fails because of that."""
    run = running("a", "b", "c", max_restarts=3)
    run.succeed("c")
    break_stream(run, "c")
    run.fail("a")
    assert (run.phase, run.state.restart_count) == (Phase.JOINABLE, 1)
    pass_grace(run, "c")
    run.later(run.settings.last_call_timeout)
    assert (run.phase, run.ranks) == (Phase.FROZEN, ["a", "b"])


class TestAHostThatVanishes:
    """No connection is closed: the service knows of the loss when the lease is over."""

    def test_a_run_without_restarts_waits_for_a_sign_of_life(self) -> None:
        """Its end can't be taken back. Peers fail with a timeout at 5 s, the lease is over at 15 s."""
        run = running("a", "b", "c", max_restarts=0)
        run.later(5.0, silent=("c",))
        run.fail("a", "timed out after 5 s")
        run.fail("b", "timed out after 5 s")
        run.later(9.0, silent=("c",))
        assert run.phase is Phase.FINAL
        deadline = next_deadline(run.state)
        assert deadline is not None
        assert deadline > run.now
        run.later(1.0, silent=("c",))
        require_lost(run, "c")

    def test_a_sign_of_life_ends_the_wait(self) -> None:
        """Agents get the notice that the round settles, and answer at once."""
        run = running("a", "b", "c", max_restarts=0)
        run.fail("a")
        run.later(SETTLE_WINDOW, silent=("c",))
        assert run.phase is Phase.FINAL
        (closed,) = run.resume("c")
        assert isinstance(closed, facts.RunClosed)

    def test_a_restart_that_was_announced_is_taken_back(self) -> None:
        """It is announced at once; the next round can't be FINAL with the lost node, and budgets are set right."""
        run = running("a", "b", "c", max_restarts=3, max_restarts_per_node=1)
        run.later(5.0, silent=("c",))
        run.fail("a", "timed out after 5 s")
        assert (run.phase, run.round, run.state.restart_count) == (Phase.FROZEN, 2, 1)
        run.confirm("a", "b")
        run.later(10.0, silent=("c",))
        assert run.of_type(facts.NodeLost) == [facts.NodeLost("c", LossReason.LEASE_EXPIRED, failed_round=1)]
        require_lost(run, "c", rounds=2)
        run.run_round()
        assert (run.round, run.ranks, run.state.restart_count) == (3, ["a", "b"], 0)

    def test_a_pause_of_the_service_does_not_hide_the_lost_host(self) -> None:
        """Afterwards the clock of leases steps back: the last sign of life seems to be of later (seed 120629724)."""
        run = running("a", "b", "c", max_restarts=3)
        run.later(5.0)
        run.now -= 0.7
        run.state.forgiven += 3.7
        run.fail("a", "connection reset")
        run.confirm("a", "b")
        run.later(16.0, silent=("c",))
        assert run.of_type(facts.NodeLost) == [facts.NodeLost("c", LossReason.LEASE_EXPIRED, failed_round=1)]
        require_lost(run, "c", rounds=2)

    def test_a_node_that_was_seen_since_was_not_the_cause(self) -> None:
        """A worker failed, and later a host was lost: the restart counts."""
        run = running("a", "b", "c", max_restarts=3)
        run.later(1.0)
        run.fail("a")
        run.later(1.0)
        run.resume("c")
        run.later(15.0, silent=("c",))
        assert run.of_type(facts.NodeLost)[0].failed_round == 0
        assert run.state.restart_count == 1


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_host_that_vanishes_as_it_departs_may_be_the_cause(seconds: float) -> None:
    """After a pause of the service its last messages and its peers' failures come in any order (seed 120311146).

    But if it was alive for longer after that, a worker of another host had failed by itself.
    """
    run = running("a", "b", "c", max_restarts=3)
    run.fail("a", "connection reset")
    run.depart("c")
    run.later(seconds)
    break_stream(run, "c")
    pass_grace(run)
    (lost,) = run.of_type(facts.NodeLost)
    excused = seconds < SETTLE_WINDOW
    assert (lost.failed_round, run.state.restart_count) == ((1, 0) if excused else (0, 1))


def test_three_hosts_lost_one_after_the_other_are_held_against_no_other() -> None:
    """The budget of a node counts only failures of its own workers."""
    run = ScriptedRun(
        min_nodes=1, max_nodes=4, max_restarts=9, max_restarts_per_node=2, last_call_timeout=1.0
    )
    run.start("a", "b", "c", "d")
    for lost in ("b", "c", "d"):
        run.later(3600)
        break_stream(run, lost)
        run.fail("a", "connection reset")
        pass_grace(run)
        run.run_round()
    assert (run.ranks, run.state.evicted, run.state.restart_count) == (["a"], {}, 0)


def test_two_hosts_may_be_lost_at_once() -> None:
    """A rack: the failure is attributed to one of them, and neither costs anything."""
    run = ScriptedRun(min_nodes=1, max_nodes=4, max_restarts=0, last_call_timeout=1.0)
    run.start("a", "b", "c", "d")
    break_stream(run, "c")
    run.later(0.1)
    break_stream(run, "d")
    run.fail("a", "connection reset")
    pass_grace(run)
    require_lost(run, "c")
    run.run_round()
    assert (run.round, run.ranks) == (2, ["a", "b"])


class TestNoRoundFreezesOverADisconnectedNode:
    def test_a_survivor_has_its_grace(self) -> None:
        """The round that another node's departure ends waits for it, and is formed with it when it is back."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, last_call_timeout=0.5)
        run.start("a", "b", "c")
        break_stream(run, "b")
        run.leave("c")
        assert run.later(1.0) == []
        assert run.phase is Phase.JOINABLE
        run.resume("b")
        assert (run.phase, run.ranks) == (Phase.FROZEN, ["a", "b"])

    def test_the_round_is_formed_without_it_once_it_is_lost(self) -> None:
        """The last call has passed by then."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, last_call_timeout=0.5)
        run.start("a", "b", "c")
        break_stream(run, "b")
        run.leave("c")
        pass_grace(run, "b")
        assert (run.phase, run.ranks) == (Phase.FROZEN, ["a"])

    def test_a_newcomer_without_a_stream_is_passed_over(self) -> None:
        """Others need not wait for it."""
        run = ScriptedRun(min_nodes=1, max_nodes=3, last_call_timeout=5.0)
        run.join("a", "b")
        break_stream(run, "b")
        run.later(1.0)
        run.resume("b")
        run.later(3.0)
        break_stream(run, "b")
        run.later(1.0)
        assert (run.phase, run.ranks) == (Phase.FROZEN, ["a"])

    def test_a_server_that_starts_again_waits_for_all(self) -> None:
        """It knows of no stream; each node is back, or lost, before the round is formed."""
        run = running("a", "b", "c", max_restarts=3)
        run.fail("a")
        leases.restart_leases(run.state, run.now)
        run.state.hold_until = None
        run.confirm("a", "b", "c")
        run.resume("a", "b", "c")
        run.fail("a")
        assert run.phase is Phase.FROZEN


def test_all_of_it_outlives_the_server() -> None:
    """A server that starts again attributes the failure too: the counted restart is in its journal."""
    run = running("a", "b", "c", max_restarts=3, max_restarts_per_node=1)
    run.later(5.0, silent=("c",))
    run.fail("a", "timed out after 5 s")
    state = restore(take_snapshot(run.state), 9_000.0)
    folded = RunState("run")
    for fact in run.facts:
        apply(folded, fact, 9_000.0)
    for each in (state, folded):
        leases.restart_leases(each, 9_000.0)
        for node_id in ("a", "b"):
            leases.renew(each, node_id, 9_001.0)
            leases.renew(each, node_id, 9_015.0)
        lost = settle(each, 9_015.0)[0]
        assert lost == facts.NodeLost("c", LossReason.LEASE_EXPIRED, failed_round=1)
        assert (each.restart_count, each.restarts) == (0, [])


def test_a_silent_participant_that_is_turned_away_was_lost_first() -> None:
    """The next round waits for another node for `join_timeout`, which is shorter than the rest of its lease."""
    run = ScriptedRun(min_nodes=3, max_nodes=3, max_restarts=1, join_timeout=8.0)
    run.start("a", "b", "c")
    run.later(3600)
    run.fail("b")
    run.leave("b")
    run.later(8.0, silent=("a",))
    assert LossReason.JOIN_TIMED_OUT in [fact.reason for fact in run.of_type(facts.NodeLost)]
    assert (run.state.restart_count, run.state.restarts) == (0, [])
