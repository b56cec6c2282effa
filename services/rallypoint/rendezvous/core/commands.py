"""Commands: requests of nodes and people to change a run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TypeAlias

from rallypoint.rendezvous.core.state import Outcome, ReportedFailure, RunSettings


class ActorKind(IntEnum):
    """The kind of an actor."""

    SERVICE = 1
    NODE = 2
    OPERATOR = 3


@dataclass(frozen=True, slots=True)
class Actor:
    """Who caused a change: the name of a node or an operator, and the client's address."""

    kind: ActorKind
    name: str = ""
    peer: str = ""

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.name or self.peer}".rstrip()


SERVICE = Actor(ActorKind.SERVICE)
"""The actor of deadlines and consequences, which no client requested."""


@dataclass(frozen=True, slots=True)
class Join:
    """A node requests a lease."""

    node_id: str
    settings: RunSettings
    address: str
    local_world_size: int
    role: str
    topology: str = ""
    supervisor_address: str = ""
    # Incarnation of the run, if this creates it.
    incarnation: str = ""
    # Secret of the lease; and the name in the node's certificate or token, empty: it has none.
    token: bytes = field(default=b"", repr=False)
    identity: str = ""
    # The client whose run it is, if this creates it; empty: none.
    client: str = ""
    # Incarnation in which the same agent held a lease before; empty: it held none.
    former_incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Confirm:
    """A node confirms that no worker of an earlier round is alive on it."""

    node_id: str
    lease: int
    round: int
    master_port: int


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """A node reports that one of its workers failed."""

    node_id: str
    lease: int
    failure: ReportedFailure

    def aged(self, seconds: float) -> ReportFailure:
        """Return the report with its age increased by `seconds`, the time that it waited in the server."""
        return replace(self, failure=replace(self.failure, age=self.failure.age + max(0.0, seconds)))


@dataclass(frozen=True, slots=True)
class ReportSuccess:
    """A node reports that all its workers succeeded."""

    node_id: str
    lease: int
    round: int


@dataclass(frozen=True, slots=True)
class Depart:
    """A node announces that it stops its workers in order to leave."""

    node_id: str
    lease: int
    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """A node gives its lease back."""

    node_id: str
    lease: int
    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """An operator ends the run; `incarnation`: only if it is the present one; empty: any."""

    reason: str
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Forget:
    """An operator has the run forgotten at once, instead of hours after its last node.

    `incarnation`: only if it is the present one; empty: any.
    """

    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """An operator restarts all workers; `round`: only if it is the latest round."""

    reason: str
    round: int | None = None


@dataclass(frozen=True, slots=True)
class Evict:
    """An operator removes a node from the run, and keeps it out; `lease`: only if the node holds it."""

    node_id: str
    reason: str
    lease: int | None = None


@dataclass(frozen=True, slots=True)
class Readmit:
    """An operator lets a node in again."""

    node_id: str
    reason: str


Command: TypeAlias = (
    Join
    | Confirm
    | ReportFailure
    | ReportSuccess
    | Depart
    | Leave
    | Close
    | Forget
    | Restart
    | Evict
    | Readmit
)


# ---- Refusals: why a command was not accepted. Each has fields for programs and one sentence for people.


class Refused(Exception):
    """A command was refused; the state has not changed."""


@dataclass(eq=False)
class RunNotFound(Refused):
    """No run of that name."""

    run_id: str

    def __str__(self) -> str:
        return f"there is no run {self.run_id!r}"


@dataclass(eq=False)
class RunIsClosed(Refused):
    """The run is over, and not reopened for this node."""

    run_id: str
    outcome: Outcome
    detail: str

    def __str__(self) -> str:
        return (
            f"run {self.run_id!r} is closed ({self.outcome.name}: {self.detail}); "
            "start a new one under another run id"
        )


@dataclass(eq=False)
class RunIsEnding(Refused):
    """The run is closed, and can be reopened once nodes that were in it have gone: `node_ids`, sorted.

    None: once its data is deleted; that is for the service itself, which then repeats the request.
    """

    run_id: str
    node_ids: tuple[str, ...]

    @property
    def nodes(self) -> int:
        """Number of these nodes."""
        return len(self.node_ids)

    def __str__(self) -> str:
        which = "".join(f" {node_id}" for node_id in self.node_ids[:1])
        more = self.nodes - 1
        others = f" and {more} other{'s' * (more > 1)}" if more > 0 else ""
        return (
            f"run {self.run_id!r} is closed, and node{which}{others} of it did not leave yet: the run can be opened "
            "again when its workers have stopped, or its lease is over"
        )


