"""The decisions of an agent, pure: what it does when the run, its workers or its user change something.

`decide(state, event) -> (state, effects)`. Standard library only; no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from rallypoint.agent.core.events import (
    Assignment,
    CheckHealth,
    CollectFailures,
    DrainOver,
    DrainRequested,
    Effect,
    Event,
    Finish,
    GroupFailed,
    GroupStopped,
    GroupSucceeded,
    HealthChecked,
    LeaseEnded,
    MembershipEnded,
    NodeUnhealthy,
    Phase,
    RunUpdated,
    SendConfirm,
    SendDeparture,
    SendFailure,
    SendLeave,
    SendSuccess,
    StartWorkers,
    StopRequested,
    StopWorkers,
    WarnWorkers,
    Workers,
)

__all__ = [
    "AgentState",
    "Assignment",
    "CheckHealth",
    "CollectFailures",
    "DrainOver",
    "DrainRequested",
    "Effect",
    "Event",
    "Finish",
    "GroupFailed",
    "GroupStopped",
    "GroupSucceeded",
    "Health",
    "HealthChecked",
    "LeaseEnded",
    "MembershipEnded",
    "NodeUnhealthy",
    "Phase",
    "RunUpdated",
    "SendConfirm",
    "SendDeparture",
    "SendFailure",
    "SendLeave",
    "SendSuccess",
    "StartWorkers",
    "StopRequested",
    "StopWorkers",
    "WarnWorkers",
    "Workers",
    "decide",
]


class Health(Enum):
    """What is known of the host's health, where there are checks of it."""

    FOUND = auto()
    # Workers have run since: what was found a moment ago still holds.
    DOUBTED = auto()
    # Something went wrong here since: only a new look will do.
    SUSPECT = auto()


@dataclass(frozen=True, slots=True)
class AgentState:
    """What an agent knows and has done."""

    phase: Phase = Phase.JOINABLE
    assignment: Assignment | None = None
    restart_count: int = 0
    detail: str = ""
    # Whether nodes whose workers succeeded need wait for the others no longer.
    exit_barrier_passed: bool = False
    workers: Workers = Workers.ABSENT
    # The last round that this node confirmed, started, and finished with success; 0: none.
    confirmed: int = 0
    started: int = 0
    succeeded: int = 0
    # Whether the host's health can be looked into, and is to be before each round that the node confirms.
    checks: bool = False
    health: Health = Health.DOUBTED
    examining: bool = False
    # The last round for which the host was found healthy.
    fit_for: int = 0
    # Why this host can't run another round, once it can't.
    unhealthy: str | None = None
    # Why this node is to leave as soon as its workers are done or have saved their state, once it is.
    draining: str | None = None
    # Why this node is to leave, once it is.
    leaving: str | None = None
    left: bool = False
    # Out of the run: nothing can be told to it any more.
    out: bool = False
    finished: bool = False


def decide(state: AgentState, event: Event) -> tuple[AgentState, list[Effect]]:
    """Take an event; returns the new state and what is to be done, in order."""
    if state.finished:
        return state, []
    state, effects = _note(state, event)
    while (step := _next_step(state)) is not None:
        state, effect = step
        effects.append(effect)
    return state, effects


def _note(state: AgentState, event: Event) -> tuple[AgentState, list[Effect]]:
    """What an event says, and what it calls for whatever else is the case."""
    match event:
        case RunUpdated():
            return _note_update(state, event)
        case LeaseEnded():
            # As a newcomer the node has confirmed and started nothing.
            newcomer = replace(state, phase=Phase.JOINABLE, assignment=None, detail=event.detail)
            newcomer = replace(newcomer, confirmed=0, started=0, succeeded=0)
            return replace(newcomer, health=Health.SUSPECT, fit_for=0), []
        case GroupFailed():
            return _note_failure(state)
        case GroupSucceeded():
            if state.workers is not Workers.RUNNING:
                return state, []
            done = replace(state, workers=Workers.ABSENT, succeeded=state.started)
            return done, [SendSuccess(state.started)]
        case GroupStopped():
            return replace(state, workers=Workers.ABSENT), []
        case HealthChecked():
            seat = state.assignment if state.phase is Phase.FROZEN else None
            fit_for = seat.round if seat is not None else state.fit_for
            return replace(state, health=Health.FOUND, examining=False, fit_for=fit_for), []
        case StopRequested() | DrainRequested() | DrainOver() | NodeUnhealthy():
            return _note_parting(state, event)
        case MembershipEnded():
            return replace(state, out=True, detail=event.detail or state.detail), []


