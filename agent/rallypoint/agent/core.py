"""The decisions of an agent, pure: what it does when the run, its workers or its user change something.

`decide(state, event) -> (state, effects)`. Standard library only; no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeAlias


class Phase(Enum):
    """Phase of the run, as far as the agent was told."""

    JOINABLE = auto()
    FROZEN = auto()
    FINAL = auto()
    CLOSED = auto()


class Workers(Enum):
    """What the agent's workers do."""

    ABSENT = auto()
    RUNNING = auto()
    STOPPING = auto()


@dataclass(frozen=True, slots=True)
class Assignment:
    """The node's place in a round; the fields are those of the protocol's message."""

    round: int
    group_rank: int
    group_world_size: int
    base_rank: int
    world_size: int
    base_role_rank: int
    role_world_size: int
    master_address: str
    master_port: int
    fencing_token: int


@dataclass(frozen=True, slots=True)
class Updated:
    """The run changed; `detail` says how the round before ended."""

    phase: Phase
    assignment: Assignment | None = None
    restart_count: int = 0
    detail: str = ""
    exit_barrier_passed: bool = False


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The node's lease is lost; it is joining anew."""

    detail: str


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker of the running group failed, or could not be started."""


@dataclass(frozen=True, slots=True)
class WorkersSucceeded:
    """All workers of the running group ended with exit code 0."""


@dataclass(frozen=True, slots=True)
class WorkersGone:
    """The group was stopped: none of its processes, and none of their descendants, is alive.

    Where some outlive SIGKILL, NodeUnfit comes first, and this says that nothing more can be done about them.
    """


@dataclass(frozen=True, slots=True)
class NodeUnfit:
    """Processes of workers outlived SIGKILL, so no other round may run on this host; `detail` says which."""

    detail: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants this node to leave the run; `detail` says who."""

    detail: str


@dataclass(frozen=True, slots=True)
class MembershipEnded:
    """The node is out of the run: it left, the run was closed, or it was refused; `detail` says why it was refused."""

    detail: str = ""


Event: TypeAlias = (
    Updated
    | LeaseEnded
    | WorkerFailed
    | WorkersSucceeded
    | WorkersGone
    | NodeUnfit
    | StopRequested
    | MembershipEnded
)


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start the workers of a round."""

    assignment: Assignment
    restart_count: int


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Stop the workers; `detail` says why. WorkersGone follows."""

    detail: str


@dataclass(frozen=True, slots=True)
class Confirm:
    """Tell the run that no worker of an earlier round is alive here."""

    round: int


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Tell the run that a worker failed."""

    round: int


@dataclass(frozen=True, slots=True)
class ReportSuccess:
    """Tell the run that the workers succeeded."""

    round: int


@dataclass(frozen=True, slots=True)
class Depart:
    """Tell the run that this node stops its workers in order to leave."""

    detail: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Give the lease back. MembershipEnded follows."""

    detail: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left to do."""


Effect: TypeAlias = (
    StartWorkers | StopWorkers | Confirm | ReportFailure | ReportSuccess | Depart | Leave | Finish
)


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
    # Why this host can't run another round, once it can't.
    unfit: str | None = None
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
        case Updated():
            return replace(
                state,
                phase=event.phase,
                assignment=event.assignment,
                restart_count=event.restart_count,
                detail=event.detail,
                exit_barrier_passed=event.exit_barrier_passed,
            ), []
        case LeaseEnded():
            # As a newcomer the node has confirmed and started nothing.
            newcomer = replace(state, phase=Phase.JOINABLE, assignment=None, detail=event.detail)
            return replace(newcomer, confirmed=0, started=0, succeeded=0), []
        case WorkerFailed():
            if state.workers is not Workers.RUNNING:
                return state, []  # it died of being stopped
            stopping = replace(state, workers=Workers.STOPPING)
            # Told at once, before the others here are stopped: every moment of it is downtime on all nodes.
            return stopping, [ReportFailure(state.started), StopWorkers("a worker failed")]
        case WorkersSucceeded():
            if state.workers is not Workers.RUNNING:
                return state, []
            done = replace(state, workers=Workers.ABSENT, succeeded=state.started)
            return done, [ReportSuccess(state.started)]
        case WorkersGone():
            return replace(state, workers=Workers.ABSENT), []
        case NodeUnfit():
            return _note_unfit(state, event)
        case StopRequested():
            if state.leaving is not None or state.left or state.out:
                return state, []
            return replace(state, leaving=event.detail), [Depart(event.detail)]
        case MembershipEnded():
            return replace(state, out=True, detail=event.detail or state.detail), []


def _note_unfit(state: AgentState, event: NodeUnfit) -> tuple[AgentState, list[Effect]]:
    if state.unfit is not None:
        return state, []
    unfit = replace(state, unfit=event.detail)
    if state.leaving is not None or state.left or state.out:
        return unfit, []
    if state.workers is Workers.ABSENT and state.succeeded and state.succeeded == state.started:
        # What its workers have achieved stands: to go now would cost the others a round.
        return unfit, []
    # Told at once: the others need not wait for what will never end here.
    return replace(unfit, leaving=event.detail), [Depart(event.detail)]


def _next_step(state: AgentState) -> tuple[AgentState, Effect] | None:
    """The one thing to do next in this state, and the state after it; None where it is time to wait."""
    if state.finished:
        return None
    reason = _reason_to_stop(state)
    if state.workers is Workers.RUNNING and reason is not None:
        return replace(state, workers=Workers.STOPPING), StopWorkers(reason)
    if state.workers is not Workers.ABSENT:
        return None
    if state.out:
        return replace(state, finished=True), Finish()
    if state.leaving is not None:
        return None if state.left else (replace(state, left=True), Leave(state.leaving))
    if state.unfit is not None and not state.left and not _stands_by_success(state):
        return replace(state, leaving=state.unfit), Depart(state.unfit)
    seat = state.assignment
    if seat is None or state.left:
        return None
    if state.exit_barrier_passed and state.succeeded == seat.round:
        return replace(state, left=True), Leave("its workers succeeded, and the exit barrier is over")
    if state.phase is Phase.FROZEN and state.confirmed != seat.round:
        return replace(state, confirmed=seat.round), Confirm(seat.round)
    if state.phase is Phase.FINAL and state.confirmed == seat.round and state.started != seat.round:
        running = replace(state, workers=Workers.RUNNING, started=seat.round)
        return running, StartWorkers(seat, state.restart_count)
    return None


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
