"""A run's progress in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rallypoint.cli.console import printable
from rallypoint.cli.moments import show_span

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from rallypoint.timer.v1 import timer_service_pb2 as timer_pb


def progress_lines(run_id: str, answer: timer_pb.GetProgressResponse) -> list[str]:
    """How far the run is, and whether it stalls; of a run that tells progress."""
    lines = [
        f"run {run_id}: {_workers(answer.workers)} at {_steps(answer)}, "
        f"the last one advanced {_span(answer.idle)} ago"
    ]
    if answer.HasField("stalled"):
        lines.append(stall_line(answer.stalled))
    elif answer.HasField("stall_after"):
        lines.append(f"it stalls if none advances for {_span(answer.stall_after)}")
    else:
        lines.append("it is not watched for stalls (--stall-after 0)")
    return lines


def slowest_line(answer: timer_pb.GetProgressResponse) -> str:
    """The slowest worker, for who looks at the run as a whole; of a run that tells progress."""
    if not answer.slowest:
        return f"{_workers(answer.workers)} at {_steps(answer)}"
    slowest = answer.slowest[0]
    behind = answer.highest_step - slowest.step
    where = f"{behind} behind the fastest" if behind else "no other is further"
    return f"slowest worker: {_worker(slowest)}, at step {slowest.step} for {_span(slowest.idle)} ({where})"


def stall_line(stalled: timer_pb.Stalled) -> str:
    """That no worker advances, and who stopped first."""
    told = f"the run STALLS: no worker has advanced for {_span(stalled.idle)}"
    if not stalled.HasField("first"):
        return told
    first = stalled.first
    return (
        f"{told}; {_worker(first)} stopped first, {_span(first.idle)} ago at step {first.step} "
        f"({stalled.at_same_step} of {_workers(stalled.workers)} are at that step)"
    )


def _worker(worker: timer_pb.WorkerProgress) -> str:
    return printable(f"rank {worker.rank} on node {worker.node_id} (worker {worker.worker_id})")


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _steps(answer: timer_pb.GetProgressResponse) -> str:
    if answer.lowest_step == answer.highest_step:
        return f"step {answer.lowest_step}"
    return f"steps {answer.lowest_step} to {answer.highest_step}"


def _span(duration: Duration) -> str:
    return show_span(duration.ToNanoseconds() / 1e9)
