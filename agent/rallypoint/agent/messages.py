"""Protocol messages of the rendezvous service to the agent's own values and back."""

from __future__ import annotations

from rallypoint.agent.core import Assignment, Phase
from rallypoint.agent.errors import FailureKind, WorkerFailure
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

_PHASES = {
    pb.PHASE_JOINABLE: Phase.JOINABLE,
    pb.PHASE_FROZEN: Phase.FROZEN,
    pb.PHASE_FINAL: Phase.FINAL,
    pb.PHASE_CLOSED: Phase.CLOSED,
}

_KINDS = {pb.FailureKind.Value(f"FAILURE_KIND_{kind.name}"): kind for kind in FailureKind}


def phase_value(phase: pb.Phase.ValueType) -> Phase:
    """The phase; one of a newer server means what stops workers and waits."""
    return _PHASES.get(phase, Phase.JOINABLE)


def assignment_value(message: pb.Assignment) -> Assignment:
    """A place in a round."""
    return Assignment(
        round=message.round,
        group_rank=message.group_rank,
        group_world_size=message.group_world_size,
        base_rank=message.base_rank,
        world_size=message.world_size,
        base_role_rank=message.base_role_rank,
        role_world_size=message.role_world_size,
        master_address=message.master_address,
        master_port=message.master_port,
        fencing_token=message.fencing_token,
    )


def failure_message(failure: WorkerFailure, round_: int, now: float) -> pb.WorkerFailure:
    """A failure as it is reported; the server knows which node reports it.

    Args:
        failure: what to report.
        round_: the round of the worker.
        now: in monotonic seconds.
    """
    message = pb.WorkerFailure(
        round=round_,
        rank=failure.rank,
        local_rank=failure.local_rank,
        role=failure.role,
        host=failure.host,
        pid=failure.pid,
        exit_code=failure.exit_code,
        message=failure.message,
        traceback=failure.traceback,
        log_file=failure.log_file,
        kind=pb.FailureKind.Value(f"FAILURE_KIND_{failure.kind.name}"),
        permanent=failure.permanent,
        core_file=failure.core_file,
    )
    if failure.at is not None:
        message.age.FromNanoseconds(max(0, round((now - failure.at) * 1e9)))
    message.time.FromNanoseconds(round(failure.time * 1e9))
    return message


def failure_value(message: pb.WorkerFailure) -> WorkerFailure:
    """A failure as the run tells of it, on whichever host it was."""
    return WorkerFailure(
        local_rank=message.local_rank,
        rank=message.rank,
        role=message.role,
        host=message.host,
        pid=message.pid,
        exit_code=message.exit_code,
        time=message.time.ToNanoseconds() / 1e9,
        message=message.message,
        traceback=message.traceback,
        log_file=message.log_file,
        kind=_KINDS.get(message.kind, FailureKind.UNSPECIFIED),
        permanent=message.permanent,
        core_file=message.core_file,
        node=message.node_id,
    )
