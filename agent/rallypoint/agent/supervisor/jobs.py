"""The jobs of one agent: the running ones and the latest ended ones, and their messages on the wire."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import accumulate

import grpc

from rallypoint.agent.core.core import Workers
from rallypoint.agent.job.job import Job
from rallypoint.agent.job.report import render
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.workers.group import Worker
from rallypoint.agent.workers.usage import Usage
from rallypoint.rpc.durations import set_seconds
from rallypoint.rpc.errors import ServiceError, json_list
from rallypoint.rpc.text import clip

MOST_ENDED = 100
"""Ended jobs that are kept, for callers that request the result of their job late. Each takes some 50 KB."""
MOST_ENDED_BYTES = 64 * 1024 * 1024
"""Their requests together: a job keeps its command and environment."""


@dataclass(frozen=True, slots=True)
class TakenJob:
    """A job that the agent has accepted.

    Attributes:
        launch_id: the launch_id of the request that launched it; empty: it had none, or no request launched the job.
    """

    job: Job
    launch_id: str = ""
    digest: bytes = b""
    request_bytes: int = 0

    @property
    def run_id(self) -> str:
        """Name of its run."""
        return self.job.config.run_id

    @property
    def running(self) -> bool:
        """True if it has not ended."""
        return self.job.result is None


def launch_digest(request: pb.LaunchJobRequest) -> bytes:
    """Return the digest of a request, which may have 4 MiB and is compared with the next one of its launch_id."""
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()


class Jobs:
    """The running and the latest ended jobs of an agent."""

    def __init__(self, *jobs: Job) -> None:
        """Start with these jobs."""
        self._taken = [TakenJob(job) for job in jobs]

    def add(self, job: Job, launch: pb.LaunchJobRequest | None = None) -> None:
        """Add a job; beyond MOST_ENDED or MOST_ENDED_BYTES, remove the ended jobs that are oldest."""
        launch = launch or pb.LaunchJobRequest()
        self._taken.append(TakenJob(job, launch.launch_id, launch_digest(launch), launch.ByteSize()))
        ended = [taken for taken in self.latest_first if not taken.running]
        sizes = accumulate(taken.request_bytes for taken in ended)
        for number, (taken, size) in enumerate(zip(ended, sizes, strict=True)):
            if number >= MOST_ENDED or size > MOST_ENDED_BYTES:
                self._taken.remove(taken)

    @property
    def running(self) -> list[Job]:
        """The running jobs, in the order of their launch."""
        return [taken.job for taken in self._taken if taken.running]

    @property
    def latest_first(self) -> list[TakenJob]:
        """All running and ended jobs, the latest first."""
        return self._taken[::-1]

    def launched(self, launch_id: str) -> TakenJob | None:
        """The job that was launched with this id; None if there is none, or it was removed."""
        return next(
            (taken for taken in self.latest_first if launch_id and taken.launch_id == launch_id), None
        )

    def find(self, run_id: str) -> TakenJob:
        """Return the job of a run.

        Args:
            run_id: Name of the run; its latest job is returned. Empty: the running job, or the latest ended one.

        Raises:
            ServiceError: NO_JOB; WHICH_JOB if several jobs run and `run_id` is empty.
        """
        running = [taken for taken in self.latest_first if taken.running]
        if not run_id and len(running) > 1:
            names = sorted(taken.run_id for taken in running)
            raise ServiceError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "WHICH_JOB",
                f"this agent runs {len(running)} jobs: name the run of one of them ({', '.join(names)})",
                metadata={"run_ids": json_list(names)},
            )
        for taken in (*running, *self.latest_first):
            if not run_id or taken.run_id == run_id:
                return taken
        if run_id:
            message = f"this agent has no job of run {run_id!r}, running or ended"
        else:
            message = "this agent has no job, running or ended"
        raise ServiceError(grpc.StatusCode.NOT_FOUND, "NO_JOB", message)


# ---- Messages of SupervisorService for a job and its workers.


# Bytes of a failure report that are sent: it has a traceback of 16 KiB at most.
_REPORT_BYTES = 64 * 1024


def job_message(taken: TakenJob, *, whole: bool = True) -> pb.Job:
    """The message of a job on this host; not `whole`: without its workers and the report of its failure."""
    job = taken.job
    config, assignment = job.config, job.group.assignment if job.group is not None else None
    message = pb.Job(
        run_id=config.run_id,
        node_id=config.node_id,
        state=job_state(job),
        round=assignment.round if assignment is not None else 0,
        restart_count=job.state.restart_count,
        workers=[worker_message(worker) for worker in job.workers] if whole else (),
        detail=_detail(job),
        log_dir=str(job.log_dir or ""),
        world_size=assignment.world_size if assignment is not None else 0,
        rendezvous_endpoint=config.rendezvous.endpoint,
        launch_id=taken.launch_id,
        watchdog_trouble=job.watchdog_trouble,
    )
    set_seconds(message.start_time, job.start_time)
    if job.end_time is not None:
        set_seconds(message.end_time, job.end_time)
    if job.result is not None:
        message.exit_code = job.result.exit_code
        if job.result.failure is not None and whole:
            report = render(job.result.failure, others=job.result.others)
            message.failure_report = clip(report, _REPORT_BYTES)
    elif (draining := job.draining) is not None:
        set_seconds(message.drain_deadline, draining.deadline)
    return message


def job_state(job: Job) -> pb.JobState.ValueType:
    """The state of a job on this host."""
    if job.result is not None:
        return pb.JOB_STATE_ENDED
    state = job.state
    if state.workers is Workers.RUNNING:
        return pb.JOB_STATE_RUNNING if job.draining is None else pb.JOB_STATE_DRAINING
    if state.workers is Workers.STOPPING or state.leaving is not None:
        return pb.JOB_STATE_STOPPING
    if state.started and state.succeeded == state.started:
        return pb.JOB_STATE_WAITING_FOR_OTHERS
    return pb.JOB_STATE_WAITING


def _detail(job: Job) -> str:
    """The detail of a job's state: its result, the event that it waits for, or the reason of its stop."""
    match job_state(job):
        case pb.JOB_STATE_ENDED:
            return job.result.detail if job.result is not None else ""
        case pb.JOB_STATE_DRAINING:
            return job.draining.reason if job.draining is not None else ""
        case pb.JOB_STATE_STOPPING:
            return job.state.leaving or job.stop_reason
        case pb.JOB_STATE_WAITING_FOR_OTHERS:
            return "the workers here succeeded; those of other hosts have not all"
        case pb.JOB_STATE_WAITING:
            settings = job.config.settings
            nodes = str(settings.min_nodes)
            if settings.max_nodes > settings.min_nodes:
                nodes += f" to {settings.max_nodes}"
            ended = f"; the previous round ended: {job.state.detail}" if job.state.detail else ""
            return f"waits for a round of {nodes} node{'s' * (nodes != '1')}{ended}"
        case pb.JOB_STATE_RUNNING if job.watchdog_trouble:
            return f"no watchdog guards the workers: {job.watchdog_trouble}"
        case _:
            return ""


def worker_message(
    worker: Worker, usage: Usage | None = None, progress: tuple[int, float] | None = None
) -> pb.Worker:
    """The message of a worker.

    Args:
        usage: its use of the host; None: not requested, or unknown.
        progress: its step, and the seconds since it began; None: not requested, or the worker has reported none.
    """
    message = pb.Worker(
        local_rank=worker.local_rank, rank=worker.rank, pid=worker.pid, state=pb.WORKER_STATE_RUNNING
    )
    set_seconds(message.start_time, worker.start_time)
    if worker.exit is not None:
        message.state = pb.WORKER_STATE_SUCCEEDED if worker.exit.succeeded else pb.WORKER_STATE_FAILED
        message.exit_code = -worker.exit.signal if worker.exit.signal else worker.exit.exit_code or 0
        return message
    if usage is not None:
        message.usage.processors = usage.processors
        message.usage.memory_bytes = usage.memory_bytes
        message.usage.process_count = usage.processes
        message.usage.thread_count = usage.threads
        set_seconds(message.usage.processor_time, usage.processor_seconds)
    if progress is not None:
        message.progress.step = progress[0]
        set_seconds(message.progress.idle, progress[1])
    return message