@dataclass(eq=False)
class RunInUse(Refused):
    """A run can't be deleted: it has nodes."""

    run_id: str
    nodes: int

    def __str__(self) -> str:
        return f"run {self.run_id!r} has {self.nodes} nodes: close it first"


@dataclass(eq=False)
class SettingsDiffer(Refused):
    """A node came with other settings than the run has; {setting: (the run's, the node's)}."""

    run_id: str
    differences: dict[str, tuple[object, object]]

    def __str__(self) -> str:
        listed = ", ".join(
            f"{name} is {_shown(ours)}, not {_shown(theirs)}"
            for name, (ours, theirs) in self.differences.items()
        )
        return (
            f"run {self.run_id!r} has other settings: {listed}; all its nodes must be started with the same"
        )


def _shown(setting: object) -> str:
    return setting.name if isinstance(setting, IntEnum) else str(setting)


@dataclass(eq=False)
class LeaseLost(Refused):
    """The lease expired, was given back, or was superseded by a newer one of the same node.

    `detail`: which of these, where it is known.
    """

    run_id: str
    node_id: str
    lease: int
    current: int | None
    detail: str = ""

    def __str__(self) -> str:
        ended = (
            "it expired, or was given back" if self.current is None else f"lease {self.current} superseded it"
        )
        why = self.detail or ended
        return f"node {self.node_id!r} no longer holds lease {self.lease} in run {self.run_id!r}: {why}"


@dataclass(eq=False)
class LeaseNotProven(Refused):
    """The token is not that of the lease."""

    run_id: str
    node_id: str

    def __str__(self) -> str:
        return (
            f"the token is not that of the lease of node {self.node_id!r} in run {self.run_id!r}: "
            "send the one that came with the lease"
        )


@dataclass(eq=False)
class NodeIdTaken(Refused):
    """A client of another name holds the node's lease."""

    run_id: str
    node_id: str
    identity: str

    def __str__(self) -> str:
        return (
            f"{self.identity!r} is node {self.node_id!r} in run {self.run_id!r}, and only it may join again as "
            "that node before its lease ends; choose another node id"
        )


@dataclass(eq=False)
class NodeIsEvicted(Refused):
    """The node was taken out of the run: by an operator, or by the service because its workers failed."""

    run_id: str
    node_id: str
    reason: str
    by_service: bool = False

    @property
    def by(self) -> str:
        """The actor of the eviction: "service" or "operator"."""
        return "service" if self.by_service else "operator"

    def __str__(self) -> str:
        return (
            f"node {self.node_id!r} was taken out of run {self.run_id!r}"
            f"{'' if self.by_service else ' by an operator'} ({self.reason}); "
            "it may join again once it is readmitted"
        )


@dataclass(eq=False)
class TooManyEvicted(Refused):
    """The run refuses as many nodes as it can remember."""

    run_id: str
    limit: int

    def __str__(self) -> str:
        return f"run {self.run_id!r} refuses {self.limit} nodes already; readmit some of them first"


@dataclass(eq=False)
class RoundOver(Refused):
    """The round is not the latest of its run any more."""

    run_id: str
    round: int
    current_round: int

    def __str__(self) -> str:
        return (
            f"round {self.round} of run {self.run_id!r} is over; round {self.current_round} takes its place"
        )


@dataclass(eq=False)
class RevisionAhead(Refused):
    """A resume cursor that this run never gave out."""

    run_id: str
    revision: int
    current: int

    def __str__(self) -> str:
        return f"revision {self.revision} of run {self.run_id!r} was never given out; it is at {self.current}"


@dataclass(eq=False)
class JoinTimedOut(Refused):
    """Too few nodes came before the node's join timeout; times in seconds."""

    run_id: str
    node_id: str
    min_nodes: int
    join_timeout: float

    def __str__(self) -> str:
        return (
            f"node {self.node_id!r} was turned away: run {self.run_id!r} had fewer than {self.min_nodes} nodes "
            f"for {self.join_timeout:g} s; start the missing ones, or allow a longer join_timeout"
        )
