"""Run the plan of a launch: start embedded services, run the job, end in good order."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from rallypoint.agent.addresses import advertised, own_address_towards
from rallypoint.agent.config.job import JobConfig, Peer, new_node_id
from rallypoint.agent.config.settings import (
    SHUTDOWN_TIMEOUT,
    RendezvousConf,
    RunSettingError,
    rendezvous_conf,
)
from rallypoint.agent.job.job import Job
from rallypoint.agent.job.report import render
from rallypoint.agent.job.result import FAILED, PERMANENT, SUCCEEDED, JobResult
from rallypoint.agent.logs.streams import LogError
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.supervisor.jobs import Jobs
from rallypoint.agent.supervisor.servicer import supervisor_registration
from rallypoint.agent.workers.environment import check_devices
from rallypoint.launcher.plan import (
    Embedded,
    ExternalService,
    LaunchOutcome,
    LaunchPlan,
    LaunchRequest,
    Replicated,
)
from rallypoint.launcher.services import calls_to_end, embedded_rendezvous, embedded_timer, listening
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.calls import call_any
from rallypoint.rpc.endpoint import (
    ClientTLS,
    Endpoint,
    EndpointError,
    SettingError,
    parse_endpoint,
    parse_endpoints,
)
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.logs import configure_logs, get_logger, logs_are_json
from rallypoint.rpc.loop import handling_signals
from rallypoint.rpc.loop import run as run_loop
from rallypoint.rpc.replica_client import ReplicaClient
from rallypoint.rpc.runtime_folder import new_run_socket
from rallypoint.serving.server import Server

if TYPE_CHECKING:
    from rallypoint.launcher.embedded_service import EmbeddedService
    from rallypoint.launcher.replicated import OwnReplica


# ---- Two nodes with one name: the second is refused, if the name can belong to one node only.


async def refuse_duplicate(config: JobConfig) -> None:
    """Refuse to join if a connected node has the same name.

    Joining replaces a node of the same name. That is right after an agent's restart: the former agent and its stream
    are gone. Two living agents would replace one another. (Two that join in the same moment don't see each other; the
    rendezvous service then ends one of them.)

    Raises:
        SettingError: There is such a node; one line.
    """
    same_name = pb.NodeFilter(node_ids=[config.node_id], connected=True)
    request = pb.ListNodesRequest(run_id=config.run_id, filter=same_name)
    async with ReplicaClient(config.rendezvous.endpoint, config.rendezvous.security) as client:
        try:
            async with asyncio.timeout(config.connect_timeout):
                found = await call_any(
                    client,
                    pb_grpc.RendezvousServiceStub,
                    lambda stub: stub.ListNodes(request, wait_for_ready=True),
                )
        except (TimeoutError, ServiceError):
            return  # no such run, or no service: the join finds out which
    if found.nodes:
        raise SettingError(
            f"the node {config.node_id} is in run {config.run_id!r} already, on {found.nodes[0].address}: give every "
            "node a --node-rank of its own, and every job a --rdzv-id of its own"
        )


_log = get_logger("rallypoint.run")


# Seconds after which nodes give up on a lost service inside another host's agent. An agent that its orchestrator
# restarts is back within this time; if the job is lost, a longer time keeps its workers waiting for one another.
_LOST_TIMEOUT = 60.0


_USERS = (signal.SIGUSR1, signal.SIGUSR2)


async def run_until_signalled(job: Job, signals: Sequence[int]) -> JobResult:
    """Run a job to its end; a first signal makes it leave its run, a second one leave at once.

    SIGUSR1 and SIGUSR2 are passed to the workers, unless they are among `signals`.

    Args:
        job: Not started yet.
        signals: The signals to handle, until this returns. Empty: the caller handles signals.
    """

    def leave(number: signal.Signals) -> None:
        job.request_stop(f"got {number.name}", number)

    passed_on = [number for number in _USERS if signals and number not in signals]
    with handling_signals(signals, leave), handling_signals(passed_on, job.pass_on):
        return await job.run()


async def launch(
    plan: LaunchPlan, spawner: Spawner, on_job: Callable[[Job], None] = lambda _job: None
) -> JobResult:
    """Run a job to its end on this host.

    Args:
        spawner: Already running; it is closed when this returns.
        on_job: Called with the job before it runs.

    Raises:
        SettingError: The job can't be started as requested; one line.
    """
    for notice in plan.notices:
        _log.warning(notice)
    conf = _conf(plan)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(spawner.close)
        launched = await _rendezvous(plan, conf, stack)
        config = await _config(plan, conf, launched, stack)
        check_devices(config)
        await _check_bounds(config)
        config = await _with_metrics(plan.metrics_address, config, stack)
        if plan.node_id_is_ours and not isinstance(plan.service, Embedded):
            await refuse_duplicate(config)
        jobs = Jobs()
        config = await _serve_supervisor(stack, jobs, config, plan)
        job = Job(config, spawner)
        jobs.add(job)
        on_job(job)
        try:
            result = await run_until_signalled(job, plan.signals)
        except LogError as error:
            raise SettingError(str(error)) from None
        if launched.host is not None:
            succeeded = result.exit_code == SUCCEEDED
            await launched.host.stop_when_over(plan.run_id, result.detail, plan.signals, succeeded=succeeded)
        return result


@dataclass(frozen=True, slots=True)
class _LaunchedRendezvous:
    """The service, this host's address for the others, and the service's host if it is this process."""

    peer: Peer
    address: str
    lost_timeout: float = math.inf
    host: EmbeddedService | OwnReplica | None = None


async def _rendezvous(plan: LaunchPlan, conf: RendezvousConf, stack: AsyncExitStack) -> _LaunchedRendezvous:
    async def address(endpoint: str) -> str:
        return plan.local_address or await own_address_towards(endpoint, conf.read_timeout)

    service = plan.service
    if isinstance(service, Embedded):
        peer = Peer(await stack.enter_async_context(embedded_rendezvous(plan.run_id)))
        return _LaunchedRendezvous(peer, await address(peer.endpoint))
    if isinstance(service, Replicated):
        # Loaded only for the backends that need it.
        from rallypoint.launcher.replicated import replicated_rendezvous  # noqa: PLC0415

        own = await address(",".join(map(str, service.etcd.endpoints)))
        # Certificates are issued for names.
        named = isinstance(plan.security, ClientTLS) and not plan.local_address
        served_at = socket.gethostname() if named else own
        replica = await stack.enter_async_context(
            replicated_rendezvous(
                service.etcd, plan.run_id, served_at, plan.security, conf.read_timeout, access=plan.access
            )
        )
        return _LaunchedRendezvous(replica.peer, own, host=replica)
    _check_endpoint("--rdzv-endpoint", service.endpoint, parse_endpoints)
    if isinstance(service, ExternalService):
        return _LaunchedRendezvous(Peer(service.endpoint, plan.security), await address(service.endpoint))
    from rallypoint.launcher.embedded_service import rendezvous_at  # noqa: PLC0415

    host = await stack.enter_async_context(rendezvous_at(service, plan.security, plan.access, plan.run_id))
    if host is None:
        # The serving host may be gone for good, and the run with it.
        lost_timeout = min(conf.read_timeout, _LOST_TIMEOUT)
        return _LaunchedRendezvous(
            Peer(service.endpoint, plan.security), await address(service.endpoint), lost_timeout
        )
    return _LaunchedRendezvous(host.peer, await address(service.endpoint), host=host)


async def _config(
    plan: LaunchPlan, conf: RendezvousConf, launched: _LaunchedRendezvous, stack: AsyncExitStack
) -> JobConfig:
    if plan.timer_endpoint:
        _check_endpoint("--timer-endpoint", plan.timer_endpoint, parse_endpoint)
        timer = Peer(plan.timer_endpoint, plan.security)
    else:
        timer = Peer(await stack.enter_async_context(embedded_timer(plan.run_id)))
    config = JobConfig(
        run_id=plan.run_id,
        node_id=plan.node_id or new_node_id(),
        address=launched.address,
        settings=conf.settings,
        command=plan.command,
        environment={**plan.environment, **_from_torchrun(plan)},
        rendezvous=launched.peer,
        timer=timer,
        local_world_size=plan.local_world_size,
        connect_timeout=conf.read_timeout,
        lost_timeout=launched.lost_timeout,
        close_timeout=conf.close_timeout,
    )
    return dataclasses.replace(config, **plan.job)


async def _check_bounds(config: JobConfig) -> None:
    """Refuse settings that would fail for each worker of each round."""
    if config.rlimits:
        from rallypoint.agent.config.rlimits import RlimitError, check_allowed  # noqa: PLC0415 (for these flags only)

        try:
            check_allowed(config.rlimits)
        except RlimitError as error:
            raise SettingError(f"--rlimit: {error}") from None
    if config.numa_binding is not None:
        from rallypoint.agent.workers.affinity import NumaError, bind, read_topology  # noqa: PLC0415

        try:
            topology = await asyncio.to_thread(read_topology, config.environment)
            bind(config.numa_binding, topology, os.sched_getaffinity(0), config.local_world_size)
        except NumaError as error:
            raise SettingError(f"--numa-binding: {error}") from None


def _conf(plan: LaunchPlan) -> RendezvousConf:
    shutdown_timeout = plan.job.get("shutdown_timeout", SHUTDOWN_TIMEOUT)
    try:
        return rendezvous_conf(dict(plan.conf), plan.nodes, plan.max_restarts, shutdown_timeout)
    except RunSettingError as error:
        raise SettingError(f"--rdzv-conf: {error}") from None


def _from_torchrun(plan: LaunchPlan) -> dict[str, str]:
    """Return the variables that torchrun sets in its environment, and so in its workers'."""
    names = ",".join(signal.Signals(number).name for number in plan.signals)
    return {"TORCHELASTIC_SIGNALS_TO_HANDLE": names} if names else {}