def _note_update(state: AgentState, event: RunUpdated) -> tuple[AgentState, list[Effect]]:
    updated = replace(
        state,
        phase=event.phase,
        assignment=event.assignment,
        restart_count=event.restart_count,
        detail=event.detail,
        exit_barrier_passed=event.exit_barrier_passed,
    )
    concerned = event.settling and state.workers is Workers.RUNNING and _reason_to_stop(updated) is None
    return updated, [CollectFailures()] if concerned else []


def _is_leaving(state: AgentState) -> bool:
    """Whether this node is on its way out, or is out."""
    return state.leaving is not None or state.left or state.out


def _parts(state: AgentState) -> bool:
    """Whether what becomes of this node's workers is the run's matter no longer."""
    return _is_leaving(state) or state.draining is not None or state.phase is Phase.CLOSED


def _depart(state: AgentState, detail: str) -> tuple[AgentState, list[Effect]]:
    return replace(state, leaving=detail), [SendDeparture(detail)]


def _note_parting(
    state: AgentState, event: StopRequested | DrainRequested | DrainOver | NodeUnhealthy
) -> tuple[AgentState, list[Effect]]:
    """What calls for this node to leave, now or soon. Who is going already goes on."""
    match event:
        case NodeUnhealthy():
            return _note_unhealthy(state, event)
        case StopRequested() if not _is_leaving(state):
            return _depart(state, event.detail)
        case DrainRequested() if not _is_leaving(state) and state.draining is None:
            warned: list[Effect] = [WarnWorkers(event.detail)] if state.workers is Workers.RUNNING else []
            return replace(state, draining=event.detail), warned
        case DrainOver() if not _is_leaving(state) and state.draining is not None:
            return _depart(state, f"{state.draining} ({event.how})")
    return state, []


def _note_failure(state: AgentState) -> tuple[AgentState, list[Effect]]:
    if state.workers is Workers.STOPPING and state.started and not _parts(state):
        # The end of the round was told while this was on its way. What it caused elsewhere was heard of first.
        return replace(state, health=Health.SUSPECT), [SendFailure(state.started)]
    if state.workers is not Workers.RUNNING:
        return state, []
    stopping = replace(state, workers=Workers.STOPPING, health=Health.SUSPECT)
    if state.draining is not None and not _is_leaving(state):
        # The node takes its workers away in any case: that must not cost the run a restart of its budget.
        stopping, departed = _depart(stopping, f"{state.draining} (a worker of it failed meanwhile)")
        return stopping, [*departed, StopWorkers("a worker failed")]
    # Told at once, before the others here are stopped: every moment of it is downtime on all nodes.
    return stopping, [SendFailure(state.started), StopWorkers("a worker failed")]


def _note_unhealthy(state: AgentState, event: NodeUnhealthy) -> tuple[AgentState, list[Effect]]:
    if state.unhealthy is not None:
        return state, []
    unfit = replace(state, unhealthy=event.detail)
    if _is_leaving(state):
        return unfit, []
    if state.workers is Workers.ABSENT and state.succeeded and state.succeeded == state.started:
        # What its workers have achieved stands: to go now would cost the others a round.
        return unfit, []
    # Told at once: the others need not wait for what will never end here.
    return _depart(unfit, event.detail)


