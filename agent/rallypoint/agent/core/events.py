"""Vocabulary of an agent's core: the events that it takes, and the effects that it returns. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
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