async def _with_metrics(address: str, config: JobConfig, stack: AsyncExitStack) -> JobConfig:
    if not address:
        return config
    # Loaded only if the flag is given.
    from rallypoint.agent.events.metrics import metrics_at  # noqa: PLC0415

    sink = await stack.enter_async_context(metrics_at(address))
    return dataclasses.replace(config, event_sinks=(*config.event_sinks, sink))


def _check_endpoint(flag: str, endpoint: str, parse: Callable[[str], object]) -> None:
    try:
        parse(endpoint)
    except EndpointError as error:
        raise SettingError(f"{flag}: {error}") from None


async def _stop_once_read(server: Server) -> None:
    """Stop a server once the clients that follow the job have read its end, or soon after."""
    await calls_to_end(server)
    await server.stop()


async def _serve_supervisor(
    stack: AsyncExitStack, jobs: Jobs, config: JobConfig, plan: LaunchPlan
) -> JobConfig:
    """Serve SupervisorService at an address; empty: at a socket that is found by the run's name.

    Return the configuration with that address.
    """
    address, security = plan.supervisor_address, plan.security
    address = address or stack.enter_context(new_run_socket("agent", config.run_id))
    host, _, port = address.rpartition(":")
    if address.startswith("unix:"):
        host, port = address, "0"
    if not port.isdecimal() or not host:
        raise SettingError(f"--supervisor-address: {address!r} is neither HOST:PORT nor unix:/path")
    if isinstance(security, ClientTLS) and security.certificate is None and Endpoint(host, 0).loopback:
        # The files are for the servers of other hosts. Callers on this host know the user's secret.
        security = None
    try:
        options = listening(host, int(port), security, plan.access)
        server = Server(options, services=[supervisor_registration(jobs)])
        await server.start()
    except SettingError as error:
        raise SettingError(f"--supervisor-address {address}: {error}") from None
    stack.push_async_callback(_stop_once_read, server)
    _log.info(
        "supervisor ready",
        supervisor=server.address,
        rendezvous=config.rendezvous.endpoint,
        timer=config.timer.endpoint,
    )
    return dataclasses.replace(config, supervisor_address=advertised(server.address, named=False))


