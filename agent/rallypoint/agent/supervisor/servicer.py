"""The gRPC servicer of SupervisorService."""

from __future__ import annotations

import resource
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import TypeAlias, TypeVar

import grpc

from rallypoint.agent.config.settings import MOST_SECONDS
from rallypoint.agent.job.job import Job
from rallypoint.agent.supervisor.jobs import MOST_ENDED, Jobs, job_message, worker_message
from rallypoint.agent.supervisor.log_stream import LOG_STREAMS, stream_logs
from rallypoint.agent.supervisor.operator_actions import dump_stacks, reap_worker, restart_workers
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.agent.workers.usage import UsageMeter
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.text import one_line
from rallypoint.server.v1 import server_service_pb2 as server_pb
from rallypoint.serving.access import caller_of
from rallypoint.serving.flow import Context, Subscriber
from rallypoint.serving.info import Capability
from rallypoint.serving.policy import OPERATORS, READERS, Rights
from rallypoint.serving.requests import (
    NAME_BYTES,
    EveryField,
    items_before,
    page_size,
    page_token,
    reason,
    seconds,
    text,
)
from rallypoint.serving.server import Registration

SERVICE_NAME = "rallypoint.agent.v1.SupervisorService"

MOST_STREAMS = 1_000
"""Limit of open streams of WatchJob and StreamLogs. A StreamLogs stream keeps up to two files of each worker open; all
streams together may use half of this process's limit of open files."""


_JOBS_PER_PAGE = 100
_WORKERS_PER_PAGE = 1_000

_Item = TypeVar("_Item")
# Launches a job, or raises ServiceError.
Launch: TypeAlias = Callable[[pb.LaunchJobRequest], Awaitable[pb.LaunchJobResponse]]


def supervisor_registration(jobs: Jobs, launch: Launch | None = None, max_jobs: int = 0) -> Registration:
    """Return the registration of SupervisorService for a server.

    Args:
        jobs: The agent's running and ended jobs.
        launch: Launches a job; None for an agent that runs only the job it was started for.
        max_jobs: Jobs that it may run at a time.
    """
    servicer = SupervisorServicer(jobs, launch)
    add = partial(pb_grpc.add_SupervisorServiceServicer_to_server, servicer)
    limits = server_pb.SupervisorLimits(jobs=max_jobs, ended_jobs=MOST_ENDED, streams=MOST_STREAMS)
    return Registration(
        SERVICE_NAME,
        add,
        rights=_RIGHTS,
        capabilities=() if launch is None else [Capability.LAUNCH_JOBS],
        limits=server_pb.ServerLimits(supervisor=limits),
    )


_RIGHTS: Rights = {
    "GetJob": READERS,
    "ListJobs": READERS,
    "WatchJob": READERS,
    "ListWorkers": READERS,
    "StreamLogs": READERS,
    "StopJob": OPERATORS,
    "RestartWorkers": OPERATORS,
    "ReapWorker": OPERATORS,
    "DumpStacks": OPERATORS,
    "Drain": OPERATORS,
    "LaunchJob": OPERATORS,
}


