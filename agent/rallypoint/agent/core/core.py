"""Pure decisions of an agent when the run, its workers or its user change something.

`decide(state, event) -> (state, effects)`. Standard library only; no clock, no I/O. Events and effects come first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeAlias

from rallypoint.rendezvous.core.state import Phase


class Workers(Enum):
    """State of the agent's workers."""

    ABSENT = auto()
    RUNNING = auto()
    STOPPING = auto()


@dataclass(frozen=True, slots=True)
class Assignment:
    """The node's ranks in a round; the fields are those of the protocol's message."""

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
class RunUpdated:
    """The run changed; `detail`: how the previous round ended.

    `settling`: a worker failed on some node, and the settle window for reports of an earlier failure is open.
    """

    phase: Phase
    assignment: Assignment | None = None
    restart_count: int = 0
    detail: str = ""
    exit_barrier_passed: bool = False
    settling: bool = False


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The node's lease is lost; it joins again."""

    detail: str


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """A worker of the latest group failed, or could not be started. Not for a worker that ended because of a stop."""


@dataclass(frozen=True, slots=True)
class GroupSucceeded:
    """All workers of the running group ended with exit code 0."""


@dataclass(frozen=True, slots=True)
class GroupStopped:
    """The group was stopped: none of its processes, and none of their descendants, is alive.

    If some outlive SIGKILL, NodeUnhealthy comes first, and then this event: the agent has stopped trying to kill them.
    """


@dataclass(frozen=True, slots=True)
class HealthChecked:
    """The health checks passed; if not, NodeUnhealthy comes instead."""


@dataclass(frozen=True, slots=True)
class NodeUnhealthy:
    """No other round may run on this host; `detail`: the processes that outlived SIGKILL, or the failed check."""

    detail: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A user or a signal requested that this node leave the run; `detail`: the source of the request."""

    detail: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """This node must leave the run once its workers are done or have saved their state; `detail`: the reason."""

    detail: str


@dataclass(frozen=True, slots=True)
class DrainOver:
    """The wait of a drain is over; `how`: all workers here saved their state, or the grace period has ended."""

    how: str


@dataclass(frozen=True, slots=True)
class MembershipEnded:
    """The node is no longer a member: it left, the run was closed, or it was refused (`detail`: the reason)."""

    detail: str = ""


Event: TypeAlias = (
    RunUpdated
    | LeaseEnded
    | GroupFailed
    | GroupSucceeded
    | GroupStopped
    | HealthChecked
    | NodeUnhealthy
    | StopRequested
    | DrainRequested
    | DrainOver
    | MembershipEnded
)


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start the workers of a round."""

    assignment: Assignment
    restart_count: int


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Stop the workers; `detail`: the reason. GroupStopped follows."""

    detail: str


@dataclass(frozen=True, slots=True)
class CollectFailures:
    """Check whether a worker has raised and not ended yet; if so, GroupFailed follows."""


@dataclass(frozen=True, slots=True)
class WarnWorkers:
    """Warn the workers that this node is going to leave; `detail`: the reason. DrainOver follows later."""

    detail: str


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Run the health checks; HealthChecked or NodeUnhealthy follows. `fresh`: an earlier result is not valid."""

    fresh: bool


@dataclass(frozen=True, slots=True)
class SendConfirm:
    """Confirm to the run that no worker of an earlier round is alive here."""

    round: int


@dataclass(frozen=True, slots=True)
class SendFailure:
    """Report to the run that a worker failed."""

    round: int


@dataclass(frozen=True, slots=True)
class SendSuccess:
    """Report to the run that the workers succeeded."""

    round: int


@dataclass(frozen=True, slots=True)
class SendDeparture:
    """Announce to the run that this node stops its workers in order to leave."""

    detail: str


@dataclass(frozen=True, slots=True)
class SendLeave:
    """Give the lease back. MembershipEnded follows."""

    detail: str


