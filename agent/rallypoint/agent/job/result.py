"""The result of a job on this host, and its exit code."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import grpc

from rallypoint.agent.core.core import AgentState, Assignment
from rallypoint.agent.failures.failure import UNRECOVERABLE, WorkerFailure
from rallypoint.rendezvous.core.state import FailureKind, Phase
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import set_seconds, to_seconds
from rallypoint.rpc.errors import ServiceError

# ---- Protocol messages of the rendezvous service to the agent's own values and back.


def phase_value(phase: pb.Phase.ValueType) -> Phase:
    """The phase; an unknown one, of a newer server, becomes JOINABLE: the workers stop and the node waits."""
    return Phase(phase) if phase in map(int, Phase) else Phase.JOINABLE


def assignment_value(message: pb.Assignment) -> Assignment:
    """The node's ranks in a round."""
    return Assignment(**{each.name: getattr(message, each.name) for each in fields(Assignment)})


_SAME_FIELDS = (
    *("local_rank", "rank", "role", "host", "pid", "exit_code", "message", "traceback", "log_file"),
    *("permanent", "core_file"),
)


def _same_fields(failure: WorkerFailure | pb.WorkerFailure) -> dict[str, Any]:
    return {name: getattr(failure, name) for name in _SAME_FIELDS}


def failure_message(failure: WorkerFailure, round_: int, now: float) -> pb.WorkerFailure:
    """The protocol message of a failure in a round; the server adds the node. `now`: in monotonic seconds."""
    kind = pb.FailureKind.ValueType(failure.kind)
    message = pb.WorkerFailure(round=round_, kind=kind, **_same_fields(failure))
    if failure.at is not None:
        set_seconds(message.age, max(0.0, now - failure.at))
    set_seconds(message.time, failure.time)
    return message


def failure_value(message: pb.WorkerFailure) -> WorkerFailure:
    """The failure in a message of the run; it may have been on any host."""
    kind = FailureKind(message.kind) if message.kind in map(int, FailureKind) else FailureKind.UNKNOWN
    time = to_seconds(message.time)
    return WorkerFailure(time=time, kind=kind, node=message.node_id, **_same_fields(message))


# Exit codes of a job, beside 128 + N for a job that was stopped by signal N.
SUCCEEDED = 0
FAILED = 1
REFUSED = 2
UNFIT = 3
ALREADY_SUCCEEDED = 4
PERMANENT = UNRECOVERABLE

_RETRY: dict[int, Literal["here", "elsewhere", "never"]] = {
    FAILED: "here",
    # The command or its settings must be corrected first.
    REFUSED: "never",
    UNFIT: "elsewhere",
    # There is nothing left to do under this name.
    ALREADY_SUCCEEDED: "never",
    PERMANENT: "never",
}


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job on this host.

    Attributes:
        exit_code: See the constants above.
        detail: One sentence for people.
        failure: The failure that ended the run, on any host.
        others: Other failures of that round on this host, in order of time.
    """

    exit_code: int
    detail: str
    failure: WorkerFailure | None = None
    others: tuple[WorkerFailure, ...] = ()

    @property
    def retry(self) -> Literal["here", "elsewhere", "never"]:
        """Where to run the job again, if at all; of no meaning for one that succeeded."""
        return _RETRY.get(self.exit_code, "here")


def judge(
    state: AgentState,
    *,
    run_end: pb.RunEnd | None,
    failure: WorkerFailure | None,
    refusal: str | None,
    had_succeeded: bool = False,
    stop_signal: int | None,
    ran: bool,
    local_failures: Sequence[WorkerFailure] = (),
) -> JobResult:
    """Return the result of a job that is over.

    Args:
        run_end: The end of the run; None if it has not ended.
        failure: The last failure of a worker on this host.
        refusal: Reason for which the rendezvous service refused this node; None if it did not.
        had_succeeded: True if that was because the run had succeeded before this node came.
        stop_signal: The signal that requested the stop; None if there was no request.
        ran: True if workers were ever started here.
        local_failures: The workers of this host that failed in the last round, in order of time.
    """
    succeeded = run_end is not None and run_end.outcome == pb.OUTCOME_SUCCEEDED
    others: tuple[WorkerFailure, ...] = ()
    if run_end is not None and run_end.HasField("failure"):
        failure, others = _among(failure_value(run_end.failure), local_failures)
    elif run_end is not None:
        failure = None
    if failure is not None and failure.permanent and not succeeded and state.leaving is None:
        detail = run_end.detail if run_end is not None else refusal or failure.message
        return JobResult(PERMANENT, detail, failure, others)
    if state.unhealthy is not None and not succeeded:
        detail = f"this host is not fit to run workers: {state.unhealthy}; repair or restart the host"
        return JobResult(UNFIT, detail, failure, others)
    if run_end is not None:
        # A cancelled run has the exit code of a failed one; `failure_file` and `submission.session` rely on it.
        return JobResult(SUCCEEDED if succeeded else FAILED, run_end.detail, failure, others)
    if state.leaving is not None:
        return JobResult(128 + (stop_signal or signal.SIGTERM), f"left the run: {state.leaving}")
    if state.left and refusal is None:
        why = "workers of other hosts did not finish within the exit barrier"
        if state.draining is not None:
            why = f"this host left afterwards: {state.draining}"
        return JobResult(SUCCEEDED, f"the workers here succeeded; {why}")
    if had_succeeded:
        return JobResult(ALREADY_SUCCEEDED, refusal or "the run had succeeded before")
    # If workers ran, the settings were accepted, so the end is a failure and not a refusal.
    return JobResult(FAILED if ran else REFUSED, refusal or "the membership ended without a reason")


def _among(
    first: WorkerFailure, local: Sequence[WorkerFailure]
) -> tuple[WorkerFailure, tuple[WorkerFailure, ...]]:
    """The run's first failure, with its time by this host's monotonic clock if it was here; and the others here."""
    others = []
    for failure in local:
        if (failure.rank, failure.pid, failure.host) == (first.rank, first.pid, first.host):
            first = replace(first, at=failure.at)
        else:
            others.append(failure)
    return first, tuple(others)


def refusal_of(endpoint: str, error: ServiceError) -> str:
    """Describe in one sentence that the rendezvous service at an endpoint refused this node, and why."""
    if error.reason == grpc.StatusCode.UNIMPLEMENTED.name:  # gRPC's own status: not a Rallypoint server
        return (
            f"the server at {endpoint} is not a rendezvous service ({error.message}); check --rdzv-endpoint"
        )
    remedy = "; or end that run first: `rallypoint close`" if error.reason == "SETTINGS_DIFFER" else ""
    return f"{endpoint} refused this node: {error.message}{remedy}"
