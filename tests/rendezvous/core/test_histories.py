"""In any history of a run the invariants of the design hold, and a round runs again at the end.

A history is drawn from one seed: nodes join, confirm, fail, succeed, leave, hang, vanish and come back under their
old names; stale messages arrive; the server crashes and starts again from its committed facts. After every step:

- a round number is never given to two memberships, across restarts too (invariant 2);
- no node is in two rounds, and the ranks of a round are exactly 0 … n-1, of workers and of roles (invariant 3);
- a stale lease is refused in every command (invariant 4);
- the revisions that a node or watcher sees only grow, and it misses no phase that still matters (invariant 5);
- nothing is sent before it is durable (invariant 1);
- the first failure over all nodes is reported as the cause, budgets of restarts are kept, by run and by node, and
  rounds that fail soon have a back-off.

And once faults stop, as many nodes as are needed agree on a round.

A failure names its seed. `RALLYPOINT_HISTORY_SEED=137 pytest tests/rendezvous/core/test_histories.py` replays that
one alone; `RALLYPOINT_HISTORIES=100000` plays so many instead of 1,000.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.rendezvous.core import apply, commands, decide, facts, failures, newcomers, ranks, snapshot
from rallypoint.rendezvous.core.snapshot import RunSnapshot
from rallypoint.rendezvous.core.state import Phase, RoundEnd, RoundEndCause, RunState, ScaleUpPolicy, Seat
from rendezvous.core import history
from rendezvous.core.history import RUN, History, play
from rendezvous.core.ledger import Violation
from simulation.plants import (
    blame_the_last_report,
    count_no_restart_in_its_window,
    count_restarts_for_ever,
    count_rounds_from_the_beginning_when_reopened,
    end_a_run_at_once,
    forget_lingering_nodes_in_a_crash,
    forget_the_confirm_phase,
    hold_nothing_back,
    keep_the_restart_count_when_reopened,
    let_a_node_fail_for_ever,
    let_the_agents_of_an_ended_run_in,
    never_lose_a_node,
    reopen_over_nodes_that_are_there,
    restart_what_cant_be_mended,
)
from support.marks import slow
from support.replacing import instead_of

BLOCKS = 20
QUICK_BLOCKS = 5  # the others are for make test-slow
HISTORIES = int(os.environ.get("RALLYPOINT_HISTORIES", "1000"))
SEED = os.environ.get("RALLYPOINT_HISTORY_SEED")


def blocks() -> list[Any]:
    """Return the seeds to play, a test for every block of them."""
    if SEED is not None:
        return [range(int(SEED), int(SEED) + 1)]
    return [
        pytest.param(
            range(block, HISTORIES, BLOCKS), marks=[pytest.mark.slow] if block >= QUICK_BLOCKS else []
        )
        for block in range(BLOCKS)
    ]


def play_all(seeds: range) -> History:
    """Play the histories of the seeds; return the last."""
    for seed in seeds:
        played = play(seed)
    return played


@pytest.mark.parametrize("seeds", blocks(), ids=str)
def test_the_invariants_hold_in_every_history(seeds: range) -> None:
    """No history breaks an invariant, and each ends with a round that runs, or a run that is closed."""
    played = play_all(seeds)
    if SEED is not None:
        print("\n".join(played.trace))  # noqa: T201 (the purpose of a replay; pytest -s shows it)


def test_a_seed_is_one_history() -> None:
    """The same seed plays the same history, to the last byte of its journal: a failure can be reproduced."""
    first, second = play(11), play(11)
    assert first.trace == second.trace
    assert first.journal == second.journal


@pytest.mark.slow
def test_histories_reach_every_corner() -> None:
    """A few histories have every fact, every reason for a loss, every end of a round and of a run, and spares."""
    seen: set[str] = set()
    for seed in range(250):
        played = play(seed)
        seen.update(word for line in played.trace for word in line.replace("(", " ").split())
        if played.tombstone is not None and played.server.state.created:
            seen.add("expired and came again")
        seen.update(
            "spares" for formed in played.ledger.rounds.values() if len(formed.leases) < len(played.agents)
        )
    wanted = {fact.__name__ for fact in facts.Fact.__args__}
    wanted |= {"<LossReason.LEASE_EXPIRED:", "<LossReason.DISCONNECTED:", "<LossReason.SUPERSEDED:"}
    wanted = {word.strip("<:") for word in wanted} | {"spares", "crash"}
    corners = {
        *("LossReason." + name for name in ("CONFIRM_TIMED_OUT", "JOIN_TIMED_OUT", "DEPARTURE_TIMED_OUT")),
        *(f"RoundEndCause.{cause.name}" for cause in RoundEndCause),
        *("Outcome." + name for name in ("SUCCEEDED", "FAILED", "CANCELLED")),
    }
    corners |= {"expired and came again", "by_service=True", "earliest=False", "permanent=True"}
    corners |= {"quick_restarts=3", "mend"}
    text = " ".join(seen)
    assert not {corner for corner in wanted | corners if corner not in text}


# ---- bugs planted on purpose, to prove that the checks find them


def reuse_round_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts again counts its rounds from the beginning."""

    # The first to notice would be the comparison of the state before and after the crash.
    monkeypatch.setattr(History, "_durable_view", lambda self: None)

    @instead_of(monkeypatch, History, "recover")
    def forgetful(recover: Any, self: History) -> Any:
        state = recover(self)
        state.round = state.round if state.seats else 0
        return state


