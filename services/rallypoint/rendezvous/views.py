"""What is told of a run: to its nodes, and to people and tools."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from itertools import chain, islice

from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous.codec import to_message
from rallypoint.rendezvous.core import failures
from rallypoint.rendezvous.core.state import Phase, RunSettings, RunState, Seat
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

# A node has 100 bytes or so, and with the longest names 1,400; a client takes messages of 4 MiB. It takes 10 us to put
# in, so that a run of any size keeps the others waiting for 20 ms at a time.
NODES_PER_MESSAGE = 2_000


def node_update(state: RunState, node_id: str) -> pb.NodeUpdate:
    """The state of a run as one of its nodes must know it. Costs the same however many nodes there are."""
    update = pb.NodeUpdate(
        revision=state.revision, phase=pb.Phase.ValueType(state.phase), restart_count=state.restart_count
    )
    seat = state.seats.get(node_id)
    if seat is not None:
        _fill_assignment(update.assignment, state, seat)
    if state.exit_barrier_passed:
        update.exit_barrier_passed = True
    if state.settling:
        update.settling = True
    _fill_ends(update, state)
    _fill_hold(update, state)
    return update


def lease_message(state: RunState, number: int) -> pb.Lease:
    """A lease and its terms."""
    return pb.Lease(
        lease=number,
        incarnation=state.incarnation,
        revision=state.revision,
        time_to_live=_duration(state.settings.time_to_live),
        keep_alive_interval=_duration(_heartbeat_interval(state.settings)),
    )


def _heartbeat_interval(settings: RunSettings) -> float:
    """Seconds: a lease that may miss no heartbeat at all is renewed twice in its time, or it would flap."""
    return min(settings.keep_alive_interval, settings.time_to_live / 2)


@functools.lru_cache(maxsize=256)
def _duration(seconds: float) -> Duration:
    """A duration, not to be changed: all leases of a run have the same two."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


@dataclass(slots=True)
class StoppedRun(RunState):
    """The name of a run that an unexpected error has stopped, in the place of its state.

    Attributes:
        broken: The kind of the error.
    """

    broken: str = ""


def run_summary(state: RunState) -> pb.Run:
    """A run without its nodes."""
    if isinstance(state, StoppedRun):
        return pb.Run(run_id=state.run_id, broken=state.broken)
    run = pb.Run(
        run_id=state.run_id,
        revision=state.revision,
        phase=pb.Phase.ValueType(state.phase),
        round=state.round,
        world_size=state.world_size,
        restart_count=state.restart_count,
        node_count=len(state.nodes),
        succeeded_count=len(state.succeeded),
        exit_barrier_passed=state.exit_barrier_passed,
        counted_restarts=failures.counted(state),
    )
    run.settings.MergeFrom(to_message(state.settings))
    _fill_ends(run, state)
    _fill_hold(run, state)
    return run


def run_message(state: RunState, first: int = 0, end: int | None = None) -> pb.Run:
    """A run with its nodes from the `first` to before the `end`: participants by group rank, then the wait list."""
    run = run_summary(state)
    seated = (state.nodes[node_id] for node_id in state.seats if node_id in state.nodes)
    unseated = (node for node in state.nodes.values() if node.node_id not in state.seats)
    caused = Counter(each.node_id for each in state.restarts if state.settings.max_restarts_per_node)
    for node in islice(chain(seated, unseated), first, end):
        entry = run.nodes.add(
            node_id=node.node_id,
            address=node.address,
            role=node.role,
            local_world_size=node.local_world_size,
            state=_node_state(state, node.node_id),
            connected=node.connected,
            topology=node.topology,
            lease=node.lease,
            counted_restarts=caused[node.node_id],
            watchdog_trouble=node.watchdog_trouble,
        )
        seat = state.seats.get(node.node_id)
        if seat is not None:
            _fill_assignment(entry.assignment, state, seat)
    if first == 0:
        run.evicted_node_ids.extend(sorted(state.evicted))
    return run


def _fill_assignment(assignment: pb.Assignment, state: RunState, seat: Seat) -> None:
    assignment.round = state.round
    assignment.group_rank = seat.group_rank
    assignment.group_world_size = state.group_world_size
    assignment.base_rank = seat.base_rank
    assignment.world_size = state.world_size
    assignment.base_role_rank = seat.base_role_rank
    assignment.role_world_size = seat.role_world_size
    assignment.master_address = state.master_address
    assignment.master_port = state.master_port
    assignment.fencing_token = state.fencing_token


def _fill_ends(message: pb.NodeUpdate | pb.Run, state: RunState) -> None:
    if state.last_round_end is not None:
        message.last_round_end.MergeFrom(to_message(state.last_round_end))
    if state.run_end is not None:
        message.run_end.MergeFrom(to_message(state.run_end))


def _fill_hold(message: pb.NodeUpdate | pb.Run, state: RunState) -> None:
    if seconds := failures.held_back(state):
        message.held_back.CopyFrom(_duration(seconds))


def _node_state(state: RunState, node_id: str) -> pb.NodeState.ValueType:
    if node_id in state.departing:
        return pb.NODE_STATE_DEPARTING
    if node_id not in state.seats:
        full = len(state.seats) >= state.settings.max_nodes
        return pb.NODE_STATE_SPARE if full else pb.NODE_STATE_WAITING
    if node_id in state.succeeded:
        return pb.NODE_STATE_SUCCEEDED
    if state.phase is Phase.FINAL:
        return pb.NODE_STATE_RUNNING
    return pb.NODE_STATE_ASSIGNED if node_id in state.unconfirmed else pb.NODE_STATE_CONFIRMED
