"""The state of a run is the fold of its facts, and deadlines start when a fact is folded, not when it happened."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.core import commands, facts
from rallypoint.rendezvous.core.apply import apply, restart_leases
from rallypoint.rendezvous.core.state import Phase, RunSettings, RunState
from rallypoint.rendezvous.runs.run import run_message
from rendezvous.core.scripted_run import ScriptedRun


def replay(run: ScriptedRun, now: float) -> RunState:
    """Return the state of a server that starts at `now` and replays the run's facts."""
    state = RunState("run")
    for fact in run.facts:
        apply(state, fact, now)
    restart_leases(state, now)
    return state


def test_every_fact_is_one_revision() -> None:
    """The revision counts facts, so a journal's records are numbered by it."""
    run = ScriptedRun(min_nodes=1, max_nodes=2)
    run.start("a", "b")
    assert run.state.revision == len(run.facts)


def test_a_replay_makes_the_same_run() -> None:
    """Phase, round, ranks, counts, reasons: everything but connections is in the facts."""
    run = ScriptedRun(min_nodes=1, max_nodes=3, max_restarts=1)
    run.start("a", "b", "c")
    run.fail("b")
    run.confirm("a", "b")
    run.join("spare")
    replayed = run_message(replay(run, 5.0))
    assert not any(node.connected for node in replayed.nodes)
    for node in replayed.nodes:
        node.connected = True
    assert replayed == run_message(run.state)


@pytest.mark.parametrize("at", ["joining", "last call", "frozen", "departing", "exit barrier", "idle"])
def test_a_replay_gives_every_deadline_a_full_new_term(at: str) -> None:
    """A server that was away could not see heartbeats: however old the facts are, time starts now."""
    run = ScriptedRun(min_nodes=2, max_nodes=3)
    run.join("a")
    if at != "joining":
        run.join("b")
    if at in ("frozen", "departing"):
        run.later(30)
    if at == "departing":
        run.depart("a")
    if at == "exit barrier":
        run.run_round()
        run.succeed("a")
    if at == "idle":
        run.leave("a")
        run.leave("b")
    state = replay(run, 90_000.0)
    settings = RunSettings()
    match at:
        case "joining":
            assert state.nodes["a"].waiting_since == 90_000
        case "last call":
            assert state.last_call_deadline == 90_000 + settings.last_call_timeout
        case "frozen":
            assert state.confirm_deadline == 90_000 + settings.confirm_timeout
        case "departing":
            assert state.departing == {"a": 90_000 + settings.confirm_timeout}
        case "exit barrier":
            assert state.exit_barrier_deadline == 90_000 + settings.exit_barrier_timeout
        case "idle":
            assert state.idle_since == 90_000
    assert all(node.lease_deadline == 90_000 + settings.time_to_live for node in state.nodes.values())


def test_a_round_has_the_address_of_its_first_node() -> None:
    """When rank 0 changes, so does the master address: no node connects to a dead one."""
    run = ScriptedRun(min_nodes=1, max_nodes=2)
    run.start("a", "b")
    assert run.state.master_address == "a.cluster"
    run.lose("a")
    run.run_round()
    assert run.state.master_address == "b.cluster"


def test_fencing_tokens_grow_from_round_to_round() -> None:
    """And are not the round's number: the token is the revision at which the round was formed."""
    run = ScriptedRun(max_restarts=2)
    run.start("a")
    first = run.state.fencing_token
    run.fail("a")
    assert run.state.fencing_token == run.state.revision > first


def test_no_port_of_an_earlier_round_is_left() -> None:
    """The port is that of the round, once its first node confirmed it."""
    run = ScriptedRun(max_restarts=2)
    run.start("a")
    assert run.state.master_port == 29500
    run.fail("a")
    assert (run.phase, run.state.master_port) == (Phase.FROZEN, 0)


def test_a_round_that_is_over_leaves_nothing_behind() -> None:
    """In JOINABLE there is no world size, no assignment, no rank."""
    run = ScriptedRun(min_nodes=2, max_nodes=2)
    run.start("a", "b")
    run.lose("b")
    assert (run.phase, run.ranks) == (Phase.JOINABLE, [])
    assert (run.state.world_size, run.state.group_world_size) == (0, 0)
    assert (run.state.unconfirmed, run.state.succeeded) == (set(), set())


def test_an_exit_barrier_leaves_nothing_behind() -> None:
    """An update has no barrier of an ended round, both when the next one forms and when the run is closed."""
    run = ScriptedRun(min_nodes=2, max_nodes=2, exit_barrier_timeout=10.0)
    run.start("a", "b")
    run.succeed("a")
    run.later(10)
    assert run.state.exit_barrier_passed
    run.lose("b")
    assert run.phase is Phase.JOINABLE
    assert not (run.state.exit_barrier_passed)
    assert not (run.state.finishing)
    assert run.state.exit_barrier_deadline is None


def test_a_run_is_idle_since_its_last_node_went() -> None:
    """For every kind of end, and until the next node joins; a closed run has no nodes."""
    run = ScriptedRun(min_nodes=1, max_nodes=3)
    assert run.state.idle_since is None
    run.start("a", "b")
    run.later(5)
    run.leave("a")
    assert run.state.idle_since is None
    run.lose("b")
    assert run.state.idle_since == run.now
    since = run.now
    run.later(100)
    run.evict("c")
    assert run.state.idle_since == since
    run.join("d")
    assert run.state.idle_since is None
    run.do(commands.Close("enough"))
    assert run.state.idle_since == run.now


def test_the_seat_of_a_node_that_succeeded_is_not_for_its_successor() -> None:
    """An agent that starts again under the name of a finished one waits; the announced world size stays."""
    run = ScriptedRun(min_nodes=2, max_nodes=2)
    run.start("a", "b")
    run.succeed("a")
    run.join("a")
    assert (run.phase, run.ranks, run.waiting) == (Phase.FINAL, ["b"], ["a"])
    assert (run.state.world_size, run.state.group_world_size) == (2, 2)


def test_a_value_that_is_no_fact_is_a_bug() -> None:
    """It is not ignored like a fact that changes nothing."""
    with pytest.raises(TypeError, match="not a fact"):
        apply(RunState("run"), "joined", 0.0)  # type: ignore[arg-type]


def test_every_kind_of_fact_is_known() -> None:
    """Every fact that can be decided can be folded."""
    kinds = set(facts.Fact.__args__)
    from rallypoint.rendezvous.core.apply import _apply

    assert kinds <= set(_apply.registry)