@dataclass(frozen=True, slots=True)
class Finish:
    """End the job: there is nothing left to do."""


Effect: TypeAlias = (
    StartWorkers
    | StopWorkers
    | CollectFailures
    | WarnWorkers
    | CheckHealth
    | SendConfirm
    | SendFailure
    | SendSuccess
    | SendDeparture
    | SendLeave
    | Finish
)


class Health(Enum):
    """Result of the host's last health check, for a job with health checks."""

    FOUND = auto()
    # Workers have run since: a check of a moment ago is still valid.
    DOUBTED = auto()
    # Something went wrong on this host since: only a new check is valid.
    SUSPECT = auto()


@dataclass(frozen=True, slots=True)
class AgentState:
    """State of an agent: the latest update of the run, its own progress, and its plans to leave."""

    phase: Phase = Phase.JOINABLE
    assignment: Assignment | None = None
    restart_count: int = 0
    detail: str = ""
    # True if nodes whose workers succeeded no longer wait for the others.
    exit_barrier_passed: bool = False
    workers: Workers = Workers.ABSENT
    # The last rounds that this node confirmed, started, and finished with success; 0: none.
    confirmed: int = 0
    started: int = 0
    succeeded: int = 0
    # True if the job has health checks: they run before each round that the node confirms.
    checks: bool = False
    health: Health = Health.DOUBTED
    examining: bool = False
    # The last round for which the host was found healthy.
    fit_for: int = 0
    # Reason for which this host can't run another round; None: it can.
    unhealthy: str | None = None
    # Reason to leave as soon as the workers are done or have saved their state; None: the node is not drained.
    draining: str | None = None
    # Reason to leave now; None: the node stays.
    leaving: str | None = None
    left: bool = False
    # The membership has ended: nothing can be sent to the run any more.
    out: bool = False
    finished: bool = False


def decide(state: AgentState, event: Event) -> tuple[AgentState, list[Effect]]:
    """Take an event; return the new state and the effects to carry out, in order."""
    if state.finished:
        return state, []
    state, effects = _note(state, event)
    while (step := _next_step(state)) is not None:
        state, effect = step
        effects.append(effect)
    return state, effects


def _note(state: AgentState, event: Event) -> tuple[AgentState, list[Effect]]:
    """Note an event in the state; return the effects that it causes in any state."""
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
            assignment = state.assignment if state.phase is Phase.FROZEN else None
            fit_for = assignment.round if assignment is not None else state.fit_for
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
    """True if this node is leaving, has left, or is no longer a member."""
    return state.leaving is not None or state.left or state.out


def _parts(state: AgentState) -> bool:
    """True if a failure of this node's workers no longer concerns the run."""
    return _is_leaving(state) or state.draining is not None or state.phase is Phase.CLOSED


def _depart(state: AgentState, detail: str) -> tuple[AgentState, list[Effect]]:
    return replace(state, leaving=detail), [SendDeparture(detail)]


def _note_parting(
    state: AgentState, event: StopRequested | DrainRequested | DrainOver | NodeUnhealthy
) -> tuple[AgentState, list[Effect]]:
    """Note a reason for this node to leave, now or soon. A node that is leaving already continues to leave."""
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
        # The run ended the round before this failure was reported. Its consequences on other nodes were reported first.
        return replace(state, health=Health.SUSPECT), [SendFailure(state.started)]
    if state.workers is not Workers.RUNNING:
        return state, []
    stopping = replace(state, workers=Workers.STOPPING, health=Health.SUSPECT)
    if state.draining is not None and not _is_leaving(state):
        # The node stops its workers in any case: that must not cost the run a restart of its budget.
        stopping, departed = _depart(stopping, f"{state.draining} (one of its workers failed meanwhile)")
        return stopping, [*departed, StopWorkers("a worker failed")]
    # Report it before the other workers here are stopped: every moment until then is downtime on all nodes.
    return stopping, [SendFailure(state.started), StopWorkers("a worker failed")]


