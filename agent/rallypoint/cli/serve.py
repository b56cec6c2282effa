"""`rallypoint serve ROLE`: the services, each standing alone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import click

from rallypoint.cli.limit_options import Limits, limit_options
from rallypoint.cli.replica_options import ReplicaFlags, is_etcd, replica_options
from rallypoint.cli.roles import serve_agent_role, serve_rendezvous_role, serve_timer_role
from rallypoint.cli.timer_options import timer_options
from rallypoint.rpc.endpoint import ClientTLS, ServerOptions
from rallypoint.rpc.logs import configure_logs
from rallypoint.rpc.loop import run
from rallypoint.serving.options import Setting, server_options
from rallypoint.timer.core.values import TimerSettings


@click.group()
def serve() -> None:
    """Serve one role in this process, until SIGTERM or Ctrl-C."""


@serve.command()
@server_options(default_port=29400)
@click.option(
    "--journal",
    cls=Setting,
    default="sqlite:var/rendezvous.db",
    metavar="JOURNAL",
    help="Where runs outlive the process: sqlite:PATH, memory to forget them, or "
    "etcd://HOST:PORT,HOST:PORT,…/PREFIX, shared with all replicas that name the same.",
)
@replica_options
@limit_options
def rendezvous(options: ServerOptions, journal: str, limits: Limits, replica: ReplicaFlags) -> None:
    """Serve membership, rounds and the key-value store of runs."""
    if is_etcd(journal):
        # A service with a journal of its own need not have loaded any of it.
        from rallypoint.cli.replica_role import serve_replica_role  # noqa: PLC0415

        _serve(options, serve_replica_role(options, journal, limits, replica))
    else:
        replica.refuse_without_etcd()
        _serve(options, serve_rendezvous_role(options, journal, limits))


@serve.command()
@server_options(default_port=29410)
@timer_options
def timer(options: ServerOptions, settings: TimerSettings, learned: Path | None) -> None:
    """Serve the watchdog: countdown timers and progress of workers."""
    _serve(options, serve_timer_role(options, settings, learned))


@serve.command()
@server_options(default_port=29420, also_client=True)
@click.option(
    "--max-jobs",
    cls=Setting,
    type=click.IntRange(1, 1000),
    default=1,
    metavar="N",
    help="Jobs that run at a time; more are refused. 1 keeps the host's GPUs to one of them.",
)
@click.option(
    "--metrics-address",
    cls=Setting,
    default="",
    show_default=False,
    metavar="HOST:PORT",
    help="Where figures of its jobs are served for Prometheus; without it, nowhere.",
)
def agent(options: ServerOptions, tls: ClientTLS | None, max_jobs: int, metrics_address: str) -> None:
    """Run jobs on this host as they are launched, by `rallypoint submit` or through SupervisorService.

    It serves rendezvous too, at the same address, for jobs that name no other service.
    """
    _serve(options, serve_agent_role(options, tls, max_jobs, metrics_address))


def _serve(options: ServerOptions, role: Coroutine[Any, Any, None]) -> None:
    configure_logs(options.log_level, options.log_format)
    try:
        run(role)
    except asyncio.CancelledError:
        raise SystemExit(130) from None
