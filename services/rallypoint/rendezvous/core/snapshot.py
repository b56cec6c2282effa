"""Snapshots: the stored state of a run, so that a recovery need not replay all facts from the first."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from rallypoint.rendezvous.core.apply import reopened, resume_deadlines
from rallypoint.rendezvous.core.facts import NodeEvicted, NodeJoined
from rallypoint.rendezvous.core.failures import forget_old
from rallypoint.rendezvous.core.state import (
    EndedIncarnation,
    Eviction,
    FailedWorker,
    FailureRestart,
    Node,
    Phase,
    ReportedFailure,
    RoundEnd,
    RunEnd,
    RunSettings,
    RunState,
    Seat,
)


@dataclass(frozen=True, slots=True)
class FormerRank:
    """The group rank that a node had in the round before."""

    node_id: str
    group_rank: int


@dataclass(frozen=True, slots=True)
class FailedScaleUps:
    """Number of times in a row that a node failed on probation."""

    node_id: str
    count: int


@dataclass(frozen=True, slots=True)
class KeptRestart:
    """A restart, with its time by the server's wall clock, unix seconds: no other clock outlives the server."""

    round: int
    node_id: str
    time: float


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A `RunState` without volatile fields and deadlines; its fields are those of the journal's message.

    A field with the name and the type of a field of `RunState` is copied, one that is a set there is sorted.
    """

    run_id: str
    revision: int
    round: int
    # Only the numbers of the run are left, and, if it may go on, its used budgets; or it is reopened now.
    forgotten: bool = False
    settings: RunSettings | None = None
    phase: Phase = Phase.JOINABLE
    restart_count: int = 0
    nodes: tuple[NodeJoined, ...] = ()
    departing: tuple[str, ...] = ()
    evicted: tuple[NodeEvicted, ...] = ()
    seats: tuple[Seat, ...] = ()
    group_world_size: int = 0
    world_size: int = 0
    master_address: str = ""
    master_port: int = 0
    fencing_token: int = 0
    unconfirmed: tuple[str, ...] = ()
    succeeded: tuple[str, ...] = ()
    finishing: bool = False
    exit_barrier_passed: bool = False
    former_ranks: tuple[FormerRank, ...] = ()
    former_size: int = 0
    last_round_end: RoundEnd | None = None
    breach: RoundEnd | None = None
    failure: ReportedFailure | None = None
    run_end: RunEnd | None = None
    restarts: tuple[KeptRestart, ...] = ()
    quick_restarts: int = 0
    failed_workers: tuple[FailedWorker, ...] = ()
    permanent_failure: ReportedFailure | None = None
    former_fencing_token: int = 0
    counted_round: int = 0
    newcomers: tuple[str, ...] = ()
    failed_scale_ups: int = 0
    failed_scale_ups_of: tuple[FailedScaleUps, ...] = ()
    incarnation: str = ""
    lingering: tuple[NodeJoined, ...] = ()
    ended_incarnations: tuple[EndedIncarnation, ...] = ()
    start_recorded: bool = False


_TYPES = {each.name: each.type for each in fields(RunState)}
_COPIED = tuple(each.name for each in fields(RunSnapshot) if each.type == _TYPES.get(each.name))
_SETS = tuple(each.name for each in fields(RunSnapshot) if _TYPES.get(each.name) == "set[str]")


def take_snapshot(state: RunState, to_wall: float = 0.0) -> RunSnapshot:
    """Return the part of a run's state from which it can be restored.

    Args:
        state: The run.
        to_wall: Offset from the monotonic clock to the wall clock (unix time), seconds.
    """
    same: dict[str, Any] = {name: getattr(state, name) for name in _COPIED}
    same |= {name: tuple(sorted(getattr(state, name))) for name in _SETS}
    return RunSnapshot(
        **same,
        settings=state.settings,
        nodes=_joined(state.nodes),
        lingering=_joined(state.lingering),
        departing=tuple(state.departing),
        evicted=_evicted(state),
        seats=tuple(state.seats.values()),
        former_ranks=tuple(FormerRank(*item) for item in state.former_ranks.items()),
        restarts=_kept_restarts(state, to_wall),
        failed_workers=tuple(sorted(state.failed_workers, key=lambda each: (each.node_id, each.local_rank))),
        failed_scale_ups_of=tuple(FailedScaleUps(*item) for item in state.failed_scale_ups_of.items()),
    )


def _joined(nodes: dict[str, Node]) -> tuple[NodeJoined, ...]:
    return tuple(
        NodeJoined(
            node.node_id,
            node.lease,
            node.address,
            node.local_world_size,
            node.role,
            node.topology,
            node.token,
            node.identity,
            node.supervisor_address,
        )
        for node in nodes.values()
    )


def _nodes(joined: tuple[NodeJoined, ...], now: float) -> dict[str, Node]:
    return {
        node.node_id: Node(
            node_id=node.node_id,
            lease=node.lease,
            address=node.address,
            local_world_size=node.local_world_size,
            role=node.role,
            topology=node.topology,
            lease_deadline=now,
            waiting_since=now,
            token=node.token,
            identity=node.identity,
            supervisor_address=node.supervisor_address,
        )
        for node in joined
    }


def take_reopened(state: RunState) -> RunSnapshot:
    """Return the snapshot with which a closed run begins again.

    A journal gets it before the fact that reopens the run. So older versions, to which a closed run is closed for good,
    read a run that begins with known numbers, as they do after an expiry.
    """
    again = reopened(state, state.revision)
    numbers = take_tombstone(again)
    return replace(numbers, evicted=_evicted(again), ended_incarnations=again.ended_incarnations)


def take_tombstone(state: RunState) -> RunSnapshot:
    """Return the snapshot kept of an expired run: its numbers, so that none is given out twice under its name."""
    return numbers_only(state.run_id, state.revision, state.round)


def numbers_only(run_id: str, revision: int, round: int) -> RunSnapshot:
    """Return the snapshot of a run of which only the numbers are known, from which it continues."""
    return RunSnapshot(run_id=run_id, revision=revision, round=round, forgotten=True)


def has_budgets(left: RunSnapshot) -> bool:
    """True if more than its numbers is left of a run."""
    return left != numbers_only(left.run_id, left.revision, left.round)


def take_high_water(state: RunState, to_wall: float = 0.0) -> RunSnapshot:
    """Return the part that must outlive all other entries of a run: its numbers, and its used budgets if it is open.

    A run that was never closed may go on after the service has lost it: its workers run, and its nodes come back.

    Args:
        to_wall: See `take_snapshot`.
    """
    numbers = take_tombstone(state)
    if state.run_end is not None:
        return numbers
    return replace(
        numbers,
        restart_count=state.restart_count,
        restarts=_kept_restarts(state, to_wall),
        quick_restarts=state.quick_restarts,
        evicted=_evicted(state),
    )


def _kept_restarts(state: RunState, to_wall: float) -> tuple[KeptRestart, ...]:
    return tuple(KeptRestart(each.round, each.node_id, each.at + to_wall) for each in state.restarts)


def _evicted(state: RunState) -> tuple[NodeEvicted, ...]:
    return tuple(
        NodeEvicted(node_id, each.reason, by_service=each.by_service)
        for node_id, each in state.evicted.items()
    )


def _restore_budgets(state: RunState, snapshot: RunSnapshot, now: float, to_wall: float) -> None:
    state.restart_count = snapshot.restart_count
    state.restarts = [
        FailureRestart(each.round, each.node_id, min(now, each.time - to_wall)) for each in snapshot.restarts
    ]
    state.quick_restarts = snapshot.quick_restarts
    state.evicted = {each.node_id: Eviction(each.reason, each.by_service) for each in snapshot.evicted}


def restore(snapshot: RunSnapshot, now: float, to_wall: float = 0.0) -> RunState:
    """Return the run of a snapshot. Every deadline gets a full new term; call `restart_leases` for the leases.

    Restarts keep their age, by the wall clock: it may have been set meanwhile, but any other guess is worse. If they
    counted as new, every restart of the server would prolong the time for which they count.

    Args:
        now: Seconds of the server's monotonic clock.
        to_wall: See `take_snapshot`; the present offset.
    """
    state = RunState(snapshot.run_id, revision=snapshot.revision, round=snapshot.round)
    _restore_budgets(state, snapshot, now, to_wall)
    state.ended_incarnations = snapshot.ended_incarnations
    if snapshot.forgotten:
        return state
    assert snapshot.settings is not None
    for name in _COPIED:
        setattr(state, name, getattr(snapshot, name))
    for name in _SETS:
        setattr(state, name, set(getattr(snapshot, name)))
    state.created = True
    state.settings = snapshot.settings
    state.nodes = _nodes(snapshot.nodes, now)
    state.lingering = _nodes(snapshot.lingering, now)
    state.departing = dict.fromkeys(snapshot.departing, now + state.settings.confirm_timeout)
    state.seats = {seat.node_id: seat for seat in snapshot.seats}
    state.former_ranks = {former.node_id: former.group_rank for former in snapshot.former_ranks}
    state.failed_workers = set(snapshot.failed_workers)
    state.failed_scale_ups_of = {each.node_id: each.count for each in snapshot.failed_scale_ups_of}
    forget_old(state, now)
    resume_deadlines(state, now)
    return state
