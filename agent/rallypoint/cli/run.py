"""`rallypoint run`: torchrun's command with torchrun's flags."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from rallypoint.agent.job.options import OPTIONS, idle_options, job_fields
from rallypoint.cli.main import ENVIRONMENT, importing
from rallypoint.cli.run_flags import RunCommand, run_flags
from rallypoint.launcher.backends import (
    RequestedRendezvous,
    ResolvedRendezvous,
    is_etcd_url,
    is_static,
    resolve_rendezvous,
)
from rallypoint.launcher.plan import Hosted, LaunchPlan, Replicated
from rallypoint.rpc.endpoint import SettingError
from rallypoint.serving.options import access_options, client_options

if TYPE_CHECKING:
    from rallypoint.agent.failures.failure import WorkerFailure

_START_METHODS = ("spawn", "fork", "forkserver")
# Options that the rendezvous backend sets itself, from the same flags.
_OF_THE_BACKEND = ("master-addr", "master-port")


@click.command(cls=RunCommand)
@run_flags
@client_options
@access_options
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(**flags: Any) -> None:
    """Run PROGRAM on this host as part of a distributed job, and keep it running.

    The job's other hosts run the same command. Worker failures restart all workers, up to --max-restarts; hosts that
    join or leave change the number of workers. Exit code 0: all workers of all hosts succeeded; 1: the job failed or
    was cancelled; 2: it could not be started as requested; 3: this host can't run workers: retry on another host; 4:
    the run had succeeded before; 93: a worker reported an unrecoverable error: do not retry; 128+N: this host left
    because of signal N.

    Every flag can be set in the environment: --max-restarts as RALLYPOINT_MAX_RESTARTS, or as PET_MAX_RESTARTS like
    torchrun. Names may be abbreviated, and may have underscores instead of dashes.
    """
    log_level, log_format = flags.pop("log_level"), flags.pop("log_format")
    try:
        names = ("program", "arguments", "module", "no_python", "run_path", "python")
        command, notices = _worker_command(**{name: flags.pop(name) for name in names})
        sys.exit(_run(_plan(command, flags, notices), log_level, log_format))
    except (SettingError, click.ClickException) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        _reply(None, message)
        if log_format != "json":
            raise
        _log_refusal(message)
        sys.exit(2)


def _plan(command: tuple[str, ...], flags: dict[str, Any], notices: list[str]) -> LaunchPlan:
    where = _resolve_rendezvous(flags, notices)
    options = _job_options(flags)
    job = job_fields(options, flags["nproc_per_node"])
    tty, workers = flags["tty"], flags["nproc_per_node"]
    if tty is not None and tty >= workers:
        raise SettingError(f"--tty: there is no local rank {tty}; this host has {workers}, counted from 0")
    return LaunchPlan(
        command=command,
        environment=ENVIRONMENT,
        run_id=where.run_id,
        service=where.service,
        nodes=where.nodes or flags["nnodes"],
        local_world_size=flags["nproc_per_node"],
        max_restarts=flags["max_restarts"],
        conf=where.conf,
        node_id=flags["node_id"] or where.node_id,
        node_id_is_ours=bool(where.node_id),
        local_address=flags["local_addr"],
        timer_endpoint=flags["timer_endpoint"],
        supervisor_address=flags["supervisor_address"],
        metrics_address=flags["metrics_address"],
        security=flags["security"],
        access=flags["access"],
        signals=flags["signals_to_handle"],
        job={
            **job,
            "master_address": where.master_address,
            "master_port": where.master_port,
            "input_rank": tty or 0,
            "tty": workers == 1 or tty is not None,
        },
        notices=(
            *notices,
            *where.notices,
            *_notices(flags),
            *_idle(options, job),
            *_idle_access(flags, where),
        ),
    )


def _resolve_rendezvous(flags: dict[str, Any], notices: list[str]) -> ResolvedRendezvous:
    source = click.get_current_context().get_parameter_source
    requested = RequestedRendezvous(
        backend=flags["rdzv_backend"],
        endpoint=flags["rdzv_endpoint"],
        run_id=flags["rdzv_id"],
        conf=flags["rdzv_conf"],
        nodes=flags["nnodes"],
        nodes_given=source("nnodes") is not ParameterSource.DEFAULT,
        standalone=flags["standalone"],
        node_rank=flags["node_rank"],
        master_address=flags["master_addr"],
        master_port=flags["master_port"],
    )
    # A variable or a context may be set for all commands; `rallypoint run train.py` is a job of this host all the same,
    # and one with the flags of the static backend has an address of its own.
    endpoint = requested.endpoint
    named = requested.run_id or requested.backend or is_etcd_url(endpoint)
    if endpoint and not named and source("rdzv_endpoint") is not ParameterSource.COMMANDLINE:
        requested = replace(requested, endpoint="")
        variable = source("rdzv_endpoint") is ParameterSource.ENVIRONMENT
        origin = "RALLYPOINT_RDZV_ENDPOINT" if variable else "rdzv-endpoint of the context"
        if requested.nodes[1] > 1 and not requested.standalone and not is_static(requested):
            raise SettingError(
                f"which run is this? {origin} names the service {endpoint}; give --rdzv-id NAME for a run there"
            )
        notices.append(f"{origin} is not used: this job has its own service; give --rdzv-id for a run there")
        if source("timer_endpoint") is ParameterSource.DEFAULT_MAP:
            flags["timer_endpoint"] = ""
    return resolve_rendezvous(requested)


def _job_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job options that were set; an unset flag that may be repeated is an empty tuple."""
    values = {name: flags.get(name.replace("-", "_")) for name in OPTIONS if name not in _OF_THE_BACKEND}
    return {name: value for name, value in values.items() if value not in (None, ())}


