"""Decisions: the facts that a command, or the passing of time, adds to a run."""

from __future__ import annotations

from dataclasses import fields
from functools import singledispatch
from itertools import islice

from rallypoint.rendezvous.core import commands, facts, failures, newcomers, starts
from rallypoint.rendezvous.core.apply import apply, end_lingering, leave_closed, prune, spared_until
from rallypoint.rendezvous.core.commands import (
    LeaseLost,
    LeaseNotProven,
    NodeIdTaken,
    NodeIsEvicted,
    RevisionAhead,
    RunIsClosed,
    RunIsEnding,
    SettingsDiffer,
    TooManyEvicted,
)
from rallypoint.rendezvous.core.facts import explain_newcomers
from rallypoint.rendezvous.core.failures import MOST_EVICTED
from rallypoint.rendezvous.core.ranks import assign_seats
from rallypoint.rendezvous.core.state import (
    LossReason,
    Outcome,
    Phase,
    Reopen,
    RoundEnd,
    RoundEndCause,
    RunEnd,
    RunSettings,
    RunState,
)


def decide(state: RunState, command: commands.Command, now: float) -> list[facts.Fact]:
    """Return the facts by which a command changes a run, to be applied in order; none if nothing changes.

    Args:
        now: Seconds of the server's monotonic clock.

    Raises:
        Refused: The command is not accepted; see the refusals in `commands`.
    """
    if isinstance(command, commands.Forget | commands.Close) and command.incarnation not in (
        "",
        state.incarnation,
    ):
        if isinstance(command, commands.Close) and end_of(state, command.incarnation) is not None:
            return []  # it has ended, and the run was reopened since
        raise commands.RunNotFound(state.run_id)
    if state.phase is Phase.CLOSED:
        return _decide_closed(state, command)
    if isinstance(command, commands.ReportFailure):
        decided = _report_failure(command, state, now)
    else:
        decided = _decide(command, state)
    if decided and isinstance(decided[0], facts.WorkerFailed | facts.RunClosed):
        return _with_start(state, decided, now)
    return decided


def _with_start(state: RunState, decided: list[facts.Fact], now: float) -> list[facts.Fact]:
    """Return facts that end the round, or fail it, after the one about its start if that is not recorded yet."""
    start = starts.to_record(state, now, over=True)
    return decided if start is None else [start, *decided]


def _decide_closed(state: RunState, command: commands.Command) -> list[facts.Fact]:
    match command:
        case commands.Close() | commands.Forget() | commands.Restart():
            return []  # there is nothing left to close or to restart, and a deleted run has no facts
        case commands.Leave() if lingers(state, command.node_id, command.lease):
            return []  # it has no rights, so that it goes is no fact; see `carry_out`
        case commands.Readmit():
            return _readmit(command, state)  # the run may be reopened
        case commands.Join() if _reopens(command, state):
            return _reopen(command, state)
    assert state.run_end is not None, "a closed run has an end"
    raise RunIsClosed(state.run_id, state.run_end.outcome, state.run_end.detail)


_REOPENED = {
    Reopen.NEVER: frozenset[Outcome](),
    Reopen.FAILED: frozenset({Outcome.FAILED, Outcome.CANCELLED}),
    Reopen.ALWAYS: frozenset(Outcome),
}


def _reopens(command: commands.Join, state: RunState) -> bool:
    """True if a join may reopen the closed run; an agent that was in it before must learn of its end instead."""
    assert state.run_end is not None, "a closed run has an end"
    was_in = command.former_incarnation != "" and (
        command.former_incarnation == state.incarnation
        or end_of(state, command.former_incarnation) is not None
    )
    return not was_in and state.run_end.outcome in _REOPENED[state.settings.reopen]


