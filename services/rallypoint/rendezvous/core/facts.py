"""Facts: what happened to a run. Their fields are those of the messages of the same names in journal.proto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rallypoint.rendezvous.core.state import LossReason, RoundEnd, RunEnd, RunSettings, Seat, WorkerFailure


@dataclass(frozen=True, slots=True)
class RunCreated:
    """The run began."""

    settings: RunSettings
    # A new one each time a run of this name is created; "": of an older version.
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node got a lease; its number is the revision of this fact, so it grows and never comes twice."""

    node_id: str
    lease: int
    address: str
    local_world_size: int
    role: str
    topology: str = ""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node's lease ended without its doing; `failed_round`: workers of that round failed of it, 0: none did."""

    node_id: str
    reason: LossReason
    failed_round: int = 0


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """A node gave its lease back."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeDeparting:
    """A node is stopping its workers in order to leave."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeEvicted:
    """A node was taken out, or one barred that was not in; `lease` is the one that it lost, 0 for none.

    An operator did it, or the service by itself.
    """

    node_id: str
    reason: str
    lease: int = 0
    by_service: bool = False


@dataclass(frozen=True, slots=True)
class NodeReadmitted:
    """An operator let a node in again."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RoundFrozen:
    """A round got its number and its ranks; the seats are in the order of group ranks."""

    round: int
    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class NodeConfirmed:
    """A participant's old workers are gone."""

    round: int
    node_id: str
    master_port: int


@dataclass(frozen=True, slots=True)
class RoundFinalized:
    """All participants confirmed."""

    round: int


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker failed; `earliest`: before all of its round that were known."""

    failure: WorkerFailure
    earliest: bool = False


@dataclass(frozen=True, slots=True)
class NodeSucceeded:
    """All workers of a participant succeeded."""

    round: int
    node_id: str


@dataclass(frozen=True, slots=True)
class ExitBarrierPassed:
    """Participants that succeeded wait for the others no longer."""

    round: int


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """An operator asked for a restart of the round."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """A round ended, and the next is being formed."""

    end: RoundEnd
    restart_count: int
    counted_restarts: int = 0
    quick_restarts: int = 0
    failed_scale_ups: int = 0
    newcomers_passed: bool = False


@dataclass(frozen=True, slots=True)
class RunClosed:
    """The run is over for good."""

    end: RunEnd


Fact: TypeAlias = (
    RunCreated
    | NodeJoined
    | NodeLost
    | NodeLeft
    | NodeDeparting
    | NodeEvicted
    | NodeReadmitted
    | RoundFrozen
    | NodeConfirmed
    | RoundFinalized
    | WorkerFailed
    | NodeSucceeded
    | ExitBarrierPassed
    | RestartRequested
    | RoundEnded
    | RunClosed
)
