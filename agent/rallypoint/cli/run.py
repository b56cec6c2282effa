"""`rallypoint run`: used as torchrun is, with its flags under their names."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from rallypoint.agent.settings import EVIDENCE_TIMEOUT, MOST_RESTARTS, MOST_SECONDS, SHUTDOWN_TIMEOUT
from rallypoint.cli.inherited import ENVIRONMENT
from rallypoint.cli.nodes import NodeCount, RendezvousConfType, Text, WorkerCount
from rallypoint.serving.options import Seconds, Setting, client_options
from rallypoint.serving.settings import SettingError

_F = TypeVar("_F", bound=Callable[..., Any])


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


def _flag(*declarations: str, **attributes: Any) -> Callable[[_F], _F]:
    """A flag of torchrun's; the environment sets it as PET_<NAME> too, as there, after RALLYPOINT_<NAME>."""
    long = next(declaration for declaration in declarations if declaration.startswith("--"))
    name = long.lstrip("-").replace("-", "_").upper()
    if attributes.get("default") == "":
        attributes.setdefault("show_default", False)
    return click.option(
        *declarations, cls=Setting, envvar=[f"RALLYPOINT_{name}", f"PET_{name}"], **attributes
    )


@click.command(
    context_settings={"allow_interspersed_args": False, "token_normalize_func": _with_dashes},
    options_metavar="[OPTIONS] [--]",
)
@_flag(
    "--nnodes", type=NodeCount(), default="1:1", help="Nodes of the job: N, or MIN:MAX for an elastic one."
)
@_flag(
    "--nproc-per-node",
    type=WorkerCount(),
    default="1",
    metavar="N|auto|cpu",
    help="Workers on this host; auto and cpu: one per processor.",
)
@_flag("--standalone", is_flag=True, help="A job of this host alone, with its own rendezvous inside.")
@_flag(
    "--rdzv-endpoint", type=Text(), default="", metavar="HOST:PORT", help="Address of the rendezvous service."
)
@_flag(
    "--rdzv-id", type=Text(), default="", metavar="RUN_ID", help="Name of the run; the same on all its hosts."
)
@_flag(
    "--rdzv-conf",
    type=RendezvousConfType(),
    default="",
    help="Settings of the rendezvous, as in last_call_timeout=1,join_timeout=60; times in seconds.",
)
@_flag(
    "--max-restarts",
    type=click.IntRange(0, MOST_RESTARTS),
    default=0,
    help="Restarts of failed workers, over the whole run.",
)
@_flag("--role", type=Text(), default="default", help="Role of the workers.")
@_flag(
    "--topology",
    type=Text(),
    default="",
    help="Where this host is, outermost place first, as in hall2/rack7; for --rdzv-conf rank_policy=topology.",
)
@_flag("-m", "--module", "module", is_flag=True, help="PROGRAM is a Python module.")
@_flag("--no-python", is_flag=True, help="PROGRAM is an executable, not a Python script.")
@_flag("--log-dir", type=click.Path(path_type=Path), help="Folder for logs; without it, a new temporary one.")
@_flag("-r", "--redirects", default="0", help="Keep output off the console: 0-3, or 0:1,1:2 by rank.")
@_flag("-t", "--tee", default="0", help="Prefix console output with role and rank: 0-3, or 0:1,1:2.")
@_flag("--local-addr", type=Text(), default="", help="Address at which other hosts reach this one.")
@_flag(
    "--shutdown-timeout",
    type=Seconds(0, MOST_SECONDS),
    default=SHUTDOWN_TIMEOUT,
    metavar="SECONDS",
    help="How long workers may take to stop before they are killed.",
)
@_flag(
    "--evidence-timeout",
    type=Seconds(0, MOST_SECONDS),
    default=EVIDENCE_TIMEOUT,
    metavar="SECONDS",
    help="How long to look into a worker that hangs before it is killed; 0: not at all.",
)
@_flag(
    "--stall-after",
    type=Seconds(0, MOST_SECONDS),
    metavar="SECONDS",
    help="Report a run in which no worker advances for so long; 0: never; without it, as the timer service is set.",
)
@_flag(
    "--node-id",
    type=Text(),
    default="",
    help="Name of this host in the run; without it, host, pid and a random part.",
)
@_flag(
    "--timer-endpoint",
    type=Text(),
    default="",
    metavar="HOST:PORT",
    help="Timer service; without it, one inside the agent.",
)
@_flag(
    "--supervisor-address",
    default="127.0.0.1:0",
    metavar="HOST:PORT",
    help="Where SupervisorService listens; port 0 for any free one.",
)
@_flag(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", help="Log level."
)
@_flag(
    "--log-format",
    type=click.Choice(["auto", "human", "json"]),
    default="auto",
    help="Format of the agent's log.",
)
@client_options
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(**flags: Any) -> None:
    """Run PROGRAM on this host as part of a distributed job, and keep it running.

    The job's other hosts run the same command. Worker failures restart all workers, up to --max-restarts; hosts
    that come and go change the number of workers. Exit code 0: all workers of all hosts succeeded; 1: the job
    failed or was cancelled; 2: it could not be started as asked; 3: this host is not fit to run workers, since
    processes of them can't be killed; 128+N: this host left because of signal N.
    """
    command = _worker_command(
        **{name: flags.pop(name) for name in ("program", "arguments", "module", "no_python")}
    )
    if flags["standalone"]:
        _fit_standalone(flags)
    else:
        _require_rendezvous(flags)
    sys.exit(_run(command, **flags))


