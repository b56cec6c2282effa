"""`rallypoint serve ROLE`: each service as a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from rallypoint.agent.addresses import advertised
from rallypoint.agent.config.job import Peer
from rallypoint.agent.supervisor.daemon import Daemon
from rallypoint.cli.main import ENVIRONMENT
from rallypoint.cli.serve_options import limit_options, timer_options
from rallypoint.cli.serve_replica import ReplicaFlags, is_etcd, replica_options
from rallypoint.launcher.services import embedded_timer
from rallypoint.rendezvous.api.errors import translate as translate_rendezvous
from rallypoint.rendezvous.api.service import open_journal, rendezvous_services
from rallypoint.rendezvous.base.limits import Limits
from rallypoint.rendezvous.journal.journal import JournalError, MemoryJournal
from rallypoint.rendezvous.shard.locator import OnlyReplica
from rallypoint.rpc.endpoint import ClientSecurity, ClientTLS, ServerOptions, SettingError
from rallypoint.rpc.logs import configure_logs
from rallypoint.rpc.loop import run
from rallypoint.serving.options import Setting, server_options
from rallypoint.serving.server import Server
from rallypoint.timer.core.values import TimerSettings
from rallypoint.timer.server.service import timer_service
from rallypoint.timer.server.service import translate as translate_timer

# ---- The servers behind the commands.


async def serve_rendezvous_role(options: ServerOptions, journal_url: str, limits: Limits) -> None:
    """Serve rendezvous until a signal, or until its journal fails.

    Raises:
        SettingError: It can't start, or its journal failed; one line.
    """
    broken: list[BaseException] = []
    stopping: list[asyncio.Task[None]] = []

    def stop(error: BaseException) -> None:
        broken.append(error)
        stopping.append(asyncio.create_task(server.stop()))

    replica = OnlyReplica(journal_url.partition(":")[0], time.time())
    try:
        async with rendezvous_services(
            open_journal(journal_url), limits=limits, list_replicas=replica, on_failure=stop
        ) as services:
            server = Server(options, services=services, translate=translate_rendezvous)
            await server.serve_until_signal(after_start=lambda: replica.listen(server.address))
    except JournalError as error:
        raise SettingError(str(error)) from error
    if broken:
        raise SettingError(str(broken[0])) from broken[0]


async def serve_timer_role(options: ServerOptions, settings: TimerSettings, learned: Path | None) -> None:
    """Serve timers until a signal. `learned`: file for learned timeouts; None: keep them in memory.

    Raises:
        SettingError: It can't start; one line.
    """
    async with timer_service(settings, learned=learned) as service:
        server = Server(options, services=[service], translate=translate_timer)
        await server.serve_until_signal()


def _own_rendezvous(server: Server, options: ServerOptions, security: ClientSecurity) -> Peer | None:
    """Return the address of a daemon's own rendezvous service for its jobs; None: TLS keeps them from using it."""
    if options.tls_cert is None:
        return Peer(advertised(server.address, named=False), security)
    return Peer(advertised(server.address, named=True), security) if isinstance(security, ClientTLS) else None


async def serve_agent_role(
    options: ServerOptions, security: ClientSecurity, max_jobs: int, metrics_address: str
) -> None:
    """Serve as a daemon that runs the jobs it is given, until a signal; then its jobs leave in good order.

    It serves rendezvous too, for jobs that name no other service; this state ends with the process. Health has a status
    for each: NOT_SERVING for rendezvous once its runs are broken, for jobs once they leave.
    """
    broken: list[asyncio.Task[None]] = []

    def on_broken(error: BaseException) -> None:
        broken.append(asyncio.create_task(server.set_ready(False, *rendezvous)))

    async def leave() -> None:
        await server.set_ready(False, daemon.registration)
        await daemon.leave()

    async with AsyncExitStack() as stack:
        rendezvous = await stack.enter_async_context(
            rendezvous_services(MemoryJournal(), on_failure=on_broken)
        )
        timer_endpoint = await stack.enter_async_context(embedded_timer())
        sinks = []
        if metrics_address:
            # Loaded only if the flag is given.
            from rallypoint.agent.events.metrics import metrics_at  # noqa: PLC0415

            sinks.append(await stack.enter_async_context(metrics_at(metrics_address)))
        daemon = Daemon(timer_endpoint, security, ENVIRONMENT, max_jobs=max_jobs, event_sinks=sinks)
        await stack.enter_async_context(daemon)
        server = Server(options, services=[daemon.registration, *rendezvous], translate=translate_rendezvous)
        daemon.rendezvous = partial(_own_rendezvous, server, options, security)
        daemon.supervisor_address = lambda: advertised(server.address, named=False)
        # Its jobs leave before the server drains, so that their state can still be queried.
        await server.serve_until_signal(before_drain=leave)


@click.group()
def serve() -> None:
    """Serve one role in this process, until SIGTERM or Ctrl-C."""


@serve.command()
@server_options("rendezvous", 29400)
@click.option(
    "--journal",
    cls=Setting,
    default="sqlite:var/rendezvous.db",
    metavar="JOURNAL",
    help="Storage of runs: sqlite:PATH; memory, lost with the process; or etcd://HOST:PORT,HOST:PORT,…/PREFIX, shared "
    "by all replicas with the same URL.",
)
@replica_options
@limit_options
def rendezvous(options: ServerOptions, journal: str, limits: Limits, replica: ReplicaFlags) -> None:
    """Serve membership, rounds and the key-value store of runs."""
    if is_etcd(journal):
        # Loaded only for etcd.
        from rallypoint.cli.serve_replica import serve_replica_role  # noqa: PLC0415

        _serve(options, serve_replica_role(options, journal, limits, replica))
    else:
        replica.refuse_without_etcd()
        _serve(options, serve_rendezvous_role(options, journal, limits))


@serve.command()
@server_options("timer", 29410)
@timer_options
def timer(options: ServerOptions, settings: TimerSettings, learned: Path | None) -> None:
    """Serve the watchdog: countdown timers and progress of workers."""
    _serve(options, serve_timer_role(options, settings, learned))


@serve.command()
@server_options("agent", 29420, also_client=True)
@click.option(
    "--max-jobs",
    cls=Setting,
    type=click.IntRange(1, 1000),
    default=1,
    metavar="N",
    help="Maximum number of running jobs; more are refused. 1 gives a job all GPUs of the host.",
)
@click.option(
    "--metrics-address",
    cls=Setting,
    default="",
    metavar="HOST:PORT",
    help="Address for Prometheus metrics of the jobs; default: not served.",
)
def agent(options: ServerOptions, security: ClientSecurity, max_jobs: int, metrics_address: str) -> None:
    """Run jobs on this host that `rallypoint submit` or SupervisorService launches.

    It also serves rendezvous, at the same address, for jobs that name no other service.
    """
    _serve(options, serve_agent_role(options, security, max_jobs, metrics_address))


def _serve(options: ServerOptions, role: Coroutine[Any, Any, None]) -> None:
    configure_logs(options.log_level, options.log_format)
    try:
        run(role)
    except asyncio.CancelledError:
        raise SystemExit(130) from None
