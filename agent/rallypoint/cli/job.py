"""What `rallypoint run` does once its command line is in order."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import click

from rallypoint.agent.addresses import local_address_towards
from rallypoint.agent.config import JobConfig, Peer, new_node_id
from rallypoint.agent.errors import render
from rallypoint.agent.job import Job
from rallypoint.agent.job_result import FAILED, SUCCEEDED, JobResult
from rallypoint.agent.logs import LogError, Redirect
from rallypoint.agent.processes import Spawner
from rallypoint.agent.servicer import supervisor_registration
from rallypoint.agent.settings import rendezvous_conf
from rallypoint.cli.roles import embedded_rendezvous, embedded_timer
from rallypoint.serving.endpoint import EndpointError, listening_endpoint, parse_endpoint
from rallypoint.serving.logs import get_logger
from rallypoint.serving.server import Server
from rallypoint.serving.settings import ClientTLS, ServerOptions, SettingError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_log = get_logger("rallypoint.run")


async def run_job(
    spawner: Spawner,
    *,
    command: tuple[str, ...],
    environment: dict[str, str],
    nnodes: tuple[int, int],
    nproc_per_node: int,
    standalone: bool,
    rdzv_endpoint: str,
    rdzv_id: str,
    rdzv_conf: dict[str, str],
    max_restarts: int,
    role: str,
    topology: str,
    log_dir: Path | None,
    redirects: str,
    tee: str,
    local_addr: str,
    shutdown_timeout: float,
    evidence_timeout: float,
    stall_after: float | None,
    node_id: str,
    timer_endpoint: str,
    supervisor_address: str,
    tls: ClientTLS | None,
) -> int:
    """Run a job to its end, with the flags of `rallypoint run`; returns the exit code.

    Raises:
        SettingError: It can't be started as asked; one line.
    """
    conf = rendezvous_conf(rdzv_conf, nnodes, max_restarts, shutdown_timeout)
    async with AsyncExitStack() as stack:
        rendezvous, timer = Peer(rdzv_endpoint, tls), Peer(timer_endpoint, tls)
        _check_endpoint("--rdzv-endpoint", rdzv_endpoint)
        _check_endpoint("--timer-endpoint", timer_endpoint)
        if standalone:
            rendezvous = Peer(await stack.enter_async_context(embedded_rendezvous()))
        if not timer_endpoint:
            timer = Peer(await stack.enter_async_context(embedded_timer()))
        try:
            config = JobConfig(
                run_id=rdzv_id,
                node_id=node_id or new_node_id(),
                address=local_addr or local_address_towards(rendezvous.endpoint),
                settings=conf.settings,
                command=command,
                environment=environment,
                rendezvous=rendezvous,
                timer=timer,
                local_world_size=nproc_per_node,
                role=role,
                topology=topology,
                log_dir=log_dir,
                redirects=Redirect.parse(redirects, "--redirects", nproc_per_node),
                tee=Redirect.parse(tee, "--tee", nproc_per_node),
                connect_timeout=conf.read_timeout,
                close_timeout=conf.close_timeout,
                shutdown_timeout=shutdown_timeout,
                evidence_timeout=evidence_timeout,
                stall_after=stall_after,
            )
            job = Job(config, spawner)
            await _serve_supervisor(stack, job, supervisor_address)
            result = await _run_until_signalled(job)
        except LogError as error:
            raise SettingError(str(error)) from None
    _say_how_it_ended(result)
    return result.exit_code


def _check_endpoint(flag: str, endpoint: str) -> None:
    try:
        if endpoint:
            parse_endpoint(endpoint)
    except EndpointError as error:
        raise SettingError(f"{flag}: {error}") from None


async def _serve_supervisor(stack: AsyncExitStack, job: Job, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not host:
        raise SettingError(f"--supervisor-address: {address!r} is not of the form HOST:PORT")
    try:
        if not listening_endpoint(host, int(port)).loopback:
            raise SettingError("it is served in plaintext, so only on loopback, as in 127.0.0.1:0")
        options = ServerOptions(host=host, port=int(port))
        server = Server(options, services=[supervisor_registration(lambda: job)])
        await server.start()
    except SettingError as error:
        raise SettingError(f"--supervisor-address {address}: {error}") from None
    stack.push_async_callback(server.stop)
    _log.info(
        "supervisor ready",
        supervisor=server.address,
        rendezvous=job.config.rendezvous.endpoint,
        timer=job.config.timer.endpoint,
    )


async def _run_until_signalled(job: Job) -> JobResult:
    loop = asyncio.get_running_loop()
    # Under nohup a terminal that closes is to stop nothing. (SIGINT, which a shell ignores for what it starts in the
    # background, is handled nevertheless: whoever sends it to an agent means it.)
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    handled = [number for number in _SIGNALS if number != signal.SIGHUP or not nohup]
    for number in handled:
        loop.add_signal_handler(number, job.request_stop, f"got {number.name}", number)
    try:
        return await job.run()
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


def _say_how_it_ended(result: JobResult) -> None:
    if result.failure is not None:
        click.echo(f"The failure that ended the run:\n{render(result.failure)}", err=True)
    if result.exit_code == SUCCEEDED:
        _log.info("job succeeded", detail=result.detail)
    elif result.exit_code == FAILED:
        _log.error("job failed" if result.failure is not None else "job ended early", detail=result.detail)
    else:
        click.echo(f"Error: {result.detail}", err=True)