def _run(command: tuple[str, ...], *, log_level: str, log_format: str, **flags: Any) -> int:
    # The spawner comes up while gRPC is being imported. Both only now, with everything that can be wrong with a
    # command line looked at.
    from rallypoint.agent.processes import Spawner  # noqa: PLC0415
    from rallypoint.agent.spawn_protocol import SpawnError  # noqa: PLC0415

    try:
        spawner = Spawner.start()
    except SpawnError as error:
        raise SettingError(str(error)) from None
    from rallypoint.cli.job import run_job  # noqa: PLC0415
    from rallypoint.serving.logs import configure_logs  # noqa: PLC0415
    from rallypoint.serving.loop import run as run_loop  # noqa: PLC0415

    configure_logs(log_level, log_format)
    if log_level == "info":
        # Of the services inside this process the agent's user needs to hear only what goes wrong.
        for service in ("rallypoint.rendezvous", "rallypoint.serving", "rallypoint.timer"):
            logging.getLogger(service).setLevel(logging.WARNING)
    return run_loop(run_job(spawner, command=command, environment=ENVIRONMENT, **flags))


def _worker_command(
    program: str, arguments: tuple[str, ...], module: bool, no_python: bool
) -> tuple[str, ...]:
    if no_python:
        if module:
            raise click.UsageError("--module and --no-python contradict each other; leave one out")
        return (program, *arguments)
    if module:
        return (_python(), "-u", "-m", program, *arguments)
    path = Path(program)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise click.BadParameter(
            f"{program!r} {what}; expected a Python script (for a module use -m, for other programs --no-python)",
            param_hint="PROGRAM",
        )
    if not os.access(path, os.R_OK):
        raise click.BadParameter(f"{program!r} can't be read by this user", param_hint="PROGRAM")
    return (_python(), "-u", program, *arguments)


def _python() -> str:
    return os.environ.get("PYTHON_EXEC", sys.executable)


def _fit_standalone(flags: dict[str, Any]) -> None:
    if flags["nnodes"] != (1, 1):
        raise click.BadParameter(
            "--standalone runs on this host alone: leave --nnodes out", param_hint="--nnodes"
        )
    if flags["rdzv_endpoint"]:
        raise click.BadParameter(
            "--standalone has its own rendezvous: leave it out", param_hint="--rdzv-endpoint"
        )
    flags["rdzv_id"] = flags["rdzv_id"] or f"standalone-{secrets.token_hex(4)}"


def _require_rendezvous(flags: dict[str, Any]) -> None:
    if not flags["rdzv_endpoint"]:
        raise click.UsageError(
            "where is the rendezvous service? Give --rdzv-endpoint HOST:PORT (start one with `rallypoint serve "
            "rendezvous`), or --standalone for a job of this host alone"
        )
    if not flags["rdzv_id"]:
        raise click.UsageError(
            "which run is this? Give --rdzv-id NAME, the same on all hosts and new for every job"
        )
