"""`rallypoint submit`: run a program on the agents of several hosts, from a machine that need not be one of them."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rallypoint.agent.config.settings import MOST_SECONDS, RunSettingError, rendezvous_conf
from rallypoint.agent.job.options import OPTIONS, job_fields
from rallypoint.cli.main import ENVIRONMENT
from rallypoint.cli.run_flags import RunCommand, flag, flags, run_flags
from rallypoint.cli.values import NodeCount, Text, refuse_etcd_url
from rallypoint.rendezvous.core.state import MOST_WORKERS_PER_NODE
from rallypoint.rpc.durations import set_seconds
from rallypoint.rpc.endpoint import (
    ClientSecurity,
    EndpointError,
    SettingError,
    parse_endpoint,
    parse_endpoints,
)
from rallypoint.rpc.runtime_folder import is_served, role_socket
from rallypoint.rpc.text import whole_number
from rallypoint.serving.options import Seconds, client_options

if TYPE_CHECKING:
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb
    from rallypoint.submission.session import Submission

_F = TypeVar("_F", bound=Callable[..., Any])

# Flags of `rallypoint run` that concern only the host where it is typed, or torchrun's ways to find other hosts; and
# flags that are declared again here.
_NOT_HERE = frozenset(
    {"standalone", "rdzv_backend", "node_rank", "master_addr", "local_addr", "node_id", "topology"}
    | {"start_method", "logs_specs", "monitor_interval", "signals_to_handle", "supervisor_address"}
    | {"metrics_address", "tty", "log_level", "nnodes", "nproc_per_node", "use_env", "print_completion"}
)

# Options that only the hosts can check: they name programs there.
_OF_THE_HOST = ("health-check",)


class AgentList(click.ParamType[tuple[str, ...]]):
    """Addresses of agents, separated by commas."""

    name = "HOST:PORT,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Parse and check."""
        if isinstance(value, tuple):
            return value
        endpoints = tuple(filter(None, (part.strip() for part in str(value).split(","))))
        if not endpoints:
            self.fail("names no agent; expected addresses, as in a:29420,b:29420", param, ctx)
        for endpoint in endpoints:
            try:
                parse_endpoint(endpoint)
            except EndpointError as error:
                self.fail(str(error), param, ctx)
            if endpoints.count(endpoint) > 1:
                self.fail(f"{endpoint!r} is listed twice; name each agent once", param, ctx)
        return endpoints


class HostsWorkers(click.ParamType[str]):
    """A number of workers, or a word that each host resolves."""

    name = "N|auto|cpu|gpu|xpu"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the value."""
        text = str(value)
        devices = ("auto", "cpu", "gpu", "xpu")
        if text not in devices and whole_number(text, 1, MOST_WORKERS_PER_NODE) is None:
            self.fail(
                f"{text!r} is not a number of workers from 1 to {MOST_WORKERS_PER_NODE}, "
                "and none of auto, cpu, gpu, xpu",
                param,
                ctx,
            )
        return text


class Variable(Text):
    """NAME=VALUE; NAME alone takes the value of this process's environment."""

    name = "NAME[=VALUE]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check and complete the value."""
        text = super().convert(value, param, ctx)
        name, given, _ = text.partition("=")
        if not name or not name.isprintable():
            self.fail(f"{text!r} is not of the form NAME=VALUE", param, ctx)
        if given:
            return text
        if name not in ENVIRONMENT:
            self.fail(f"{name} is not set here; give it a value, as in {name}=VALUE", param, ctx)
        return f"{name}={ENVIRONMENT[name]}"


