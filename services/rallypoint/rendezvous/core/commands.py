"""Commands: what nodes and people ask of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from rallypoint.rendezvous.core.state import RunSettings, WorkerFailure


@dataclass(frozen=True, slots=True)
class Join:
    """A node asks for a lease."""

    node_id: str
    settings: RunSettings
    address: str
    local_world_size: int
    role: str
    topology: str = ""
    # Incarnation of the run, if this creates it.
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Confirm:
    """A node says that no worker of an earlier round is alive on it."""

    node_id: str
    lease: int
    round: int
    master_port: int


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """A node says that one of its workers failed."""

    node_id: str
    lease: int
    failure: WorkerFailure

    def aged(self, seconds: float) -> ReportFailure:
        """The report as it is carried out so many seconds after it came."""
        return replace(self, failure=replace(self.failure, age=self.failure.age + max(0.0, seconds)))


@dataclass(frozen=True, slots=True)
class ReportSuccess:
    """A node says that all its workers succeeded."""

    node_id: str
    lease: int
    round: int


@dataclass(frozen=True, slots=True)
class Depart:
    """A node says that it stops its workers in order to leave."""

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
    """An operator ends the run."""

    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    """An operator wants all workers started anew."""

    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """An operator takes a node out, and keeps it out."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Readmit:
    """An operator lets a node in again."""

    node_id: str
    reason: str


Command: TypeAlias = (
    Join | Confirm | ReportFailure | ReportSuccess | Depart | Leave | Close | Restart | Evict | Readmit
)