def give_two_nodes_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last node of a round gets the rank of the first."""
    assign = ranks.assign_seats

    def careless(*args: object) -> tuple[Seat, ...]:
        *seats, last = assign(*args)  # type: ignore[arg-type]
        return (*seats, replace(last, group_rank=0))

    monkeypatch.setattr(decide, "assign_seats", careless)


def give_two_nodes_the_same_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker ranks are counted as if every node had one worker."""
    assign = ranks.assign_seats

    def careless(*args: object) -> tuple[Seat, ...]:
        return tuple(replace(seat, base_rank=seat.group_rank) for seat in assign(*args))  # type: ignore[arg-type]

    monkeypatch.setattr(decide, "assign_seats", careless)


def skip_the_lease_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any lease is accepted."""
    monkeypatch.setattr(decide, "check_lease", lambda *_: None)


def take_reports_of_any_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of a round that is over counts for the present one."""
    monkeypatch.setattr(
        decide, "_runs", lambda state, node_id, round_: state.phase is Phase.FINAL and node_id in state.seats
    )


def publish_before_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes get an update at once, before its facts are durable."""

    @instead_of(monkeypatch, History, "_take_note")
    def rash(take_note: Any, self: History, happened: list[facts.Fact]) -> None:
        take_note(self, happened)
        if any(isinstance(fact, facts.RoundFrozen) for fact in happened):
            for agent in list(self.server.members.values()):
                self._tell(agent)


def publish_no_end_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors find out by failing."""
    monkeypatch.setattr(history, "TOLD_TO_NODES", (facts.RoundFrozen, facts.RoundFinalized, facts.RunClosed))


def forget_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts again grants the whole budget of restarts again."""

    monkeypatch.setattr(History, "_durable_view", lambda self: None)

    @instead_of(monkeypatch, History, "recover")
    def generous(recover: Any, self: History) -> Any:
        state = recover(self)
        state.restart_count = 0
        return state


def never_end_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round with room left waits for ever."""
    monkeypatch.setattr(apply, "_keep_last_call", lambda state, now: None)


def let_evicted_nodes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evicted node may join again at once."""

    @instead_of(monkeypatch, decide, "decide")
    def lenient(whole: Any, state: RunState, command: commands.Command, now: float) -> Any:
        if not isinstance(command, commands.Join):
            return whole(state, command, now)
        evicted, state.evicted = state.evicted, {}
        try:
            return whole(state, command, now)
        finally:
            state.evicted = evicted


def pass_the_exit_barrier_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node that succeeds may leave at once."""
    whole = decide._in_final

    def hasty(state: RunState, now: float) -> facts.Fact | None:
        if state.exit_barrier_deadline is not None and len(state.succeeded) < len(state.seats):
            return facts.ExitBarrierPassed(state.round)
        return whole(state, now)

    monkeypatch.setitem(decide._IN_PHASE, Phase.FINAL, hasty)


def forget_evicted_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts again from a checkpoint admits all nodes."""
    whole = snapshot.restore

    def forgetful(taken: RunSnapshot, *clocks: float) -> RunState:
        return whole(replace(taken, evicted=()), *clocks)

    monkeypatch.setattr(history, "restore", forgetful)


def let_no_newcomer_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every newcomer ends the round at once, under every policy."""

    @instead_of(monkeypatch, newcomers, "next_scale_up")
    def hasty(whole: Any, state: RunState) -> Any:
        settings = state.settings
        state.settings = replace(settings, scale_up_policy=ScaleUpPolicy.IMMEDIATE)
        try:
            return whole(state)
        finally:
            state.settings = settings


def take_finished_work_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer ends the round although participants have succeeded."""
    whole = decide._in_final

    def greedy(state: RunState, now: float) -> facts.Fact | None:
        state.finishing = False
        return whole(state, now)

    monkeypatch.setitem(decide._IN_PHASE, Phase.FINAL, greedy)


def forget_departing_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round is formed while a leaving node's workers may be alive."""
    monkeypatch.setattr(RunState, "held_up", False)


def give_an_expired_run_its_numbers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Revisions, and leases with them, begin at 1 when a run of the same name comes again."""
    monkeypatch.setattr(history, "take_tombstone", lambda state: RunSnapshot(RUN, 0, 0, forgotten=True))


def give_an_expired_run_its_rounds_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its rounds begin at 1."""
    whole = snapshot.take_tombstone
    monkeypatch.setattr(history, "take_tombstone", lambda state: replace(whole(state), round=0))


