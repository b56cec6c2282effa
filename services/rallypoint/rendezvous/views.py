"""What is told of a run: to its nodes, and to people and tools."""

from __future__ import annotations

from rallypoint.rendezvous.codec import to_message
from rallypoint.rendezvous.core.state import Phase, RunState, Seat
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


def node_update(state: RunState, node_id: str) -> pb.NodeUpdate:
    """The state of a run as one of its nodes must know it. Costs the same however many nodes there are."""
    update = pb.NodeUpdate(
        revision=state.revision, phase=pb.Phase.ValueType(state.phase), restart_count=state.restart_count
    )
    seat = state.seats.get(node_id)
    if seat is not None:
        _fill_assignment(update.assignment, state, seat)
    _fill_ends(update, state)
    return update


def lease_message(state: RunState, number: int) -> pb.Lease:
    """A lease and its terms."""
    lease = pb.Lease(lease=number, revision=state.revision)
    lease.time_to_live.FromNanoseconds(round(state.settings.time_to_live * 1e9))
    lease.keep_alive_interval.FromNanoseconds(round(state.settings.keep_alive_interval * 1e9))
    return lease


def run_summary(state: RunState) -> pb.Run:
    """A run without its nodes."""
    run = pb.Run(
        run_id=state.run_id,
        revision=state.revision,
        phase=pb.Phase.ValueType(state.phase),
        round=state.round,
        world_size=state.world_size,
        restart_count=state.restart_count,
        node_count=len(state.nodes),
    )
    run.settings.MergeFrom(to_message(state.settings))
    _fill_ends(run, state)
    return run


def run_message(state: RunState) -> pb.Run:
    """A run with its nodes: participants by group rank, then the wait list."""
    run = run_summary(state)
    seated = [state.nodes[node_id] for node_id in state.seats if node_id in state.nodes]
    unseated = [node for node in state.nodes.values() if node.node_id not in state.seats]
    for node in seated + unseated:
        entry = run.nodes.add(
            node_id=node.node_id,
            address=node.address,
            role=node.role,
            local_world_size=node.local_world_size,
            state=_node_state(state, node.node_id),
            connected=node.connected,
        )
        seat = state.seats.get(node.node_id)
        if seat is not None:
            _fill_assignment(entry.assignment, state, seat)
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


def _node_state(state: RunState, node_id: str) -> pb.NodeState.ValueType:
    if node_id in state.departing:
        return pb.NODE_STATE_DEPARTING
    if node_id not in state.seats:
        return pb.NODE_STATE_WAITING
    if node_id in state.succeeded:
        return pb.NODE_STATE_SUCCEEDED
    if state.phase is Phase.FINAL:
        return pb.NODE_STATE_RUNNING
    return pb.NODE_STATE_ASSIGNED if node_id in state.unconfirmed else pb.NODE_STATE_CONFIRMED
