"""A lease lives as long as its node gives signs of life, by the server's clock, and no longer."""

from __future__ import annotations

import random

import pytest

from rallypoint.rendezvous.core import apply, decide, facts
from rallypoint.rendezvous.core.state import LossReason
from rendezvous.core.scripted_run import ScriptedRun


def run_of_two() -> ScriptedRun:
    """Return a run of two nodes: leases live 15 s, the disconnect grace is 2 s."""
    run = ScriptedRun(min_nodes=1, max_nodes=2, keep_alive_interval=5.0, keep_alive_max_attempt=3)
    run.start("a", "b")
    return run


def test_a_silent_node_is_lost_after_the_time_to_live() -> None:
    """Three heartbeats of five seconds missing: lost then, and not a moment before."""
    run = run_of_two()
    assert run.later(14.9, silent=("a",)) == []
    assert facts.NodeLost("a", LossReason.LEASE_EXPIRED) in run.later(0.1, silent=("a",))


def test_a_heartbeat_gives_a_full_new_term() -> None:
    """From the moment it arrives."""
    run = run_of_two()
    run.later(14, silent=("a",))
    apply.renew(run.state, "a", run.now)
    assert run.later(14.9, silent=("a",)) == []
    assert facts.NodeLost("a", LossReason.LEASE_EXPIRED) in run.later(0.1, silent=("a",))


def test_a_broken_stream_shortens_the_lease_to_the_grace() -> None:
    """A killed agent is noticed at once."""
    run = run_of_two()
    apply.disconnect(run.state, "a", run.now)
    assert run.later(1.9) == []
    assert facts.NodeLost("a", LossReason.DISCONNECTED) in run.later(0.1)


def test_a_broken_stream_does_not_prolong_a_lease() -> None:
    """A node that was silent for long gets no grace on top; the loss reports the limit that applied."""
    run = run_of_two()
    run.later(14.5, silent=("a",))
    apply.disconnect(run.state, "a", run.now)
    assert facts.NodeLost("a", LossReason.LEASE_EXPIRED) in run.later(0.5)


def test_a_lease_that_is_shorter_than_the_grace_applies() -> None:
    """A grace of an hour does not apply to it, and no sentence names it."""
    run = ScriptedRun(2, 2, disconnect_grace=3600.0)
    run.start("a", "b")
    apply.disconnect(run.state, "a", run.now)
    assert run.later(14.9, silent=("a",)) == []
    lost, ended = run.later(0.1, silent=("a",))[:2]
    assert lost == facts.NodeLost("a", LossReason.LEASE_EXPIRED)
    assert isinstance(ended, facts.RoundEnded)
    assert ended.end.detail == "node a was lost: no heartbeat for 15 s (3 missed, one every 5 s)"


def paused_and_disconnected() -> ScriptedRun:
    """Return a run whose server wakes up from a pause; the streams of both nodes broke meanwhile."""
    run = run_of_two()
    run.state.woke_at = run.now
    for node_id in ("a", "b"):
        apply.disconnect(run.state, node_id, run.now)
    return run


def test_after_a_pause_no_lease_ends_before_nodes_could_come_back() -> None:
    """They have as long as after a restart, however long the grace; so has a stream that ends later."""
    run = paused_and_disconnected()
    assert run.later(9.9) == []
    assert decide.next_deadline(run.state) == pytest.approx(run.now + 0.1)
    lost = [fact.node_id for fact in run.later(0.1) if isinstance(fact, facts.NodeLost)]
    assert lost == ["a", "b"]


def test_after_a_pause_none_is_lost_while_others_come_back() -> None:
    """A busy service has not read all nodes that come back; but one that comes and goes delays no loss for ever."""
    run = paused_and_disconnected()
    for _ in range(19):
        run.state.returned_at = run.now
        assert run.later(3.0) == []
    run.state.returned_at = run.now
    assert facts.NodeLost("a", LossReason.DISCONNECTED) in run.later(3.0)


def test_nodes_that_come_back_without_a_pause_delay_no_loss() -> None:
    """Normally a node with a broken stream has the grace."""
    run = run_of_two()
    apply.disconnect(run.state, "a", run.now)
    run.state.returned_at = run.now
    assert facts.NodeLost("a", LossReason.DISCONNECTED) in run.later(2.0)


def test_a_node_that_comes_back_within_the_grace_is_as_before() -> None:
    """Its lease lives a full term again, and its stream counts as open."""
    run = run_of_two()
    apply.disconnect(run.state, "a", run.now)
    run.later(1.9)
    apply.renew(run.state, "a", run.now)
    assert run.state.nodes["a"].connected
    assert run.later(14.9, silent=("a",)) == []
    assert facts.NodeLost("a", LossReason.LEASE_EXPIRED) in run.later(0.1, silent=("a",))


def test_a_restarted_server_gives_every_lease_a_full_new_term() -> None:
    """Also those that were about to end: the server could not see heartbeats."""
    run = run_of_two()
    apply.disconnect(run.state, "a", run.now)
    run.now += 10_000
    apply.restart_leases(run.state, run.now)
    assert not run.state.nodes["b"].connected
    assert decide.settle(run.state, run.now + 14.9) == []
    lost = [fact for fact in decide.settle(run.state, run.now + 15) if isinstance(fact, facts.NodeLost)]
    assert {fact.node_id for fact in lost} == {"a", "b"}