def _idle(options: Mapping[str, Any], job: Mapping[str, Any]) -> list[str]:
    # A variable may be set for all jobs of a site; only the command line refers to this job alone.
    source = click.get_current_context().get_parameter_source
    written = {
        name: value
        for name, value in options.items()
        if source(name.replace("-", "_")) is ParameterSource.COMMANDLINE
    }
    return idle_options(written, job)


def _idle_access(flags: Mapping[str, Any], where: ResolvedRendezvous) -> list[str]:
    supervisor = flags["supervisor_address"]
    if isinstance(where.service, Hosted | Replicated) or (supervisor and not supervisor.startswith("unix:")):
        return []
    source = click.get_current_context().get_parameter_source
    return [
        f"--{name.replace('_', '-')} has no effect: this job's services listen at Unix sockets, for your user alone"
        for name in ("policy", "token_keys")
        if source(name) is ParameterSource.COMMANDLINE
    ]


def _notices(flags: Mapping[str, Any]) -> list[str]:
    """Return one line for each torchrun option that has no effect here; refuse unsupported values."""
    if flags["logs_specs"] not in (None, "default"):
        raise SettingError(
            f"--logs-specs: {flags['logs_specs']!r} can't be used here: logs are written as torchrun's default does"
        )
    method = flags["start_method"]
    if method is not None and method not in _START_METHODS:
        raise SettingError(f"--start-method: {method!r} is none of {', '.join(_START_METHODS)}")
    notices = []
    if flags["monitor_interval"] is not None:
        notices.append("--monitor-interval has no meaning here: worker exits are noticed at once")
    if method not in (None, "spawn"):
        notices.append(f"--start-method {method} has no meaning here: every program gets a new process")
    return notices


def _run(plan: LaunchPlan, log_level: str, log_format: str) -> int:
    # The spawner starts while gRPC is being imported. Both come last, after every check of the command line.
    from rallypoint.agent.spawner.client import Spawner  # noqa: PLC0415
    from rallypoint.agent.spawner.protocol import SpawnError  # noqa: PLC0415

    try:
        spawner = Spawner.start(stdin=True)
    except SpawnError as error:
        raise SettingError(str(error)) from None
    with importing():
        from rallypoint.launcher.launch import configure_job_logs, launch, print_summary  # noqa: PLC0415
        from rallypoint.rpc.loop import run as run_loop  # noqa: PLC0415

    configure_job_logs(log_level, log_format)
    result = run_loop(launch(plan, spawner))
    print_summary(result)
    if result.exit_code != 0:
        _reply(result.failure, result.detail)
    return result.exit_code


