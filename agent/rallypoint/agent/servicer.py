"""SupervisorService on the wire."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import grpc

from rallypoint.agent.core import Workers
from rallypoint.agent.crew import Worker
from rallypoint.agent.job import Job
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.serving.errors import ServiceError, invalid
from rallypoint.serving.server import Registration

SERVICE_NAME = "rallypoint.agent.v1.SupervisorService"
_SENTENCE_BYTES = 1024

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
# Takes a job on, or raises ServiceError; returns the name of its node.
Launch: TypeAlias = Callable[[pb.JobSpec], str]


def supervisor_registration(current: Callable[[], Job | None], launch: Launch | None = None) -> Registration:
    """What stands SupervisorService up on a server.

    Args:
        current: The job that runs, or ran last.
        launch: Takes a job on; None for an agent that runs the one job it was started for.
    """
    servicer = SupervisorServicer(current, launch)
    return Registration(SERVICE_NAME, partial(pb_grpc.add_SupervisorServiceServicer_to_server, servicer))


class SupervisorServicer(pb_grpc.SupervisorServiceServicer):
    """Answers for the jobs of one agent."""

    def __init__(self, current: Callable[[], Job | None], launch: Launch | None) -> None:
        """See `supervisor_registration`."""
        self._current = current
        self._launch = launch

    async def GetJob(self, request: pb.GetJobRequest, context: _Context) -> pb.GetJobResponse:
        """The job with its workers."""
        return pb.GetJobResponse(job=job_message(self._job()))

    async def StopJob(self, request: pb.StopJobRequest, context: _Context) -> pb.StopJobResponse:
        """Leave the run in good order."""
        reason = request.reason or "no reason given"
        if len(reason.encode()) > _SENTENCE_BYTES or not reason.isprintable():
            raise invalid("reason", f"must be printable and at most {_SENTENCE_BYTES} bytes")
        job = self._job()
        if not job.stopping:
            job.request_stop(f"stopped through SupervisorService: {reason}")
        return pb.StopJobResponse()

    async def LaunchJob(self, request: pb.LaunchJobRequest, context: _Context) -> pb.LaunchJobResponse:
        """Take a job on."""
        if self._launch is None:
            raise ServiceError(
                grpc.StatusCode.UNIMPLEMENTED,
                "NOT_A_DAEMON",
                "this agent runs the one job it was started for; `rallypoint serve agent` takes jobs on",
            )
        return pb.LaunchJobResponse(node_id=self._launch(request.spec))

    def _job(self) -> Job:
        job = self._current()
        if job is None:
            raise ServiceError(
                grpc.StatusCode.NOT_FOUND, "NO_JOB", "this agent runs no job, and has run none"
            )
        return job


def job_message(job: Job) -> pb.Job:
    """A job as one host sees it."""
    message = pb.Job(
        run_id=job.config.run_id,
        node_id=job.config.node_id,
        state=_job_state(job),
        round=job.state.started,
        restart_count=job.state.restart_count,
        workers=[_worker_message(worker) for worker in job.workers],
        log_dir=str(job.log_dir or ""),
    )
    if job.result is not None:
        message.exit_code, message.detail = job.result.exit_code, job.result.detail
    return message


def _job_state(job: Job) -> pb.JobState.ValueType:
    if job.result is not None:
        return pb.JOB_STATE_ENDED
    state = job.state
    if state.workers is Workers.RUNNING:
        return pb.JOB_STATE_RUNNING
    if state.workers is Workers.STOPPING:
        return pb.JOB_STATE_STOPPING
    if state.started and state.succeeded == state.started:
        return pb.JOB_STATE_WAITING_FOR_OTHERS
    return pb.JOB_STATE_WAITING


def _worker_message(worker: Worker) -> pb.Worker:
    message = pb.Worker(
        local_rank=worker.local_rank, rank=worker.rank, pid=worker.pid, state=pb.WORKER_STATE_RUNNING
    )
    message.start_time.FromNanoseconds(round(worker.start_time * 1e9))
    if worker.exit is not None:
        message.state = pb.WORKER_STATE_SUCCEEDED if worker.exit.succeeded else pb.WORKER_STATE_FAILED
        message.exit_code = -worker.exit.signal if worker.exit.signal else worker.exit.exit_code or 0
    return message
