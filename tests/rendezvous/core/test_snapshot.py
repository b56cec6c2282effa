"""A snapshot is the run without connections and deadlines; a tombstone is the part that must outlive the run.

`test_histories` checks that a snapshot at any point of any history is the fold of all facts before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from rallypoint.rendezvous.core import commands, facts, failures
from rallypoint.rendezvous.core.apply import apply, renew, restart_leases
from rallypoint.rendezvous.core.decide import execute, settle
from rallypoint.rendezvous.core.failures import SETTLE_WINDOW
from rallypoint.rendezvous.core.snapshot import (
    RunSnapshot,
    restore,
    take_high_water,
    take_snapshot,
    take_tombstone,
)
from rallypoint.rendezvous.core.state import FailureKind, Phase, RunState
from rallypoint.rendezvous.journal.codec import decode_snapshot, encode_snapshot
from rendezvous.core.scripted_run import ScriptedRun

# Not part of a snapshot: connections, deadlines, and fields that every restored run has.
NOT_KEPT = {
    "created",
    "last_call_deadline",
    "confirm_deadline",
    "exit_barrier_deadline",
    "scale_up_deadline",
    "settle_deadline",
    "newcomers_held_until",
    "excused",
    "held_until_of",
    "failure_reported_at",
    "silent",
    "disconnected",
    "hold_until",
    "forgiven",
    "final_at",
    "first_failed_at",
    "started",
    "slowest",
    "last_start_at",
    "former_ended_at",
    "idle_since",
    "woke_at",
    "returned_at",
    "lease_queue",
}


def kept(run: ScriptedRun) -> RunState:
    """Return a run that was stored and restored, by a server with another monotonic clock and the same wall clock."""
    snapshot = decode_snapshot(encode_snapshot(take_snapshot(run.state)))
    return restore(snapshot, 90_000.0, run.now - 90_000.0)


def replayed(run: ScriptedRun) -> RunState:
    """Return the state of a server that replays all of the run's facts at that time."""
    state = RunState("run")
    for fact in run.facts:
        apply(state, fact, 90_000.0)
    return state


def joining(run: ScriptedRun) -> None:
    run.join("a")


def last_call(run: ScriptedRun) -> None:
    run.join("a", "b", workers=2, role="reader")


def confirming(run: ScriptedRun) -> None:
    run.join("a", "b", "c", "spare")
    run.confirm("b")


def running(run: ScriptedRun) -> None:
    run.start("a", "b", "c")
    run.join("spare")


def finishing(run: ScriptedRun) -> None:
    run.start("a", "b", "c")
    run.succeed("b", "a")


def past_the_barrier(run: ScriptedRun) -> None:
    finishing(run)
    run.later(300)
    run.leave("b")


def departing(run: ScriptedRun) -> None:
    run.start("a", "b", "c")
    run.depart("c")
    run.depart("a")


def re_formed(run: ScriptedRun) -> None:
    run.start("a", "b", "c")
    run.join("z")
    run.fail("b")
    run.lose("a")
    run.confirm("z")


def with_evicted(run: ScriptedRun) -> None:
    run.start("a", "b", "c")
    run.evict("b", "q")


def failed(run: ScriptedRun) -> None:
    run.start("a", "b")
    run.fail("a")
    run.run_round()
    run.fail("b")
    run.later(SETTLE_WINDOW)
    assert run.phase is Phase.CLOSED


def settling(run: ScriptedRun) -> None:
    run.start("a", "b", "c")
    run.fail("a")
    run.run_round()
    run.fail("b")
    run.fail("c", age=0.1, permanent=True, kind=FailureKind.OUT_OF_MEMORY, core_file="/core")
    assert run.phase is Phase.FINAL


def named_later(run: ScriptedRun) -> None:
    run.start("a", "b", "c")
    run.later(1.0)
    run.fail("b")
    run.fail("a", round_=1, age=0.5)
    assert run.state.last_round_end is not None
    assert run.state.last_round_end.node_id == "a"


def worn_out(run: ScriptedRun) -> None:
    named_later(run)
    run.run_round()
    run.fail("a")
    run.later(SETTLE_WINDOW)
    assert run.state.evicted["a"].by_service


def held_back(run: ScriptedRun) -> None:
    run.start("a", "b", "c")
    run.fail("b")
    run.run_round()
    run.fail("c")
    assert run.state.hold_until is not None


SITUATIONS = [
    joining,
    last_call,
    confirming,
    running,
    finishing,
    past_the_barrier,
    departing,
    re_formed,
    with_evicted,
    failed,
    settling,
    named_later,
]
BUDGETED: dict[Callable[[ScriptedRun], None], dict[str, float]] = {
    worn_out: {"max_restarts_per_node": 1},
    held_back: {"max_restarts": 3, "restart_backoff": 30.0},
}


@pytest.fixture(params=[*SITUATIONS, *BUDGETED], ids=lambda situation: situation.__name__)
def run(request: pytest.FixtureRequest) -> ScriptedRun:
    situation: Callable[[ScriptedRun], None] = request.param
    settings: dict[str, float] = {"max_restarts": 1, "last_call_timeout": 30.0, "restart_window": 100.0}
    run = ScriptedRun(2, 3, **(settings | BUDGETED.get(situation, {})))
    situation(run)
    return run


def test_a_restored_run_equals_a_replayed_one(run: ScriptedRun) -> None:
    """Every field of the run, its deadlines too: they all start again when the server does, either way."""
    restored, folded = kept(run), replayed(run)
    for state in (restored, folded):
        restart_leases(state, 90_000.0)
    for field in fields(RunState):
        assert getattr(restored, field.name) == getattr(folded, field.name), field.name