def _note_unhealthy(state: AgentState, event: NodeUnhealthy) -> tuple[AgentState, list[Effect]]:
    if state.unhealthy is not None:
        return state, []
    unhealthy = replace(state, unhealthy=event.detail)
    if _is_leaving(state):
        return unhealthy, []
    if state.workers is Workers.ABSENT and state.succeeded and state.succeeded == state.started:
        # Its workers have succeeded, and that counts: to leave now would cost the others a round.
        return unhealthy, []
    # Announce it at once: the other nodes must not wait for processes that never end here.
    return _depart(unhealthy, event.detail)


def _next_step(state: AgentState) -> tuple[AgentState, Effect] | None:
    """The next effect in this state, and the state after it; None if the agent must wait for an event."""
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
    """True if this node, which has no workers, must leave the run."""
    unhealthy = state.unhealthy is not None and not _stands_by_success(state)
    assignment = state.assignment
    let_go = state.exit_barrier_passed or state.draining is not None
    done = let_go and assignment is not None and state.succeeded == assignment.round
    return state.leaving is not None or unhealthy or done or state.phase is Phase.CLOSED


def _step_out(state: AgentState) -> tuple[AgentState, Effect]:
    gone = replace(state, left=True)
    if state.phase is Phase.CLOSED:
        return gone, SendLeave("the run is closed, and no worker is left here")
    if state.leaving is not None:
        return gone, SendLeave(state.leaving)
    if state.unhealthy is not None and not _stands_by_success(state):
        return replace(state, leaving=state.unhealthy), SendDeparture(state.unhealthy)
    # The round continues without nodes whose workers have succeeded.
    why = "the exit barrier is over" if state.exit_barrier_passed else f"{state.draining}"
    return gone, SendLeave(f"its workers succeeded, and {why}")


def _step_in(state: AgentState) -> tuple[AgentState, Effect] | None:
    """The next step towards running workers."""
    if state.checks and not state.examining and _is_to_be_examined(state):
        return replace(state, examining=True), CheckHealth(fresh=state.health is Health.SUSPECT)
    assignment = state.assignment
    if assignment is None:
        return None
    fit = not state.checks or state.fit_for == assignment.round
    if state.phase is Phase.FROZEN and state.confirmed != assignment.round and fit:
        return replace(state, confirmed=assignment.round), SendConfirm(assignment.round)
    if (
        state.phase is Phase.FINAL
        and state.confirmed == assignment.round
        and state.started != assignment.round
    ):
        running = replace(state, workers=Workers.RUNNING, started=assignment.round, health=Health.DOUBTED)
        return running, StartWorkers(assignment, state.restart_count)
    return None


def _has_drained(state: AgentState, reason: str | None) -> bool:
    """True if a node that is being drained has no workers left to wait for, and must announce that it leaves."""
    if _is_leaving(state) or state.phase is Phase.CLOSED:
        return False
    if state.workers is Workers.RUNNING:
        return reason is not None
    return state.workers is Workers.STOPPING or not _stands_by_success(state)


def _is_to_be_examined(state: AgentState) -> bool:
    """True if it is time to check the host's health: while a round forms, at the latest before its confirmation."""
    assignment = state.assignment
    if state.phase is Phase.FROZEN and assignment is not None:
        return assignment.round not in (state.confirmed, state.fit_for)
    return state.phase is Phase.JOINABLE and state.health is not Health.FOUND


def _stands_by_success(state: AgentState) -> bool:
    """True if the round in which the workers here succeeded is still the latest, or the run is closed."""
    assignment = state.assignment
    latest = state.phase is Phase.FINAL and assignment is not None and assignment.round == state.succeeded
    return latest or state.phase is Phase.CLOSED


def _reason_to_stop(state: AgentState) -> str | None:
    """Reason for which the running workers must stop; None if they may continue."""
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
