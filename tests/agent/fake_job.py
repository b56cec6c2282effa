"""A fake job, for tests of code that reports the state of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rallypoint.agent.core.core import AgentState, Assignment
from rallypoint.agent.failures.failure import WorkerFailure
from rallypoint.agent.job.drain import DrainNotice
from rallypoint.agent.job.job import Job
from rallypoint.agent.job.result import JobResult
from rallypoint.agent.spawner.protocol import WorkerExit
from rallypoint.agent.workers.group import Worker
from rallypoint.rendezvous.v1.rendezvous_service_pb2 import RunSettings
from rallypoint.rpc.loop import Notifier

LAUNCHED = 1_800_000_000.5  # on the wire to the nanosecond: a float has this one exactly

VALUE_ERROR = WorkerFailure(
    local_rank=1,
    rank=3,
    role="trainer",
    host="node2",
    pid=4242,
    exit_code=1,
    time=1_799_999_999.75,
    message="ValueError: bad",
    traceback="Traceback",
    log_file="/logs/1/stderr.log",
)


def config(run_id: str = "run-1", workers: int = 1) -> Any:
    """The settings of a job."""
    return SimpleNamespace(
        run_id=run_id,
        node_id="node-a",
        local_world_size=workers,
        rendezvous=SimpleNamespace(endpoint="10.0.0.1:29400", security=None),
        settings=RunSettings(min_nodes=2, max_nodes=4),
    )


def worker_group() -> Any:
    seat = Assignment(3, 1, 2, 4, 8, 0, 8, "10.0.0.1", 1234, 1)
    return SimpleNamespace(assignment=seat)


@dataclass
class FakeJob:
    """A job that runs nothing; the test sets its state."""

    state: AgentState = field(default_factory=AgentState)
    workers: list[Worker] = field(default_factory=list)
    result: JobResult | None = None
    log_dir: Path | None = None
    stopping: bool = False
    draining: DrainNotice | None = None
    stop_reason: str = ""
    watchdog_trouble: str = ""
    group: Any = None
    config: Any = field(default_factory=config)
    changed: Notifier = field(default_factory=Notifier)
    start_time: float = LAUNCHED
    end_time: float | None = None
    spawner_pid: int = 1
    base_ranks: dict[int, int] = field(default_factory=dict)
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def request_stop(self, detail: str, *, at_once: bool = False) -> None:
        """Record the request."""
        self.asked.append((detail, at_once))
        self.stopping = True

    def drain(self, grace: float | None, reason: str) -> None:
        """Record the request."""
        self.asked.append((grace, reason))

    def progress_of(self, worker: Worker) -> tuple[int, float] | None:
        """Return the step of a worker; worker 1 has reported none."""
        return None if worker.local_rank == 1 else (17, 2.5)

    def end(self, result: JobResult) -> None:
        """End the job with this result."""
        self.result, self.end_time = result, LAUNCHED + 60
        self.changed.notify()


def as_job(job: FakeJob) -> Job:
    """The fake job, typed as a `Job`."""
    return cast(Job, job)


def running(local_rank: int, base_rank: int = 4, pid: int = 0) -> Worker:
    """A worker that is running."""
    return Worker(local_rank, base_rank + local_rank, pid or 70 + local_rank, 1_800_000_000.5)


def ended(local_rank: int, *, code: int | None = None, signal: int | None = None) -> Worker:
    """A worker that has ended."""
    how = WorkerExit(local_rank, 70 + local_rank, exit_code=code, signal=signal, at=1.0, time=2.0)
    worker = running(local_rank)
    worker.exit = how
    return worker
