"""An agent that stands on its own and runs the jobs it is given, one at a time."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Self

import grpc

from rallypoint.agent.addresses import local_address_towards
from rallypoint.agent.config import JobConfig, Peer, new_node_id
from rallypoint.agent.job import Job
from rallypoint.agent.job_result import REFUSED, JobResult
from rallypoint.agent.logs import LogError
from rallypoint.agent.processes import Spawner
from rallypoint.agent.servicer import supervisor_registration
from rallypoint.agent.settings import MOST_WORKERS, SHUTDOWN_TIMEOUT, RunSettingError, rendezvous_conf
from rallypoint.agent.spawn_protocol import SpawnError
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.serving.endpoint import parse_endpoint
from rallypoint.serving.errors import ServiceError, invalid
from rallypoint.serving.logs import get_logger
from rallypoint.serving.settings import ClientTLS, SettingError

_log = get_logger("rallypoint.agent")


class Daemon:
    """Takes jobs on through SupervisorService. An asynchronous context: at its end, its job leaves its run."""

    def __init__(self, timer_endpoint: str, tls: ClientTLS | None, environment: dict[str, str]) -> None:
        """Set up.

        Args:
            timer_endpoint: Timer service for jobs that name none.
            tls: Certificates towards the services that jobs name; None: plaintext.
            environment: What workers inherit.
        """
        self.registration = supervisor_registration(lambda: self._job, self._launch)
        self._timer_endpoint = timer_endpoint
        self._tls = tls
        self._environment = environment
        self._job: Job | None = None
        self._running: asyncio.Task[None] | None = None
        self._leaving = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Take no more jobs, and have the job that runs leave its run in good order; returns when it has ended.

        Whoever cancels this wait is in a hurry: the job's workers are killed.
        """
        self._leaving = True
        if self._job is not None and self._running is not None and not self._running.done():
            if not self._job.stopping:  # asked a second time, it would stop at once
                self._job.request_stop("the agent is going away", signal.SIGTERM)
            try:
                await asyncio.wait({self._running})
            except asyncio.CancelledError:
                self._job.request_stop("the agent is going away at once")
                raise

    def _launch(self, spec: pb.JobSpec) -> str:
        if self._leaving:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE, "DRAINING", "this agent is going away: ask another one"
            )
        if self._job is not None and self._running is not None and not self._running.done():
            run_id = self._job.config.run_id
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "JOB_RUNNING",
                f"this agent runs a job of run {run_id!r} already; stop that one, or wait for its end",
                metadata={"run_id": run_id},
            )
        config = self._config(spec)
        try:
            self._job = Job(config, Spawner.start())
        except SpawnError as error:
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_PROCESSES", str(error)) from None
        self._running = asyncio.create_task(self._run(self._job))
        return config.node_id

    async def _run(self, job: Job) -> None:
        try:
            result = await job.run()
        except (LogError, SettingError) as error:
            result = job.result = JobResult(REFUSED, str(error))
        _log.info("job ended", run_id=job.config.run_id, exit_code=result.exit_code, detail=result.detail)

    def _config(self, spec: pb.JobSpec) -> JobConfig:
        least, most = _node_counts(spec)
        shutdown_timeout = SHUTDOWN_TIMEOUT
        if spec.HasField("shutdown_timeout"):
            shutdown_timeout = spec.shutdown_timeout.ToNanoseconds() / 1e9
            if shutdown_timeout < 0:
                raise invalid("spec.shutdown_timeout", "must not be negative")
        try:
            settings = dict(spec.rendezvous_settings)
            conf = rendezvous_conf(settings, (least, most), spec.max_restarts, shutdown_timeout)
        except RunSettingError as error:
            raise invalid("spec.rendezvous_settings", str(error)) from None
        try:
            address = local_address_towards(spec.rendezvous_endpoint)
        except SettingError as error:
            raise invalid("spec.rendezvous_endpoint", str(error)) from None
        try:
            parse_endpoint(spec.timer_endpoint or self._timer_endpoint)
        except SettingError as error:
            raise invalid("spec.timer_endpoint", str(error)) from None
        timer = Peer(spec.timer_endpoint, self._tls) if spec.timer_endpoint else Peer(self._timer_endpoint)
        return JobConfig(
            run_id=spec.run_id,
            node_id=spec.node_id or new_node_id(),
            address=address,
            settings=conf.settings,
            command=tuple(spec.command),
            environment={**self._environment, **spec.environment},
            rendezvous=Peer(spec.rendezvous_endpoint, self._tls),
            timer=timer,
            local_world_size=spec.local_world_size or 1,
            role=spec.role or "default",
            topology=spec.topology,
            working_directory=Path(spec.working_directory or os.getcwd()),
            log_dir=Path(spec.log_dir) if spec.log_dir else None,
            connect_timeout=conf.read_timeout,
            close_timeout=conf.close_timeout,
            shutdown_timeout=shutdown_timeout,
        )


def _node_counts(spec: pb.JobSpec) -> tuple[int, int]:
    """Fewest and most nodes of a round, with the names and counts of a job looked at on the way."""
    if not spec.run_id:
        raise invalid("spec.run_id", "must not be empty")
    if not spec.command:
        raise invalid("spec.command", "must name a program")
    if not 0 <= spec.local_world_size <= MOST_WORKERS:
        raise invalid("spec.local_world_size", f"must be from 1 to {MOST_WORKERS}, or unset for 1")
    least = spec.min_nodes or 1
    most = spec.max_nodes or least
    if not 1 <= least <= most:
        raise invalid("spec.max_nodes", f"must be at least min_nodes ({least}), and both at least 1")
    return least, most