def _reopen(command: commands.Join, state: RunState) -> list[facts.Fact]:
    """Return the facts with which a closed run begins again.

    No two incarnations of a run have nodes at once: there is no such fact while a node of the last one lingers, and
    with it the leases and rounds of that one are below all that are granted from now on.
    """
    name = state.evicted_as(command.node_id)
    if name is not None and not state.evicted[name].by_service:
        raise _evicted(state, command.node_id, name)
    if state.lingering:
        raise RunIsEnding(state.run_id, tuple(sorted(state.lingering)))
    # With a number that grows: the clock from which the name is made may have been set back.
    incarnation = f"{command.incarnation}.{state.revision + 1}"
    created = facts.RunCreated(command.settings, incarnation, reopened=True)
    return [created, _joined(command, state.revision + 2)]


def end_of(state: RunState, incarnation: str) -> RunEnd | None:
    """Return how an earlier incarnation of the run ended; None: it is not known."""
    return next((each.end for each in state.ended_incarnations if each.incarnation == incarnation), None)


def lingers(state: RunState, node_id: str, lease: int) -> bool:
    """True if the run is closed, and a node that held this lease at its end has not gone."""
    node = state.lingering.get(node_id)
    return node is not None and node.lease == lease


@singledispatch
def _decide(command: object, state: RunState) -> list[facts.Fact]:
    raise TypeError(f"not a command: {command!r}")


@_decide.register
def _join(command: commands.Join, state: RunState) -> list[facts.Fact]:
    decided: list[facts.Fact] = []
    if not state.created:
        decided.append(facts.RunCreated(command.settings, command.incarnation))
    elif command.former_incarnation and (end := end_of(state, command.former_incarnation)) is not None:
        raise RunIsClosed(state.run_id, end.outcome, end.detail)
    elif command.settings != state.settings:
        raise SettingsDiffer(state.run_id, _differences(state.settings, command.settings))
    if (name := state.evicted_as(command.node_id)) is not None:
        raise _evicted(state, command.node_id, name)
    if (former := state.nodes.get(command.node_id)) is not None:
        if former.identity not in ("", command.identity):
            raise NodeIdTaken(state.run_id, command.node_id, former.identity)
        decided.append(_lost(state, command.node_id, LossReason.SUPERSEDED))
    decided.append(_joined(command, state.revision + len(decided) + 1))
    return decided


def _joined(command: commands.Join, revision: int) -> facts.NodeJoined:
    """Return the fact of `revision`, which is the lease's number: it only grows, and is unique."""
    return facts.NodeJoined(
        command.node_id,
        revision,
        command.address,
        command.local_world_size,
        command.role,
        command.topology,
        command.token,
        command.identity,
        command.supervisor_address,
    )