_SUBMISSION = flags(
    "Submission",
    flag(
        "--agents",
        type=AgentList(),
        default=lambda: role_socket("agent"),
        show_default="the agent of this host",
        help="Agents of the job's hosts (`rallypoint serve agent`), as in a:29420,b:29420.",
    ),
    flag(
        "--nnodes",
        type=NodeCount(),
        metavar="N|MIN:MAX",
        show_default="number of agents",
        help="Number of nodes; MIN:MAX lets the job continue when hosts are lost, and others join.",
    ),
    flag(
        "--nproc-per-node",
        type=HostsWorkers(),
        default="1",
        help="Workers on each host; gpu, xpu, cpu: one per device; auto: one per GPU, else one per processor.",
    ),
    flag(
        "--env",
        type=Variable(),
        multiple=True,
        metavar="NAME[=VALUE]",
        help="Environment variable of the workers, overrides the agent's; may be repeated.",
    ),
    flag("--cwd", default="", metavar="FOLDER", help="Working directory; default: the agent's."),
    flag("--detach", is_flag=True, help="Return once all agents have accepted the job."),
    flag(
        "--json",
        "as_json",
        is_flag=True,
        help="With --detach: print the run, its rendezvous endpoint and its nodes as JSON.",
    ),
    flag(
        "--reconnect-timeout",
        type=Seconds(0, MOST_SECONDS),
        default=60.0,
        metavar="SECONDS",
        help="How long an agent may be unreachable before it is no longer followed. Its workers are not affected.",
    ),
)


def _fitting_run_flags(command: _F) -> _F:
    """Add the flags of `rallypoint run` that apply to remote hosts."""
    command = run_flags(command)
    parameters: list[click.Parameter] = command.__click_params__  # type: ignore[attr-defined]
    parameters[:] = [parameter for parameter in parameters if parameter.name not in _NOT_HERE]
    return command


@click.command(cls=RunCommand)
@_SUBMISSION
@_fitting_run_flags
@client_options
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def submit(**given: Any) -> None:
    """Run PROGRAM on the hosts of the agents as one distributed job, and follow it to its end.

    PROGRAM is a path on the hosts. Either all agents accept the job, or none runs it. Each line of output is prefixed
    with its host and rank. Ctrl-C stops the job on all hosts, a second Ctrl-C kills its workers. The exit code is that
    of `rallypoint run`; 130 after Ctrl-C. After --detach, use `rallypoint agent logs` to see the output.
    """
    if given["as_json"] and not given["detach"]:
        raise click.UsageError("--json would be mixed with the output of the workers; add --detach")
    submission = _submission(given)
    from rallypoint.agent.logs.follower import OutputThread  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.rpc.logs import configure_logs, get_logger, logs_are_json  # noqa: PLC0415
    from rallypoint.rpc.loop import run as run_loop  # noqa: PLC0415
    from rallypoint.submission.launching import NotLaunched  # noqa: PLC0415
    from rallypoint.submission.session import SubmissionSession  # noqa: PLC0415

    outputs = {1: OutputThread(1), 2: OutputThread(2)}
    configure_logs("info", given["log_format"])
    log = get_logger("rallypoint.submit")
    session = SubmissionSession(submission, outputs, lambda line: log.info(line, sentence=line))

    async def carry_out() -> int:
        try:
            return await session.run()
        finally:
            for output in outputs.values():
                await output.close(5.0)

    try:
        exit_code = run_loop(carry_out())
    except NotLaunched as error:
        raise SettingError(str(error)) from None
    if logs_are_json() and not submission.detach:
        log.info("job ended", exit_code=exit_code, report=session.failure_report)
    elif session.failure_report:
        click.echo(session.failure_report, err=True)
    if submission.detach and not exit_code:
        click.echo(
            _launched(submission, session.launches) if given["as_json"] else submission.launch.spec.run_id
        )
    sys.exit(exit_code)


def _launched(submission: Submission, launches: Sequence[pb.LaunchJobResponse]) -> str:
    agents = zip(submission.endpoints, launches, strict=True)
    return json.dumps(
        {
            "run_id": submission.launch.spec.run_id,
            "rendezvous_endpoint": launches[0].rendezvous_endpoint,
            "agents": [{"endpoint": endpoint, "node_id": launch.node_id} for endpoint, launch in agents],
        },
        indent=2,
    )


def _submission(given: Mapping[str, Any]) -> Submission:
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415
    from rallypoint.submission.session import Submission  # noqa: PLC0415

    agents: tuple[str, ...] = given["agents"]
    if agents == (here := role_socket("agent"),) and not is_served(here):
        raise SettingError(
            f"no agent of this user runs on this host (it would be at {here}): start it with `rallypoint serve agent`, "
            "or give --agents"
        )
    security: ClientSecurity = given["security"]
    launch = pb.LaunchJobRequest(spec=_spec(agents, given), launch_id=secrets.token_hex(8))
    return Submission(agents, launch, security, given["reconnect_timeout"], given["detach"])