class SupervisorServicer(pb_grpc.SupervisorServiceServicer):
    """Serves the jobs of one agent."""

    def __init__(self, jobs: Jobs, launch: Launch | None) -> None:
        """See `supervisor_registration`."""
        self._jobs = jobs
        self._launch = launch
        self._streams = self._files = 0
        self._meter = UsageMeter()

    async def GetJob(self, request: pb.GetJobRequest, context: Context) -> pb.GetJobResponse:
        """Return a job with its workers."""
        return pb.GetJobResponse(job=job_message(self._jobs.find(_run_id(request.run_id))))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        """Return the running and ended jobs, without their workers, a page at a time."""
        jobs, more = _page(request, self._jobs.latest_first, _JOBS_PER_PAGE)
        return pb.ListJobsResponse(
            jobs=[job_message(taken, whole=False) for taken in jobs], next_page_token=more
        )

    async def WatchJob(self, request: pb.WatchJobRequest, context: Context) -> None:  # type: ignore[override]
        """Send a job's state after each change; a slow client gets only the latest one."""
        taken = self._jobs.find(_run_id(request.run_id))
        sent: pb.Job | None = None
        watcher = Subscriber(context)
        with self._stream(), taken.job.changed.watch() as changed:
            while True:
                changed.clear()
                job = job_message(taken)
                if job != sent:
                    await watcher.send(pb.WatchJobResponse(job=job))
                    sent = job
                if job.state == pb.JOB_STATE_ENDED:
                    return
                await changed.wait()

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersResponse:
        """Return a job's workers, with their use of the host, a page at a time."""
        job = self._jobs.find(_run_id(request.run_id)).job
        workers, more = _page(request, job.workers, _WORKERS_PER_PAGE)
        running = [worker.pid for worker in workers if worker.exit is None and worker.pid]
        usage = await self._meter.measure(job.spawner_pid, running) if running else {}
        return pb.ListWorkersResponse(
            round=job.group.assignment.round if job.group is not None else 0,
            workers=[
                worker_message(worker, usage.get(worker.pid), job.progress_of(worker)) for worker in workers
            ],
            next_page_token=more,
        )

    async def StreamLogs(self, request: pb.StreamLogsRequest, context: Context) -> None:  # type: ignore[override]
        """Stream the output of workers."""
        job = self._jobs.find(_run_id(request.run_id)).job
        workers = len(set(request.ranks)) or job.config.local_world_size
        of_each = len(LOG_STREAMS) if request.stream == pb.LOG_STREAM_UNSPECIFIED else 1
        reader = Subscriber(context)
        with self._stream(), self._open_files(of_each * workers):
            async with aclosing(stream_logs(job, request)) as pieces:
                async for piece in pieces:
                    await reader.send(piece)

    async def StopJob(self, request: pb.StopJobRequest, context: Context) -> pb.StopJobResponse:
        """Leave the run in good order, or at once."""
        why, run_id = _why_and_run(request)
        job = self._jobs.find(run_id).job
        if request.now or not job.stopping:
            job.request_stop(f"stopped through SupervisorService: {why}", at_once=request.now)
        return pb.StopJobResponse()

    async def RestartWorkers(
        self, request: pb.RestartWorkersRequest, context: Context
    ) -> pb.RestartWorkersResponse:
        """Restart all workers of the run."""
        (why, run_id), operator = _why_and_run(request), one_line(str(caller_of(context)), NAME_BYTES)
        job = self._jobs.find(run_id).job
        expected = request.round if request.HasField("round") else None
        return pb.RestartWorkersResponse(ended_round=await restart_workers(job, why, operator, expected))

    async def ReapWorker(self, request: pb.ReapWorkerRequest, context: Context) -> pb.ReapWorkerResponse:
        """Kill a worker and its descendants."""
        why, run_id = _why_and_run(request)
        job = self._jobs.find(run_id).job
        pid, evidence_file = await reap_worker(job, request.rank, why, request.pid)
        return pb.ReapWorkerResponse(pid=pid, evidence_file=evidence_file)

    async def DumpStacks(self, request: pb.DumpStacksRequest, context: Context) -> pb.DumpStacksResponse:
        """Return the stacks of workers."""
        job = self._jobs.find(_run_id(request.run_id)).job
        return pb.DumpStacksResponse(stacks=await dump_stacks(job, request.ranks))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Drain this host: its jobs leave their runs once their workers are done or have saved their state."""
        why, run_id = _why_and_run(request)
        grace = to_seconds(request.grace) if request.HasField("grace") else None
        if request.all_jobs:
            jobs = [job for job in self._jobs.running if not job.stopping]
        else:
            jobs = [_is_running(self._jobs.find(run_id).job)]
        for job in jobs:
            job.drain(grace, why)
        return pb.DrainResponse(run_ids=[job.config.run_id for job in jobs])

    async def LaunchJob(self, request: pb.LaunchJobRequest, context: Context) -> pb.LaunchJobResponse:
        """Launch a job."""
        if self._launch is None:
            raise ServiceError(
                grpc.StatusCode.UNIMPLEMENTED,
                "NOT_A_DAEMON",
                "this agent runs only the job it was started for; `rallypoint serve agent` accepts jobs",
            )
        text("launch_id", request.launch_id)
        return await self._launch(request)

    @contextmanager
    def _stream(self) -> Iterator[None]:
        if self._streams >= MOST_STREAMS:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_WATCHERS",
                f"this agent has {MOST_STREAMS} open streams, the most that it allows",
                retry_after=5.0,
            )
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    @contextmanager
    def _open_files(self, count: int) -> Iterator[None]:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY and self._files + count > limit // 2:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_WATCHERS",
                f"readers keep {self._files} log files open, and {count} more would be above {limit // 2}, half of the "
                "agent's limit of open files (ulimit -n); read fewer ranks, or start it with a higher limit",
                retry_after=5.0,
            )
        self._files += count
        try:
            yield
        finally:
            self._files -= count


def _page(
    request: pb.ListJobsRequest | pb.ListWorkersRequest, items: Sequence[_Item], most: int
) -> tuple[Sequence[_Item], str]:
    """Return the items of a page, and the token of the next one, which has the number of items before it."""
    size = page_size(request.page_size, most, most)
    first = items_before(request)
    end = first + size
    return items[first:end], page_token(request, end) if end < len(items) else ""


def _run_id(value: str) -> str:
    text("run_id", value)
    return value


def _why_and_run(
    request: pb.StopJobRequest | pb.RestartWorkersRequest | pb.ReapWorkerRequest | pb.DrainRequest,
) -> tuple[str, str]:
    """Check a request about a job; return its reason, and the run that it names."""
    with EveryField() as check:
        why = check(reason, request.reason) or ""
        check(_run_id, request.run_id)
        if isinstance(request, pb.ReapWorkerRequest) and not request.HasField("rank"):
            check.refuse("rank", "must be set")
        if isinstance(request, pb.DrainRequest):
            check(seconds, "grace", request.grace, MOST_SECONDS)
            if request.all_jobs and request.run_id:
                check.refuse("run_id", "must be empty with all_jobs")
    return why, request.run_id


def _is_running(job: Job) -> Job:
    if job.result is not None or job.stopping:
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "JOB_ENDED",
            f"the job of run {job.config.run_id!r} has ended on this host, or is leaving its run",
        )
    return job
