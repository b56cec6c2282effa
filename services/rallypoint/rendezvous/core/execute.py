"""One step of a run: a command, or the passing of time, carried through to all its consequences."""

from __future__ import annotations

from rallypoint.rendezvous.core import commands, facts, newcomers, restarts
from rallypoint.rendezvous.core.apply import apply
from rallypoint.rendezvous.core.decide import available_nodes, decide, eldest_node, next_consequence
from rallypoint.rendezvous.core.leases import prune, spared_until
from rallypoint.rendezvous.core.state import Phase, RunState


def carry_out(state: RunState, command: commands.Command, now: float) -> list[facts.Fact]:
    """Decide and apply a command; returns the facts that it stated, in order. Their consequences are to be settled.

    Raises:
        Refused: The command is not taken, and the state has not changed.
    """
    decided = decide(state, command, now)
    for fact in decided:
        apply(state, fact, now)
    return decided


def execute(state: RunState, command: commands.Command, now: float) -> list[facts.Fact]:
    """Carry out a command and settle. Returns every fact that came of it, in order.

    Raises:
        Refused: The command is not taken, and the state has not changed.
    """
    return carry_out(state, command, now) + settle(state, now)


def settle(state: RunState, now: float) -> list[facts.Fact]:
    """Let happen to a run whatever must happen by now. Returns the facts, in order."""
    settled: list[facts.Fact] = []
    restarts.forget_old(state, now)
    if state.hold_until is not None and now >= state.hold_until:
        state.hold_until = None
    if state.settle_deadline is not None and now >= state.settle_deadline:
        state.settle_deadline = None
    prune(state, now)
    while (fact := next_consequence(state, now)) is not None:
        apply(state, fact, now)
        settled.append(fact)
        prune(state, now)
    return settled


def begin_to_confirm(state: RunState, now: float) -> None:
    """Give the participants of a FROZEN round their time to confirm: from when they are told of it, that is now."""
    if state.phase is Phase.FROZEN:
        state.confirm_deadline = now + state.settings.confirm_timeout


def next_deadline(state: RunState) -> float | None:
    """When to settle next if no command comes: monotonic seconds, or None. May be early, never late."""
    deadlines = [
        state.confirm_deadline,
        next(iter(state.departing.values()), None),
        restarts.next_to_be_forgotten(state),
    ]
    # Until nodes that leave have gone, those that are missed are back, and the restart is no longer held back, the end
    # of the last call means nothing.
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
    eldest = eldest_node(state)
    if state.phase is Phase.JOINABLE and eldest is not None and state.present < state.settings.min_nodes:
        deadlines.append(eldest.waiting_since + state.settings.join_timeout)
    return min((deadline for deadline in deadlines if deadline is not None), default=None)