def count_restarts_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's restart is counted as a failure of a worker."""

    @instead_of(monkeypatch, decide, "_end_of_breached_round")
    def strict(whole: Any, state: RunState, breach: RoundEnd, now: float) -> Any:
        if breach.cause is RoundEndCause.RESTART_REQUESTED:
            return facts.RoundEnded(breach, state.restart_count + 1)
        return whole(state, breach, now)


def accept_absurd_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure may be older than its round."""
    monkeypatch.setattr(failures, "failed_at", lambda state, failure, now: now - failure.age)


def wait_for_reports_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends when every node has reported a failure."""
    monkeypatch.setattr(failures, "is_settled", lambda state, now: False)


def take_a_node_out_for_its_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's budget is exhausted at its first failure."""
    monkeypatch.setattr(
        failures, "_wears_out", lambda state, node_id: state.settings.max_restarts_per_node > 0
    )


def hold_every_round_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every end of a round counts as a failure that came soon."""
    monkeypatch.setattr(failures, "quick_restarts_after", lambda state, cause, now: state.quick_restarts + 1)


def forget_how_long_ago_restarts_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts again counts all restarts in its checkpoint as if they were just made."""
    whole = snapshot.restore

    def forgetful(taken: RunSnapshot, now: float, to_wall: float) -> RunState:
        recent = tuple(replace(each, time=now + to_wall) for each in taken.restarts)
        return whole(replace(taken, restarts=recent), now, to_wall)

    monkeypatch.setattr(history, "restore", forgetful)


@pytest.mark.parametrize(
    ("plant", "invariant"),
    [
        (reuse_round_numbers, "a round number is never given out twice|a checkpoint is the fold"),
        (give_two_nodes_one_rank, "group ranks are 0 … n-1"),
        (give_two_nodes_the_same_workers, "worker ranks partition"),
        (forget_the_confirm_phase, "FINAL when every participant confirmed"),
        (skip_the_lease_check, "a stale lease is refused|breaks the core"),
        (take_reports_of_any_round, "another round changes nothing"),
        (publish_before_commit, "nothing is told before it is durable"),
        (publish_no_end_of_a_round, "nobody misses a phase that still matters"),
        (forget_restarts, "restarts are counted|one revision is one state"),
        (never_lose_a_node, "whoever sleeps until the next deadline sleeps|enough nodes that answer agree"),
        (never_end_the_last_call, "enough nodes that answer agree on a round"),
        (let_evicted_nodes_in, "who was evicted stays out"),
        (pass_the_exit_barrier_early, "an exit barrier holds for its timeout"),
        (forget_evicted_nodes, "a checkpoint is the fold of what came before it"),
        (let_no_newcomer_wait, "newcomers wait where they are to|gathered for their delay"),
        slow(take_finished_work_back, "no work that is done is taken back|a checkpoint is the fold"),
        (forget_departing_nodes, "no round is formed while a leaving participant"),
        (give_an_expired_run_its_numbers_again, "lease numbers grow"),
        (give_an_expired_run_its_rounds_again, "a round number is never given out twice"),
        (reopen_over_nodes_that_are_there, "no two incarnations of a run are there at once"),
        (count_rounds_from_the_beginning_when_reopened, "a round number is never given out twice"),
        slow(let_the_agents_of_an_ended_run_in, "who was in an incarnation that ended is in no later one"),
        slow(
            keep_the_restart_count_when_reopened,
            "restarts are counted, and nothing else is|revision is one state",
        ),
        (forget_lingering_nodes_in_a_crash, "a restart forgets no node that may still be there"),
        (count_restarts_of_operators, "restarts are counted, and nothing else is"),
        (blame_the_last_report, "the earliest failure is the first"),
        (accept_absurd_ages, "the earliest failure is the first"),
        (end_a_run_at_once, "the end of a run waits for what others have to report"),
        (wait_for_reports_for_ever, "the end of a run waits for no longer than a lease"),
        slow(restart_what_cant_be_mended, "what no restart can mend is not restarted|no round runs after"),
        slow(count_restarts_for_ever, "no restart is left|the whole of its budget|a checkpoint is the fold"),
        (count_no_restart_in_its_window, "the budget of restarts is kept|the budget of a node is kept"),
        (let_a_node_fail_for_ever, "the budget of a node is kept"),
        (take_a_node_out_for_its_first_failure, "a node has the whole of its budget"),
        (hold_nothing_back, "a restart is held back where rounds fail soon"),
        (hold_every_round_back, "restarts that come soon are counted in a row"),
        slow(forget_how_long_ago_restarts_were, "a checkpoint is the fold of what came before it"),
    ],
)
def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every planted bug breaks an invariant within 1,500 histories, and the failure names it and a seed."""
    plant(monkeypatch)
    with pytest.raises(Violation, match=rf"history \d+: .*({invariant})"):
        play_all(range(1_500))
