"""The words of an agent's core: the events that it is told of, and the effects that it answers with. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
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
class RunUpdated:
    """The run changed; `detail` says how the round before ended.

    `settling`: a worker failed somewhere, and before that ends the run it is to be known which failure was the first.
    """

    phase: Phase
    assignment: Assignment | None = None
    restart_count: int = 0
    detail: str = ""
    exit_barrier_passed: bool = False
    settling: bool = False


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The node's lease is lost; it is joining anew."""

    detail: str


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """A worker of the latest group failed, or could not be started; never for being stopped."""


@dataclass(frozen=True, slots=True)
class GroupSucceeded:
    """All workers of the running group ended with exit code 0."""


@dataclass(frozen=True, slots=True)
class GroupStopped:
    """The group was stopped: none of its processes, and none of their descendants, is alive.

    Where some outlive SIGKILL, NodeUnhealthy comes first, and this says that nothing more can be done about them.
    """


@dataclass(frozen=True, slots=True)
class HealthChecked:
    """The host was found healthy; NodeUnhealthy comes instead if it was not."""


@dataclass(frozen=True, slots=True)
class NodeUnhealthy:
    """No other round may run on this host; `detail` says why: what outlived SIGKILL, or what a check found."""

    detail: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants this node to leave the run; `detail` says who."""

    detail: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """This node is to leave the run once its workers are done or have saved their state; `detail` says why."""

    detail: str


@dataclass(frozen=True, slots=True)
class DrainOver:
    """Nothing more is to be waited for: `how` says whether all workers here saved their state, or had their time."""

    how: str


@dataclass(frozen=True, slots=True)
class MembershipEnded:
    """The node is out of the run: it left, the run was closed, or it was refused; `detail` says why it was refused."""

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
    """Stop the workers; `detail` says why. GroupStopped follows."""

    detail: str


@dataclass(frozen=True, slots=True)
class CollectFailures:
    """Look whether a worker has raised that has not ended yet; if so, GroupFailed follows."""


@dataclass(frozen=True, slots=True)
class WarnWorkers:
    """Tell the workers that this node is going to leave, and why. DrainOver follows, in time."""

    detail: str


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Look into the host's health; Examined or NodeUnhealthy follows. `anew`: what was found earlier will not do."""

    fresh: bool


@dataclass(frozen=True, slots=True)
class SendConfirm:
    """Tell the run that no worker of an earlier round is alive here."""

    round: int


@dataclass(frozen=True, slots=True)
class SendFailure:
    """Tell the run that a worker failed."""

    round: int


@dataclass(frozen=True, slots=True)
class SendSuccess:
    """Tell the run that the workers succeeded."""

    round: int


@dataclass(frozen=True, slots=True)
class SendDeparture:
    """Tell the run that this node stops its workers in order to leave."""

    detail: str


@dataclass(frozen=True, slots=True)
class SendLeave:
    """Give the lease back. MembershipEnded follows."""

    detail: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left to do."""


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
