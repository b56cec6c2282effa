"""A job and its workers as SupervisorService tells of them."""

from __future__ import annotations

from rallypoint.agent.core import Workers
from rallypoint.agent.crew import Worker
from rallypoint.agent.failure_report import render
from rallypoint.agent.job import Job
from rallypoint.agent.jobs import TakenJob
from rallypoint.agent.usage import Usage
from rallypoint.agent.v1 import supervisor_service_pb2 as pb

# Bytes of a failure report that are told: it has a traceback of 16 KiB at most.
_REPORT_BYTES = 64 * 1024


def job_message(taken: TakenJob, *, whole: bool = True) -> pb.Job:
    """A job as one host sees it; not `whole`: without its workers and the report of its failure."""
    job = taken.job
    config, seat = job.config, job.crew.assignment if job.crew is not None else None
    message = pb.Job(
        run_id=config.run_id,
        node_id=config.node_id,
        state=job_state(job),
        round=seat.round if seat is not None else 0,
        restart_count=job.state.restart_count,
        workers=[worker_message(worker) for worker in job.workers] if whole else (),
        detail=_detail(job),
        log_dir=str(job.log_dir or ""),
        world_size=seat.world_size if seat is not None else 0,
        rendezvous_endpoint=config.rendezvous.endpoint,
        launch_id=taken.launch_id,
        watchdog_trouble=job.watchdog_trouble,
    )
    message.start_time.FromNanoseconds(round(job.start_time * 1e9))
    if job.end_time is not None:
        message.end_time.FromNanoseconds(round(job.end_time * 1e9))
    if job.result is not None:
        message.exit_code = job.result.exit_code
        if job.result.failure is not None and whole:
            report = render(job.result.failure, others=job.result.others).encode(errors="replace")
            message.failure_report = report[:_REPORT_BYTES].decode(errors="ignore")
    elif (draining := job.draining) is not None:
        message.drain_deadline.FromNanoseconds(round(draining.deadline * 1e9))
    return message


def job_state(job: Job) -> pb.JobState.ValueType:
    """What a job does on this host."""
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
    """How it ended, what it waits for, or why it stops."""
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
            ended = f"; the round before ended: {job.state.detail}" if job.state.detail else ""
            return f"waits for a round of {nodes} node{'s' * (nodes != '1')}{ended}"
        case pb.JOB_STATE_RUNNING if job.watchdog_trouble:
            return f"no watchdog guards the workers: {job.watchdog_trouble}"
        case _:
            return ""


def worker_message(
    worker: Worker, usage: Usage | None = None, progress: tuple[int, float] | None = None
) -> pb.Worker:
    """A worker.

    Args:
        worker: which.
        usage: what it uses of its host; None: not asked, or not known.
        progress: its step, and the seconds since it came to that; None: not asked, or it never told.
    """
    message = pb.Worker(
        local_rank=worker.local_rank, rank=worker.rank, pid=worker.pid, state=pb.WORKER_STATE_RUNNING
    )
    message.start_time.FromNanoseconds(round(worker.start_time * 1e9))
    if worker.exit is not None:
        message.state = pb.WORKER_STATE_SUCCEEDED if worker.exit.succeeded else pb.WORKER_STATE_FAILED
        message.exit_code = -worker.exit.signal if worker.exit.signal else worker.exit.exit_code or 0
        return message
    if usage is not None:
        message.usage.processors = usage.processors
        message.usage.memory_bytes = usage.memory_bytes
        message.usage.process_count = usage.processes
        message.usage.thread_count = usage.threads
        message.usage.processor_time.FromNanoseconds(round(usage.processor_seconds * 1e9))
    if progress is not None:
        message.progress.step = progress[0]
        message.progress.age.FromNanoseconds(round(progress[1] * 1e9))
    return message
