"""`rallypoint serve ROLE`: the services, each standing alone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import click

from rallypoint.cli.limit_options import Limits, limit_options
from rallypoint.cli.roles import serve_agent_role, serve_rendezvous_role, serve_timer_role
from rallypoint.cli.timer_options import timer_options
from rallypoint.serving.logs import configure_logs
from rallypoint.serving.loop import run
from rallypoint.serving.options import Setting, server_options
from rallypoint.serving.settings import ClientTLS, ServerOptions
from rallypoint.timer.values import TimerSettings


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
    help="Where runs outlive the process: sqlite:PATH, or memory to forget them.",
)
@limit_options
def rendezvous(options: ServerOptions, journal: str, limits: Limits) -> None:
    """Serve membership, rounds and the key-value store of runs."""
    _serve(options, serve_rendezvous_role(options, journal, limits))


@serve.command()
@server_options(default_port=29410)
@timer_options
def timer(options: ServerOptions, settings: TimerSettings, learned: Path | None) -> None:
    """Serve the watchdog: countdown timers and progress of workers."""
    _serve(options, serve_timer_role(options, settings, learned))


@serve.command()
@server_options(default_port=29420, also_client=True)
def agent(options: ServerOptions, tls: ClientTLS | None) -> None:
    """Run jobs on this host as they are launched through SupervisorService."""
    _serve(options, serve_agent_role(options, tls))


def _serve(options: ServerOptions, role: Coroutine[Any, Any, None]) -> None:
    configure_logs(options.log_level, options.log_format)
    try:
        run(role)
    except asyncio.CancelledError:
        raise SystemExit(130) from None