def _next_step(state: AgentState) -> tuple[AgentState, Effect] | None:
    """The one thing to do next in this state, and the state after it; None where it is time to wait."""
    if state.finished:
        return None
    reason = _reason_to_stop(state)
    if state.draining is not None and _has_drained(state, reason):
        return replace(state, leaving=state.draining), SendDeparture(state.draining)
    if state.workers is Workers.RUNNING and reason is not None:
        return replace(state, workers=Workers.STOPPING), StopWorkers(reason)
    if state.workers is not Workers.ABSENT:
        return None
    if state.out:
        return replace(state, finished=True), Finish()
    if state.left:
        return None
    return _step_out(state) if _is_to_go(state) else _step_in(state)


def _is_to_go(state: AgentState) -> bool:
    """Whether this node, without workers, is on its way out of the run."""
    unfit = state.unhealthy is not None and not _stands_by_success(state)
    seat = state.assignment
    let_go = state.exit_barrier_passed or state.draining is not None
    done = let_go and seat is not None and state.succeeded == seat.round
    return state.leaving is not None or unfit or done


def _step_out(state: AgentState) -> tuple[AgentState, Effect]:
    gone = replace(state, left=True)
    if state.leaving is not None:
        return gone, SendLeave(state.leaving)
    if state.unhealthy is not None and not _stands_by_success(state):
        return replace(state, leaving=state.unhealthy), SendDeparture(state.unhealthy)
    # The round does without those that have done their part.
    why = "the exit barrier is over" if state.exit_barrier_passed else f"{state.draining}"
    return gone, SendLeave(f"its workers succeeded, and {why}")


def _step_in(state: AgentState) -> tuple[AgentState, Effect] | None:
    """The next step towards workers that run."""
    if state.checks and not state.examining and _is_to_be_examined(state):
        return replace(state, examining=True), CheckHealth(fresh=state.health is Health.SUSPECT)
    seat = state.assignment
    if seat is None:
        return None
    fit = not state.checks or state.fit_for == seat.round
    if state.phase is Phase.FROZEN and state.confirmed != seat.round and fit:
        return replace(state, confirmed=seat.round), SendConfirm(seat.round)
    if state.phase is Phase.FINAL and state.confirmed == seat.round and state.started != seat.round:
        running = replace(state, workers=Workers.RUNNING, started=seat.round, health=Health.DOUBTED)
        return running, StartWorkers(seat, state.restart_count)
    return None


def _has_drained(state: AgentState, reason: str | None) -> bool:
    """Whether a node that is being drained has no workers left to wait for, and is to say that it goes."""
    if _is_leaving(state) or state.phase is Phase.CLOSED:
        return False
    if state.workers is Workers.RUNNING:
        return reason is not None
    return state.workers is Workers.STOPPING or not _stands_by_success(state)


def _is_to_be_examined(state: AgentState) -> bool:
    """Whether it is time to look into the host's health: while a round forms, and at the latest when it waits."""
    seat = state.assignment
    if state.phase is Phase.FROZEN and seat is not None:
        return seat.round not in (state.confirmed, state.fit_for)
    return state.phase is Phase.JOINABLE and state.health is not Health.FOUND


def _stands_by_success(state: AgentState) -> bool:
    """Whether the round in which the workers here succeeded is still the latest, or the last."""
    seat = state.assignment
    latest = state.phase is Phase.FINAL and seat is not None and seat.round == state.succeeded
    return latest or state.phase is Phase.CLOSED


def _reason_to_stop(state: AgentState) -> str | None:
    """Why the workers that run must stop; None if they may run on."""
    if state.leaving is not None:
        return state.leaving
    if state.phase is Phase.CLOSED:
        return "the run is closed"
    if state.out:
        return state.detail or "this node is no longer in the run"
    if (
        state.phase is Phase.FINAL
        and state.assignment is not None
        and state.assignment.round == state.started
    ):
        return None
    return state.detail or "a new round is being formed"
