"""A job's exit code states if a retry makes sense, and on which host."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.agent.core.core import AgentState
from rallypoint.agent.failures.failure import WorkerFailure
from rallypoint.agent.job.result import (
    ALREADY_SUCCEEDED,
    FAILED,
    PERMANENT,
    REFUSED,
    SUCCEEDED,
    UNFIT,
    JobResult,
    failure_message,
    judge,
)
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

FIRST = WorkerFailure(1, 3, "trainer", "node2", 4242, 1, 1.8e9, "ValueError: bad", at=5.0)
AFTER = replace(FIRST, rank=2, local_rank=0, pid=4241, at=5.05)


def judged(state: AgentState | None = None, **more: Any) -> JobResult:
    """Return the result of a job."""
    values: dict[str, Any] = {
        "run_end": None,
        "failure": None,
        "refusal": None,
        "stop_signal": None,
        "ran": True,
    }
    return judge(state or AgentState(), **{**values, **more})


def run_end(failure: WorkerFailure | None, outcome: pb.Outcome.ValueType = pb.OUTCOME_FAILED) -> pb.RunEnd:
    """The end of the run."""
    message = failure_message(failure, 1, now=6.0) if failure is not None else None
    return pb.RunEnd(outcome=outcome, detail="so it ended", failure=message)


@pytest.mark.parametrize(
    ("state", "more", "exit_code", "retry"),
    [
        (AgentState(), {"run_end": run_end(None, pb.OUTCOME_SUCCEEDED)}, SUCCEEDED, "here"),
        (AgentState(), {"run_end": run_end(FIRST)}, FAILED, "here"),
        (AgentState(), {"run_end": run_end(None, pb.OUTCOME_CANCELLED)}, FAILED, "here"),
        (AgentState(), {"run_end": run_end(replace(FIRST, permanent=True))}, PERMANENT, "never"),
        (AgentState(unhealthy="it hangs"), {"run_end": run_end(FIRST)}, UNFIT, "elsewhere"),
        # On another host it would fail as well.
        (
            AgentState(unhealthy="it hangs"),
            {"run_end": run_end(replace(FIRST, permanent=True))},
            PERMANENT,
            "never",
        ),
        (AgentState(leaving="got SIGTERM"), {"stop_signal": signal.SIGTERM}, 143, "here"),
        (AgentState(), {"refusal": "no", "ran": False}, REFUSED, "never"),
        (AgentState(), {"refusal": "no", "ran": False, "had_succeeded": True}, ALREADY_SUCCEEDED, "never"),
        (AgentState(), {"refusal": "no"}, FAILED, "here"),
        # The connection broke before the service sent the end of the run; the worker's report is enough.
        (AgentState(), {"refusal": "no", "failure": replace(FIRST, permanent=True)}, PERMANENT, "never"),
    ],
)
def test_the_exit_code_shows_if_a_retry_makes_sense(
    state: AgentState, more: dict[str, Any], exit_code: int, retry: str
) -> None:
    """The retry is on this host, on another one, or never."""
    result = judged(state, **more)
    assert result.exit_code == exit_code
    assert result.retry == retry


def test_the_run_s_first_failure_is_reported_with_the_local_ones() -> None:
    """If it was on this host, it is not among the others, and has its time by this host's clock."""
    result = judged(run_end=run_end(FIRST), local_failures=[FIRST, AFTER])
    assert result.failure is not None
    assert (result.failure, result.failure.at, result.others) == (FIRST, 5.0, (AFTER,))
    elsewhere = replace(FIRST, host="node1")
    result = judged(run_end=run_end(elsewhere), local_failures=[FIRST, AFTER])
    assert result.failure is not None
    assert (result.failure, result.failure.at, result.others) == (elsewhere, None, (FIRST, AFTER))
    cancelled = run_end(None, pb.OUTCOME_CANCELLED)
    assert judged(run_end=cancelled, failure=AFTER, local_failures=[AFTER]).failure is None