def test_order_is_kept(run: ScriptedRun) -> None:
    """Ranks and deadlines depend on the order of joining and departing; equal dicts may differ in it."""
    restored = kept(run)
    assert list(restored.nodes) == list(run.state.nodes)
    assert list(restored.departing) == list(run.state.departing)
    assert list(restored.seats) == list(run.state.seats)


def test_a_snapshot_of_a_restored_run_is_the_same(run: ScriptedRun) -> None:
    """To the byte: checkpoints of checkpoints lose nothing."""
    first, second = take_snapshot(run.state), take_snapshot(kept(run), run.now - 90_000.0)
    assert encode_snapshot(first) == encode_snapshot(second)


def test_a_restored_run_goes_on_like_a_replayed_one(run: ScriptedRun) -> None:
    """The same commands at the same times have the same results, until a round runs."""
    runs = [kept(run), replayed(run)]
    for state in runs:
        restart_leases(state, 90_000.0)

    def told(command: commands.Command, now: float) -> None:
        first, second = (execute(state, command, now) for state in runs)
        assert first == second

    for node_id in [*runs[0].nodes]:
        for state in runs:
            renew(state, node_id, 90_001.0)
    first_settled, second_settled = (settle(state, 90_002.0) for state in runs)
    assert first_settled == second_settled
    if runs[0].phase is Phase.CLOSED:
        assert runs[0].run_end == runs[1].run_end
        return
    for node_id in sorted({"x", "y", "a"} - runs[0].evicted.keys()):
        told(commands.Join(node_id, run.settings, f"{node_id}.cluster", 1, "trainer"), 90_002.0)
    for node_id in [*runs[0].departing]:
        told(commands.Leave(node_id, runs[0].nodes[node_id].lease, "bye"), 90_002.0)
    for node_id in [*runs[0].unconfirmed]:
        told(commands.Confirm(node_id, runs[0].nodes[node_id].lease, runs[0].round, 1), 90_003.0)
    assert runs[0].phase is Phase.FINAL
    first, second = (replace(take_snapshot(state), restarts=()) for state in runs)
    assert first == second
    assert runs[0].restarts == runs[1].restarts


def test_every_field_of_a_run_is_kept_or_known_not_to_be() -> None:
    """A field that is added only to the run would be lost with the next restart."""
    of_the_run = {field.name for field in fields(RunState)}
    of_the_snapshot = {field.name for field in fields(RunSnapshot)}
    assert of_the_run - of_the_snapshot == NOT_KEPT
    assert of_the_snapshot - of_the_run == {"forgotten"}


def test_a_tombstone_has_the_numbers_and_nothing_else() -> None:
    """A run that takes the name of any earlier run starts with its numbers only."""
    run = ScriptedRun(min_nodes=1, max_nodes=2, max_restarts=3)
    run.start("a", "b")
    run.fail("a")
    run.evict("b")
    tombstone = decode_snapshot(encode_snapshot(take_tombstone(run.state)))
    assert tombstone == RunSnapshot("run", run.state.revision, 2, forgotten=True)
    state = restore(tombstone, 5.0)
    assert state == RunState("run", revision=run.state.revision, round=2)
    assert not state.created


def test_numbers_go_on_in_a_run_that_comes_again() -> None:
    """Revisions, leases, rounds and fencing tokens: none is given out twice under one name."""
    run = ScriptedRun(min_nodes=1, max_nodes=1, max_restarts=3)
    run.start("a")
    run.fail("a")
    revision, lease, token = run.state.revision, run.lease("a"), run.state.fencing_token
    state = restore(take_tombstone(run.state), 5.0)
    happened = execute(state, commands.Join("a", run.settings, "a.cluster", 1, "trainer"), 5.0)
    assert [type(fact) for fact in happened] == [facts.RunCreated, facts.NodeJoined, facts.RoundFrozen]
    assert state.revision == revision + 3
    assert state.nodes["a"].lease == revision + 2 > lease
    assert state.round == 3
    assert state.fencing_token > token
    assert state.restart_count == 0


def test_the_used_budgets_of_a_run_without_an_end_outlive_it() -> None:
    """Such a run goes on without its other state, but with no more restarts left, and with its evicted nodes."""
    run = ScriptedRun(
        min_nodes=1, max_nodes=2, max_restarts=1, restart_window=3600.0, max_restarts_per_node=3
    )
    run.start("a", "b")
    run.fail("a")
    run.evict("b")
    high_water = decode_snapshot(encode_snapshot(take_high_water(run.state, 100.0)))
    state = restore(high_water, run.now + 10.0, 90.0)
    assert not state.created
    assert (state.revision, state.round) == (run.state.revision, run.state.round)
    assert state.restart_count == run.state.restart_count == 1
    assert state.restarts == run.state.restarts != []
    assert [each.at for each in state.restarts] == [each.at + 10.0 for each in run.state.restarts]
    assert (state.evicted, state.quick_restarts) == (run.state.evicted, run.state.quick_restarts)
    execute(state, commands.Join("a", run.settings, "a.cluster", 1, "trainer"), run.now + 10.0)
    assert failures.counted(state) == failures.counted_of(state, "a") == 1


def test_the_used_budgets_of_a_closed_run_end_with_it() -> None:
    """The next run of its name has its numbers, and budgets of its own."""
    run = ScriptedRun(min_nodes=1, max_nodes=1, max_restarts=3)
    run.start("a")
    run.fail("a")
    run.do(commands.Close("enough"))
    assert take_high_water(run.state) == take_tombstone(run.state)
