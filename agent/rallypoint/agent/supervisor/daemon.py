"""A long-running agent that runs the jobs that clients launch."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Self

import grpc

from rallypoint.agent.config.job import JobConfig, Peer
from rallypoint.agent.events.handlers import EventSink
from rallypoint.agent.job.job import Job
from rallypoint.agent.job.result import FAILED, REFUSED, JobResult
from rallypoint.agent.logs.streams import LogError
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import SpawnError
from rallypoint.agent.supervisor.jobs import Jobs, TakenJob, launch_digest
from rallypoint.agent.supervisor.servicer import supervisor_registration
from rallypoint.agent.supervisor.spec import HostSettings, job_config
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.rpc.endpoint import ClientSecurity, SettingError
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.logs import get_logger
from rallypoint.serving.requests import name

_log = get_logger("rallypoint.agent")


class Daemon:
    """Accepts jobs through SupervisorService. An asynchronous context: at its end, its jobs leave their runs.

    Attributes:
        jobs: Its running and ended jobs.
        registration: SupervisorService, for a server.
        rendezvous: Returns the address of the daemon's own rendezvous service for its jobs; None: they can't reach it.
            To be set by the owner of that service.
        supervisor_address: Returns the address of its SupervisorService for the other hosts; likewise.
    """

    def __init__(
        self,
        timer_endpoint: str,
        security: ClientSecurity,
        environment: Mapping[str, str],
        *,
        max_jobs: int = 1,
        event_sinks: Sequence[EventSink] = (),
    ) -> None:
        """Set up.

        Args:
            timer_endpoint: Timer service for jobs that name none.
            security: How connections to the services that jobs name are secured.
            environment: Environment that workers inherit.
            max_jobs: Jobs that run at the same time; further ones are refused.
            event_sinks: Sinks for the events of all jobs, beside the sinks of their own.
        """
        self.jobs = Jobs()
        self.registration = supervisor_registration(self.jobs, self._launch, max_jobs)
        self.rendezvous: Callable[[], Peer | None] = lambda: None
        self.supervisor_address: Callable[[], str] = lambda: ""
        self._host = HostSettings(self._own_rendezvous, Peer(timer_endpoint), security, environment)
        self._max_jobs = max_jobs
        self._event_sinks = tuple(event_sinks)
        self._running: set[asyncio.Task[None]] = set()
        self._leaving = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Accept no more jobs, and have the running ones leave their runs in good order; return when they have ended.

        If this wait is cancelled, the jobs' workers are killed.
        """
        self._leaving = True
        for job in self.jobs.running:
            if not job.stopping:  # after a second request, it would stop at once
                job.request_stop("the agent is shutting down", signal.SIGTERM)
        if self._running:
            try:
                await asyncio.wait(self._running)
            except asyncio.CancelledError:
                for job in self.jobs.running:
                    job.request_stop("the agent is shutting down at once", at_once=True)
                raise

    def _own_rendezvous(self) -> Peer | None:
        return self.rendezvous()

    async def _launch(self, request: pb.LaunchJobRequest) -> pb.LaunchJobResponse:
        name("spec.run_id", request.spec.run_id)
        former = self._launched(request)
        if former is None:
            self._check_room(request.spec.run_id)
            # In a thread: a DNS look-up may be slow.
            config = await asyncio.to_thread(job_config, request.spec, self._host)
            config = replace(
                config,
                supervisor_address=self.supervisor_address(),
                event_sinks=(*config.event_sinks, *self._event_sinks),
            )
            # A retry of the same request may have launched the job meanwhile.
            former = self._launched(request)
            if former is None:
                self._check_room(config.run_id)
                return _launched(self._take_on(config, request).config)
        return _launched(former.job.config)

    def _launched(self, request: pb.LaunchJobRequest) -> TakenJob | None:
        """The job that an earlier attempt of this request has launched; None if there is none."""
        former = self.jobs.launched(request.launch_id)
        if former is not None and former.digest != launch_digest(request):
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "LAUNCH_ID_REUSED",
                f"launch_id {request.launch_id!r} was used for another job, of run {former.run_id!r}; send a new one",
                metadata={"run_id": former.run_id},
            )
        return former

    def _check_room(self, run_id: str) -> None:
        if self._leaving:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE, "DRAINING", "this agent is shutting down: use another one"
            )
        running = [job.config.run_id for job in self.jobs.running]
        if run_id in running:
            message = f"this agent runs a job of run {run_id!r} already; stop that one, or wait for its end"
        elif len(running) >= self._max_jobs:
            run_id = running[0]
            load = (
                f"a job of run {run_id!r}"
                if self._max_jobs == 1
                else f"{len(running)} jobs, as of {run_id!r},"
            )
            message = (
                f"this agent runs {load} and may run no more (--max-jobs); stop one, or wait for its end"
            )
        else:
            return
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION, "JOB_RUNNING", message, metadata={"run_id": run_id}
        )

    def _take_on(self, config: JobConfig, request: pb.LaunchJobRequest) -> Job:
        try:
            job = Job(config, Spawner.start())
        except SpawnError as error:
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_PROCESSES", str(error)) from None
        self.jobs.add(job, request)
        running = asyncio.create_task(_run(job))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return job


def _launched(config: JobConfig) -> pb.LaunchJobResponse:
    return pb.LaunchJobResponse(node_id=config.node_id, rendezvous_endpoint=config.rendezvous.endpoint)


async def _run(job: Job) -> None:
    try:
        result = await job.run()
    except (LogError, SettingError) as error:
        result = job.conclude(JobResult(REFUSED, str(error)))
    except Exception as error:  # a job that has failed must never appear to run
        _log.exception("internal error", error=error)
        result = job.conclude(
            JobResult(FAILED, f"internal error: {error!r}; please report it with the log of the agent")
        )
    _log.info("job ended", run_id=job.config.run_id, exit_code=result.exit_code, detail=result.detail)
