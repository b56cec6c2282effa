"""Facts: the recorded changes of a run. Their fields are those of the messages of the same names in journal.proto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rallypoint.rendezvous.core.state import (
    LossReason,
    RecoveryParts,
    ReportedFailure,
    RoundEnd,
    RunEnd,
    RunSettings,
    Seat,
)


@dataclass(frozen=True, slots=True)
class RunCreated:
    """The run began; again, if it was closed before."""

    settings: RunSettings
    # A new one each time a run of this name is created or reopened; "": of an older version.
    incarnation: str = ""
    reopened: bool = False


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node got a lease; its number is the revision of this fact, so it grows and never comes twice."""

    node_id: str
    lease: int
    address: str
    local_world_size: int
    role: str
    topology: str = ""
    # See commands.Join.
    token: bytes = field(default=b"", repr=False)
    identity: str = ""
    supervisor_address: str = ""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The service ended a node's lease; `failed_round`: the round whose workers failed because of it; 0: none."""

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
    """A node was taken out, or a name that is not in the run was barred; `lease` is the one that it lost, 0 for none.

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
    """A round got its number and its ranks; `seats` are in the order of group ranks."""

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
class RoundStarted:
    """Workers of a round have started; see `starts`. Times in seconds.

    `duration`: since the end of the former round, 0: not known; `age`: since the last workers had started.
    """

    round: int
    group_world_size: int
    reported_nodes: int
    slowest: str
    parts: RecoveryParts
    duration: float = 0.0
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker failed; `earliest`: before all known failures of its round."""

    failure: ReportedFailure
    earliest: bool = False


@dataclass(frozen=True, slots=True)
class NodeSucceeded:
    """All workers of a participant succeeded."""

    round: int
    node_id: str


@dataclass(frozen=True, slots=True)
class ExitBarrierPassed:
    """Participants that succeeded no longer wait for the others."""

    round: int


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """An operator requested a restart of the round."""

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
    """The run is over; a RunCreated may reopen it."""

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
    | RoundStarted
    | WorkerFailed
    | NodeSucceeded
    | ExitBarrierPassed
    | RestartRequested
    | RoundEnded
    | RunClosed
)


# ---- Sentences for people about losses, evictions, newcomers, failures and used-up budgets.


def explain_loss(node_id: str, reason: LossReason, settings: RunSettings) -> str:
    """Return one sentence: the lost node, and the reason why the server considers it lost."""
    return f"node {node_id} was lost: {_HOW[reason].format(s=settings)}"


_HOW = {
    LossReason.LEASE_EXPIRED: (
        "no heartbeat for {s.time_to_live:g} s "
        "({s.keep_alive_max_attempt} missed, one every {s.keep_alive_interval:g} s)"
    ),
    LossReason.DISCONNECTED: "its connection broke and it did not come back within {s.disconnect_grace:g} s",
    LossReason.SUPERSEDED: "an agent joined again under its name",
    LossReason.CONFIRM_TIMED_OUT: "it did not confirm the round within {s.confirm_timeout:g} s",
    LossReason.DEPARTURE_TIMED_OUT: "it announced that it would leave and did not within {s.confirm_timeout:g} s",
    LossReason.JOIN_TIMED_OUT: "fewer than {s.min_nodes} nodes were there after {s.join_timeout:g} s",
}


def explain_newcomers(node_ids: Sequence[str]) -> str:
    """Return one sentence that names the nodes that joined; short for any number of them."""
    first, *others = node_ids
    if not others:
        return f"node {first} joined"
    if len(others) == 1:
        return f"nodes {first} and {others[0]} joined"
    return f"node {first} and {len(others)} others joined"


def explain_eviction(node_id: str, reason: str, *, by_service: bool) -> str:
    """Return one sentence: the node that was taken out, the actor and the reason."""
    return f"node {node_id} was taken out{'' if by_service else ' by an operator'}: {reason}"


def explain_failure(failure: ReportedFailure) -> str:
    """Return one sentence: the worker that failed, and its error."""
    return f"worker of rank {failure.rank} on node {failure.node_id} failed: {failure.message}"


def explain_worn_out(failures: int, window: float, last: ReportedFailure) -> str:
    """Return the reason for evicting a node whose workers failed too often; `window` in seconds, 0: the whole run."""
    times = "once" if failures == 1 else f"{failures} times"
    return (
        f"its workers failed {times}{explain_window(window)}, last that of rank {last.rank}: {last.message}"
    )


def explain_spent(budget: int, window: float) -> str:
    """Return the text for a used-up restart budget; `window`: seconds in which restarts count, 0: the whole run."""
    if budget == 0:
        return "no restarts were allowed"
    spent = "the only restart was used up" if budget == 1 else f"all {budget} restarts were used up"
    return spent + explain_window(window)


def explain_window(window: float) -> str:
    """Return the restart window as the end of a sentence; "" if restarts count for ever."""
    return f" in {window:g} s" if window else ""