def _differences(ours: RunSettings, theirs: RunSettings) -> dict[str, tuple[object, object]]:
    pairs = {field.name: (getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(ours)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@_decide.register
def _confirm(command: commands.Confirm, state: RunState) -> list[facts.Fact]:
    check_lease(state, command.node_id, command.lease)
    current = state.phase is Phase.FROZEN and command.round == state.round
    if not current or command.node_id not in state.unconfirmed:
        return []
    return [facts.NodeConfirmed(command.round, command.node_id, command.master_port)]


def _report_failure(command: commands.ReportFailure, state: RunState, now: float) -> list[facts.Fact]:
    check_lease(state, command.node_id, command.lease)
    running = _runs(state, command.node_id, command.failure.round)
    fact = failures.take(state, command.node_id, command.failure, now, running=running)
    return [] if fact is None else [fact]


@_decide.register
def _report_success(command: commands.ReportSuccess, state: RunState) -> list[facts.Fact]:
    check_lease(state, command.node_id, command.lease)
    if not _runs(state, command.node_id, command.round) or command.node_id in state.succeeded:
        return []
    return [facts.NodeSucceeded(command.round, command.node_id)]


@_decide.register
def _depart(command: commands.Depart, state: RunState) -> list[facts.Fact]:
    check_lease(state, command.node_id, command.lease)
    if command.node_id in state.departing:
        return []
    return [facts.NodeDeparting(command.node_id, command.reason)]


@_decide.register
def _leave(command: commands.Leave, state: RunState) -> list[facts.Fact]:
    check_lease(state, command.node_id, command.lease)
    return [facts.NodeLeft(command.node_id, command.reason)]


@_decide.register
def _close(command: commands.Close, state: RunState) -> list[facts.Fact]:
    return [facts.RunClosed(RunEnd(Outcome.CANCELLED, f"closed by an operator: {command.reason}"))]


@_decide.register
def _forget(command: commands.Forget, state: RunState) -> list[facts.Fact]:
    if state.nodes:
        raise commands.RunInUse(state.run_id, len(state.nodes))
    return []


@_decide.register
def _restart(command: commands.Restart, state: RunState) -> list[facts.Fact]:
    if command.round is not None and command.round != state.round:
        raise commands.RoundOver(state.run_id, command.round, state.round)
    no_round = state.phase is Phase.JOINABLE and state.hold_until is None
    if no_round or state.breach is not None:
        return []  # there is nothing to restart, or the round ends anyway
    return [facts.RestartRequested(state.round, command.reason)]


@_decide.register
def _evict(command: commands.Evict, state: RunState) -> list[facts.Fact]:
    if command.node_id in state.evicted:
        return []
    if len(state.evicted) >= MOST_EVICTED:
        raise TooManyEvicted(state.run_id, MOST_EVICTED)
    node = state.nodes.get(command.node_id)
    if command.lease is not None and (node is None or node.lease != command.lease):
        raise LeaseLost(state.run_id, command.node_id, command.lease, node.lease if node else None)
    return [facts.NodeEvicted(command.node_id, command.reason, node.lease if node else 0)]


@_decide.register
def _readmit(command: commands.Readmit, state: RunState) -> list[facts.Fact]:
    if command.node_id not in state.evicted:
        return []
    return [facts.NodeReadmitted(command.node_id, command.reason)]


def check_lease(state: RunState, node_id: str, lease: int, token: bytes | None = None) -> None:
    """Check that a node holds the lease it sent; `token` proves that, None: the stream of the node was proof.

    Raises:
        RunIsClosed: The run is over, and all leases with it; or it was, and was reopened since.
        NodeIsEvicted: The node was taken out.
        LeaseLost: The lease expired, was given back, or was superseded.
        LeaseNotProven: The token is that of no lease, or of another.
    """
    if state.run_end is not None:
        raise RunIsClosed(state.run_id, state.run_end.outcome, state.run_end.detail)
    if (ended := state.ended_before(lease)) is not None:
        raise RunIsClosed(state.run_id, ended.end.outcome, ended.end.detail)
    if node_id in state.evicted:
        raise _evicted(state, node_id, node_id)
    node = state.nodes.get(node_id)
    if node is None or node.lease != lease:
        raise LeaseLost(state.run_id, node_id, lease, node.lease if node else None)
    if token is not None and not node.is_proven_by(token):
        raise LeaseNotProven(state.run_id, node_id)


def _evicted(state: RunState, node_id: str, name: str) -> NodeIsEvicted:
    eviction = state.evicted[name]
    return NodeIsEvicted(state.run_id, node_id, eviction.reason, eviction.by_service)


def check_revision(state: RunState, revision: int) -> None:
    """Check a resume cursor: if this run never gave it out, its owner saw another run, or another journal.

    Raises:
        RevisionAhead: The run has not come that far.
    """
    if revision > state.revision:
        raise RevisionAhead(state.run_id, revision, state.revision)


def _runs(state: RunState, node_id: str, round_: int) -> bool:
    """True if the node's workers run in the round: reports of an earlier one no longer matter."""
    return state.phase is Phase.FINAL and round_ == state.round and node_id in state.seats


def next_consequence(state: RunState, now: float) -> facts.Fact | None:
    """Return the first fact that is due without a command; None if there is none.

    Apply it and call again. Costs O(log n), except where a round freezes or a confirm timeout is over.
    """
    if state.phase is Phase.CLOSED:
        return None
    if state.permanent_failure is not None and state.phase is not Phase.FINAL:
        # It was reported after its round had ended for another failure.
        return failures.end_by_permanent_failure(state.permanent_failure)
    return _expired_lease(state, now) or _overdue_departure(state, now) or _IN_PHASE[state.phase](state, now)


def _expired_lease(state: RunState, now: float) -> facts.Fact | None:
    if not state.lease_queue or max(state.lease_queue[0][0], spared_until(state)) > now:
        return None
    _, node_id, lease = state.lease_queue[0]
    node = state.nodes.get(node_id)
    if node is None or node.lease != lease or node.lease_deadline > now:
        return None  # out of date; `prune` takes it off the queue
    return _lost(state, node_id, node.loss_if_expired)


def _lost(state: RunState, node_id: str, reason: LossReason) -> facts.NodeLost:
    return facts.NodeLost(node_id, reason, failures.failed_round_of(state, node_id))


def _overdue_departure(state: RunState, now: float) -> facts.Fact | None:
    first = next(iter(state.departing.items()), None)
    if first is None or now < first[1]:
        return None
    return facts.NodeLost(first[0], LossReason.DEPARTURE_TIMED_OUT)


def _in_joinable(state: RunState, now: float) -> facts.Fact | None:
    settings, present = state.settings, state.present
    if present < settings.min_nodes:
        if state.eldest is not None and state.join_deadline is not None and now >= state.join_deadline:
            return _lost(state, state.eldest.node_id, LossReason.JOIN_TIMED_OUT)
        return None
    available = available_nodes(state)
    if available is None:
        return None
    held_back = newcomers.held_back(state, now)
    if available - len(held_back) >= settings.min_nodes:
        available -= len(held_back)
    else:
        held_back = set()  # the run needs them
    # A round that lost no node, found a replacement for each, or grew, waits for no more nodes.
    whole = state.former_size > 0 and available >= state.former_size
    called = state.last_call_deadline is not None and now >= state.last_call_deadline
    if state.held_up or not (available >= settings.max_nodes or whole or called):
        return None
    if state.hold_until is not None and now < state.hold_until:
        return None
    # Participants of the last round come first, so that no newcomer takes a survivor's place.
    left_out = held_back | state.disconnected | state.departing.keys()
    staying = (node for node in state.nodes.values() if node.node_id not in left_out)
    candidates = sorted(staying, key=lambda node: node.node_id not in state.former_ranks)
    chosen = list(islice(candidates, settings.max_nodes))
    return facts.RoundFrozen(state.round + 1, assign_seats(chosen, state.former_ranks, settings.rank_policy))


def available_nodes(state: RunState) -> int | None:
    """Return how many nodes a round could have now; None: it waits for nodes whose streams are broken.

    A participant of the last round has its disconnect grace to come back, so that no round is formed with a node that
    is gone. Newcomers without a stream are skipped if there are enough other nodes.
    """
    missing = [node_id for node_id in state.disconnected if node_id not in state.departing]
    if any(node_id in state.former_ranks for node_id in missing):
        return None
    available = state.present - len(missing)
    return available if available >= state.settings.min_nodes else None


def _in_frozen(state: RunState, now: float) -> facts.Fact | None:
    overdue = state.confirm_deadline is not None and now >= state.confirm_deadline
    if overdue and state.unconfirmed:
        return _lost(state, min(state.unconfirmed), LossReason.CONFIRM_TIMED_OUT)
    if state.breach is not None:
        return failures.ended(state, state.breach, now)
    if not state.unconfirmed:
        return facts.RoundFinalized(state.round)
    return None


def _in_final(state: RunState, now: float) -> facts.Fact | None:
    fact = _next_in_final(state, now)
    over = isinstance(fact, facts.RoundEnded | facts.RunClosed)
    return starts.to_record(state, now, over=over) or fact


def _next_in_final(state: RunState, now: float) -> facts.Fact | None:
    if state.breach is not None:
        return _end_of_breached_round(state, state.breach, now)
    if len(state.succeeded) == len(state.seats):
        workers = "the worker" if state.world_size == 1 else f"all {state.world_size} workers"
        return facts.RunClosed(RunEnd(Outcome.SUCCEEDED, f"{workers} of round {state.round} succeeded"))
    if state.exit_barrier_deadline is not None and now >= state.exit_barrier_deadline:
        return facts.ExitBarrierPassed(state.round)
    return _scale_up(state, now)


def _end_of_breached_round(state: RunState, breach: RoundEnd, now: float) -> facts.Fact | None:
    if breach.cause is not RoundEndCause.WORKER_FAILED:
        return failures.ended(state, breach, now)
    return failures.end_of_failed_round(state, breach, now)


def _scale_up(state: RunState, now: float) -> facts.Fact | None:
    """End the round for newcomers if the policy allows it, there is room, and some are ready."""
    due = newcomers.next_scale_up(state)
    if due is None or now < due:
        return None
    names = [node.node_id for node in newcomers.admissible(state, now)]
    detail = explain_newcomers(names)
    return failures.ended(state, RoundEnd(state.round, RoundEndCause.NODE_JOINED, names[0], detail), now)


_IN_PHASE = {Phase.JOINABLE: _in_joinable, Phase.FROZEN: _in_frozen, Phase.FINAL: _in_final}


# ---- One step of a run: a command, or the passing of time, carried through to all its consequences.


def carry_out(state: RunState, command: commands.Command, now: float) -> list[facts.Fact]:
    """Decide and apply a command; returns its facts, in order. Call `settle` for their consequences.

    Raises:
        Refused: The command is not accepted, and the state has not changed.
    """
    decided = decide(state, command, now)
    if isinstance(command, commands.Leave) and not decided:
        leave_closed(state, command.node_id)
    for fact in decided:
        apply(state, fact, now)
    return decided


def execute(state: RunState, command: commands.Command, now: float) -> list[facts.Fact]:
    """Carry out a command and settle. Returns all resulting facts, in order.

    Raises:
        Refused: The command is not accepted, and the state has not changed.
    """
    return carry_out(state, command, now) + settle(state, now)


def settle(state: RunState, now: float) -> list[facts.Fact]:
    """Apply all consequences that are due by now. Returns the facts, in order."""
    settled: list[facts.Fact] = []
    failures.forget_old(state, now)
    if state.hold_until is not None and now >= state.hold_until:
        state.hold_until = None
    if state.settle_deadline is not None and now >= state.settle_deadline:
        state.settle_deadline = None
    prune(state, now)
    if state.phase is Phase.CLOSED:
        end_lingering(state, now)
    while (fact := next_consequence(state, now)) is not None:
        apply(state, fact, now)
        settled.append(fact)
        prune(state, now)
    return settled


def begin_to_confirm(state: RunState, now: float) -> None:
    """Start the confirm timeout of a FROZEN round now, when its participants are informed of it."""
    if state.phase is Phase.FROZEN:
        state.confirm_deadline = now + state.settings.confirm_timeout


def next_deadline(state: RunState) -> float | None:
    """The time to settle next if no command comes: monotonic seconds, or None. May be early, never late."""
    deadlines = [
        state.confirm_deadline,
        next(iter(state.departing.values()), None),
        failures.next_to_be_forgotten(state),
    ]
    # The end of the last call matters only once leaving nodes have gone, missing ones are back, and the back-off is
    # over.
    if state.hold_until is not None:
        deadlines.append(state.hold_until)
    elif not state.held_up and available_nodes(state) is not None:
        deadlines.append(state.last_call_deadline)
    if state.phase is Phase.FINAL:
        deadlines.append(state.settle_deadline)
        if state.breach is None:  # a round that is about to end passes no barrier
            deadlines.append(state.exit_barrier_deadline)
        deadlines.append(newcomers.next_scale_up(state))
    if state.lease_queue:
        deadlines.append(max(state.lease_queue[0][0], spared_until(state)))
    deadlines.append(state.join_deadline)
    return min((deadline for deadline in deadlines if deadline is not None), default=None)