def _spec(agents: Sequence[str], given: Mapping[str, Any]) -> pb.JobSpec:
    from rallypoint.agent.supervisor.spec import FIELDS  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415

    least, most = given["nnodes"] or (len(agents), len(agents))
    if least > len(agents):
        raise click.BadParameter(
            f"{least} nodes are more than the {len(agents)} agents; name more agents", param_hint="--nnodes"
        )
    options = _options(given)
    spec = pb.JobSpec(
        run_id=given["rdzv_id"] or _new_run_id(given["program"]),
        rendezvous_endpoint=_rendezvous(agents, given["rdzv_endpoint"]),
        timer_endpoint=given["timer_endpoint"],
        min_nodes=least,
        max_nodes=most,
        max_restarts=given["max_restarts"],
        rendezvous_settings=given["rdzv_conf"],
        command=_command(given),
        environment=dict(variable.split("=", 1) for variable in given["env"]),
        working_directory=given["cwd"],
    )
    if given["nproc_per_node"].isdigit():
        spec.local_world_size = int(given["nproc_per_node"])
    else:
        options["nproc-per-node"] = given["nproc_per_node"]
    try:
        rendezvous_conf(dict(spec.rendezvous_settings), (least, most), spec.max_restarts)
    except RunSettingError as error:
        raise click.BadParameter(str(error), param_hint="--rdzv-conf") from None
    for name, value in options.items():
        if name in FIELDS:
            _set_field(spec, name, value)
        else:
            spec.options[name] = _text(value)
    return spec


def _set_field(spec: pb.JobSpec, name: str, value: Any) -> None:
    """Set the field of an option to a value of its flag."""
    from rallypoint.agent.supervisor.spec import FIELDS  # noqa: PLC0415

    if name not in _OF_THE_HOST:
        value = job_fields({name: value}, MOST_WORKERS_PER_NODE)[OPTIONS[name].field]
    target = getattr(spec, FIELDS[name])
    if isinstance(value, tuple):
        target.extend(value)
    elif isinstance(value, float):
        set_seconds(target, value)
    elif isinstance(value, Signals):
        setattr(spec, FIELDS[name], value.name)
    elif value is not None:
        setattr(spec, FIELDS[name], type(target)(value))


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the job, checked here already: a mistake is reported without a launch."""
    named = {name: given.get(name.replace("-", "_")) for name in OPTIONS}
    known = {name: value for name, value in named.items() if value not in (None, ())}
    job_fields(
        {name: value for name, value in known.items() if name not in _OF_THE_HOST}, MOST_WORKERS_PER_NODE
    )
    return known


def _text(value: object) -> str:
    """Return an option's value as agents parse it: commas separate the parts of a repeatable option."""
    if isinstance(value, tuple):
        return ",".join(str(part).replace(",", ",,") for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _rendezvous(agents: Sequence[str], endpoint: str) -> str:
    """Return the rendezvous endpoint: the given one, else the first agent; empty: a single agent's own service."""
    if endpoint:
        refuse_etcd_url(endpoint)
        parse_endpoints(endpoint)
        return endpoint
    if len(agents) == 1:
        return ""
    far = [agent for agent in agents if not parse_endpoint(agent).loopback]
    if far and parse_endpoint(agents[0]).loopback:
        raise click.BadParameter(
            f"{far[0]} can't reach the first agent at {agents[0]}, which serves the job's rendezvous; give an address "
            "that all hosts can reach, or another rendezvous service with --rdzv-endpoint",
            param_hint="--agents",
        )
    return agents[0]


def _command(given: Mapping[str, Any]) -> list[str]:
    from rallypoint.agent.supervisor.spec import AGENTS_PYTHON  # noqa: PLC0415

    program, arguments, python = given["program"], given["arguments"], given["python"] or AGENTS_PYTHON
    if given["run_path"]:  # wins over the others, as in torchrun
        return [python, "-u", "-m", "rallypoint.worker.run_path", program, *arguments]
    if given["no_python"]:
        if given["module"]:
            raise click.UsageError("--module and --no-python contradict each other; leave one out")
        return [program, *arguments]
    return [python, "-u", *(["-m"] if given["module"] else []), program, *arguments]


def _new_run_id(program: str) -> str:
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in Path(program).stem)[:40]
    return f"{stem or os.path.basename(sys.argv[0])}-{secrets.token_hex(3)}"