def test_after_a_restart_a_short_lease_lives_long_enough_to_be_resumed() -> None:
    """A node that tries every 2 s can't show itself within a term of 1.5 s; once it has, its own term holds again."""
    run = ScriptedRun(min_nodes=1, max_nodes=2, keep_alive_interval=0.5, keep_alive_max_attempt=3)
    run.start("a", "b")
    apply.restart_leases(run.state, run.now)
    assert decide.settle(run.state, run.now + 5) == []
    apply.renew(run.state, "a", run.now + 5)
    assert facts.NodeLost("a", LossReason.LEASE_EXPIRED) in decide.settle(run.state, run.now + 6.5)
    assert "b" in run.state.nodes
    assert facts.NodeLost("b", LossReason.LEASE_EXPIRED) in decide.settle(run.state, run.now + 10)


def test_after_a_restart_an_old_request_to_resume_takes_no_time_from_a_lease() -> None:
    """Its client gave up, and comes again later than the grace; a node with a later sign of life has the grace."""
    run = run_of_two()
    apply.restart_leases(run.state, run.now)
    for node_id in ("a", "b"):
        apply.renew(run.state, node_id, run.now + 1)
    apply.disconnect(run.state, "a", run.now + 1)
    apply.renew(run.state, "b", run.now + 2)
    apply.disconnect(run.state, "b", run.now + 2)
    assert facts.NodeLost("b", LossReason.DISCONNECTED) in decide.settle(run.state, run.now + 4)
    assert decide.settle(run.state, run.now + 9.9) == []
    assert facts.NodeLost("a", LossReason.DISCONNECTED) in decide.settle(run.state, run.now + 10)


def test_the_lease_of_a_node_that_joined_again_is_another_one() -> None:
    """The old lease's entry in the queue ends nothing."""
    run = run_of_two()
    apply.disconnect(run.state, "a", run.now)
    run.join("a")
    run.run_round()
    assert run.later(100) == []


def test_reconnecting_leaves_nothing_behind() -> None:
    """A thousand broken streams of a living node cost no memory once their time is over, and lose no deadline."""
    run = run_of_two()
    for _ in range(1000):
        apply.disconnect(run.state, "a", run.now)
        run.now += 0.01
        apply.renew(run.state, "a", run.now)
    run.later(30)
    assert len(run.state.lease_queue) == 2
    assert facts.NodeLost("a", LossReason.LEASE_EXPIRED) in run.later(15, silent=("a",))


@pytest.mark.parametrize("seed", range(20))
def test_leases_end_exactly_when_they_should(seed: int) -> None:
    """After joins, heartbeats, broken streams and returns in any order: a node is lost exactly when its time is over,
    and a caller that waits for `next_deadline` is never late."""
    draw = random.Random(seed)
    run = ScriptedRun(min_nodes=50, max_nodes=50, join_timeout=1e9)
    names = [f"n{number}" for number in range(8)]
    due: dict[str, float] = {}
    for _ in range(400):
        node_id = draw.choice(names)
        match draw.choice(["join", "renew", "renew", "disconnect", "time"]):
            case "join" if node_id not in due:
                run.join(node_id)
                due[node_id] = run.now + 15
            case "renew" if node_id in due:
                apply.renew(run.state, node_id, run.now)
                due[node_id] = run.now + 15
            case "disconnect" if node_id in due:
                apply.disconnect(run.state, node_id, run.now)
                due[node_id] = min(due[node_id], run.now + 2)
            case "time":
                until = run.now + draw.choice([0.5, 1.0, 4.0])
                while run.now < until:
                    deadline = decide.next_deadline(run.state)
                    assert deadline is None or not due or deadline <= min(due.values())
                    run.now = until if deadline is None else min(until, max(run.now, deadline))
                    lost = {fact.node_id for fact in decide.settle(run.state, run.now)}  # type: ignore[union-attr]
                    assert lost == {node_id for node_id, end in due.items() if end <= run.now}
                    due = {node_id: end for node_id, end in due.items() if node_id not in lost}
        assert set(run.state.nodes) == set(due)


def test_a_renewal_reports_if_it_brings_the_end_nearer() -> None:
    """As the first one after a restart may: a caller that sleeps until the next deadline must then wake up."""
    run = ScriptedRun(min_nodes=1, max_nodes=2, keep_alive_interval=0.5, keep_alive_max_attempt=3)
    run.start("a", "b")
    assert not apply.renew(run.state, "a", run.now + 1)
    apply.restart_leases(run.state, run.now)
    before = decide.next_deadline(run.state)
    assert apply.renew(run.state, "a", run.now + 1)
    assert before == run.now + apply.LEAST_TERM_AFTER_RESTART
    assert decide.next_deadline(run.state) == run.now + 1 + 1.5
    assert not apply.renew(run.state, "a", run.now + 2)