def print_summary(result: JobResult) -> None:
    """Print the report of the failure that ended the run, or the reason why the job did not run, and log the end.

    If logs are JSON, the report is a field of the last record.
    """
    if result.exit_code == SUCCEEDED:
        _log.info("job succeeded", detail=result.detail)
        return
    event = {FAILED: "job ended early", PERMANENT: "job failed: unrecoverable error"}.get(result.exit_code)
    report = f"Error: {result.detail}" if event is None else ""
    if result.failure is not None:
        event = "job failed" if result.exit_code == FAILED else event
        report = f"The failure that ended the run:\n{render(result.failure, others=result.others)}\n{report}".rstrip()
    if logs_are_json():
        _log.error(event or "job ended", exit_code=result.exit_code, detail=result.detail, report=report)
        return
    if report:
        click.echo(report, err=True)
    if event is not None:
        _log.error(event, detail=result.detail)


def configure_job_logs(level: str, format: str) -> None:
    """Configure the log of a process that runs a job; see `configure_logs`."""
    configure_logs(level, format)
    if level == "info":
        # Of the services embedded in this process, users of the agent need only warnings and errors.
        for service in ("rallypoint.rendezvous", "rallypoint.serving", "rallypoint.timer"):
            logging.getLogger(service).setLevel(logging.WARNING)


def run_requested_job(request: LaunchRequest, spawner: Spawner) -> LaunchOutcome:
    """Run the job to its end, and close the spawner.

    Raises:
        SettingError: The job can't be started as requested; one line.
    """
    configure_job_logs(request.log_level, "human")
    jobs: list[Job] = []
    result = run_loop(launch(request.plan, spawner, jobs.append))
    return LaunchOutcome(
        exit_code=result.exit_code,
        detail=result.detail,
        failure=result.failure,
        report=render(result.failure, others=result.others) if result.failure is not None else "",
        ranks=tuple(worker.rank for job in jobs for worker in job.workers),
        others=result.others,
    )
