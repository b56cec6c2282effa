"""How a job ended on this host, and the exit code that says so."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import grpc

from rallypoint.agent.core import AgentState
from rallypoint.agent.errors import WorkerFailure
from rallypoint.agent.messages import failure_value
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.serving.errors import ServiceError

# Exit codes of a job, beside 128 + N for one that signal N ended.
SUCCEEDED = 0
FAILED = 1
REFUSED = 2
UNFIT = 3


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended on this host.

    Attributes:
        exit_code: See the constants above.
        detail: One sentence for people.
        failure: The failure that ended the run, on whichever host it was.
    """

    exit_code: int
    detail: str
    failure: WorkerFailure | None = None


def verdict(
    state: AgentState,
    *,
    run_end: pb.RunEnd | None,
    failure: WorkerFailure | None,
    refusal: str | None,
    stop_signal: int | None,
    ran: bool,
) -> JobResult:
    """Judges a job that is over.

    Args:
        state: What its core knew at the end.
        run_end: How the run ended, if it did.
        failure: The last failure of a worker on this host.
        refusal: Why the rendezvous service would not have this node, if it would not.
        stop_signal: The signal that asked the job to stop; None if nobody did.
        ran: Whether workers were ever started here.
    """
    succeeded = run_end is not None and run_end.outcome == pb.OUTCOME_SUCCEEDED
    if run_end is not None and run_end.HasField("failure"):
        failure = failure_value(run_end.failure)
    elif run_end is not None:
        failure = None
    if state.unfit is not None and not succeeded:
        detail = f"this host is not fit to run workers: {state.unfit}; look into it, or restart it"
        return JobResult(UNFIT, detail, failure)
    if run_end is not None:
        return JobResult(SUCCEEDED if succeeded else FAILED, run_end.detail, failure)
    if state.leaving is not None:
        return JobResult(128 + (stop_signal or signal.SIGTERM), f"left the run: {state.leaving}")
    if state.left and refusal is None:
        return JobResult(
            SUCCEEDED, "the workers here succeeded; others were not done within the exit barrier"
        )
    # Once workers ran, it was started as asked, and what ended it is a failure.
    return JobResult(FAILED if ran else REFUSED, refusal or "the membership ended without a reason")


def refusal_of(endpoint: str, error: ServiceError) -> str:
    """Says that the rendezvous service at an endpoint would not have this node, and why."""
    if error.reason == grpc.StatusCode.UNIMPLEMENTED.name:  # gRPC's own: nobody of ours said it
        return f"what answers at {endpoint} is no rendezvous service ({error.message}); check --rdzv-endpoint"
    return f"{endpoint} refused this node: {error.message}"