def _reply(failure: WorkerFailure | None, detail: str) -> None:
    """Write the reason of the job's end for the platform that has started this process."""
    if path := ENVIRONMENT.get("TORCHELASTIC_ERROR_FILE"):
        from rallypoint.agent.failures.failure import write_reply_file  # noqa: PLC0415 (for failed jobs only)

        write_reply_file(path, failure, detail)


def _log_refusal(report: str) -> None:
    from rallypoint.rpc.logs import configure_logs, get_logger  # noqa: PLC0415 (the only line of this process's log)

    configure_logs("error", "json")
    get_logger("rallypoint.run").error("job can't be started", exit_code=2, report=report)


def _worker_command(
    *, program: str, arguments: tuple[str, ...], module: bool, no_python: bool, run_path: bool, python: str
) -> tuple[tuple[str, ...], list[str]]:
    """Return the command of the workers, and the notices about it."""
    if no_python and not run_path:  # --run-path wins, as in torchrun
        source = click.get_current_context().get_parameter_source("python")
        for flag, given in (("--module", module), ("--python", source is ParameterSource.COMMANDLINE)):
            if given:
                raise click.UsageError(f"{flag} and --no-python contradict each other; leave one out")
        _check_executable(program)
        return (program, *arguments), []
    if run_path or not module:
        _check_readable(program, program_may_be_folder=run_path)
    notices = _check_python(python, run_path) if python else []
    python = python or (not run_path and os.environ.get("PYTHON_EXEC")) or sys.executable
    kind = ("-m", "rallypoint.worker.run_path") if run_path else ("-m",) if module else ()
    return (python, "-u", *kind, program, *arguments), notices


def _check_readable(program: str, program_may_be_folder: bool = False) -> None:
    path = Path(program)
    if not path.is_file() and not (program_may_be_folder and path.is_dir()):
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise click.BadParameter(
            f"{program!r} {problem}; expected a Python script (for a module use -m, for other programs --no-python)",
            param_hint="PROGRAM",
        )
    if not os.access(path, os.R_OK):
        raise click.BadParameter(f"{program!r} can't be read by this user", param_hint="PROGRAM")


def _check_executable(program: str) -> None:
    if "${local_rank}" in program or shutil.which(program) is not None:
        return
    if os.path.isfile(program) and "/" in program:
        problem = "is not executable; chmod +x it, or run it through its interpreter"
    else:
        problem = (
            "does not exist; check the path"
            if "/" in program
            else "is not a program in PATH; give its full path"
        )
    raise click.BadParameter(f"{program!r} {problem}", param_hint="PROGRAM")


# Runs on any Python. Workers have another first entry of sys.path: the folder of their script.
_PROBE = """
import sys
sys.path = [path for path in sys.path if path]
try:
    from importlib.util import find_spec
    found = all(map(find_spec, ["rallypoint.worker", "rallypoint.timer"]))
except ImportError:
    found = False
print("Python %d.%d %s" % (sys.version_info[0], sys.version_info[1], found))
"""


def _check_python(python: str, run_path: bool) -> list[str]:
    """Check that a program is a Python interpreter.

    Returns:
        A notice if it can't import the modules of workers; most programs use none of them.

    Raises:
        SettingError: It is no interpreter, or `--run-path` needs these modules.
    """
    if os.path.isdir(python):
        inside = Path(python) / "bin" / "python"
        raise SettingError(
            f"--python: {python!r} is a folder; expected an interpreter, as in {str(inside)!r}"
        )
    if shutil.which(python) is None:
        raise SettingError(f"--python: {python!r} is not a program; expected a Python interpreter")
    try:
        output = subprocess.run(
            [python, "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        output = b""
    found = re.search(rb"(Python \d+\.\d+) (True|False)\s*$", output)
    if found is None:
        raise SettingError(f"--python: {python!r} is not a Python interpreter: `-c` runs no Python code")
    if found[2] == b"True":
        return []
    missing = f"{python} ({found[1].decode()}) has no rallypoint.worker and rallypoint.timer"
    if run_path:
        raise SettingError(
            f"--run-path: {missing}, which it needs: install the package rallypoint-worker there"
        )
    return [f"{missing}: a program that imports them needs the package rallypoint-worker there"]
