"""`rallypoint submit`: run a program on the agents of several hosts, from a machine that need not be one of them."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rallypoint.agent.config.settings import MOST_SECONDS, MOST_WORKERS, RunSettingError, rendezvous_conf
from rallypoint.agent.job.options import OPTIONS, job_fields
from rallypoint.cli.main import ENVIRONMENT
from rallypoint.cli.run_command import RunCommand, flag, flags
from rallypoint.cli.run_flags import run_flags
from rallypoint.cli.service_options import refuse_etcd_url
from rallypoint.cli.values import NodeCount, Text
from rallypoint.rpc.endpoint import ClientTLS, EndpointError, SettingError, parse_endpoint, parse_endpoints
from rallypoint.serving.options import Seconds, client_options

if TYPE_CHECKING:
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb
    from rallypoint.submission.session import Submission

_F = TypeVar("_F", bound=Callable[..., Any])

# Flags of `rallypoint run` that are about the host on which that is typed, or about torchrun's ways to find others;
# and those that are declared anew here.
_NOT_HERE = frozenset(
    {"standalone", "rdzv_backend", "node_rank", "master_addr", "local_addr", "node_id", "topology"}
    | {"start_method", "logs_specs", "monitor_interval", "signals_to_handle", "supervisor_address"}
    | {"metrics_address", "log_level", "log_format", "nnodes", "nproc_per_node"}
)

# Options that only their host can look at: they name programs there.
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
                self.fail(f"{endpoint!r} is there twice; name each agent once", param, ctx)
        return endpoints


class HostsWorkers(click.ParamType[str]):
    """A number of workers, or a word that the hosts make one of."""

    name = "N|auto|cpu|gpu|xpu"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check."""
        text = str(value)
        if text not in ("auto", "cpu", "gpu", "xpu") and not (
            text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_WORKERS
        ):
            self.fail(
                f"{text!r} is not a number of workers from 1 to {MOST_WORKERS}, and none of auto, cpu, gpu, xpu",
                param,
                ctx,
            )
        return text


class Variable(Text):
    """NAME=VALUE, or NAME alone for the value that it has here."""

    name = "NAME[=VALUE]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check, and complete."""
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
        required=True,
        help="The agents of the job's hosts (`rallypoint serve agent`), as in a:29420,b:29420.",
    ),
    flag(
        "--nnodes",
        type=NodeCount(),
        metavar="N|MIN:MAX",
        show_default="as many as agents",
        help="Nodes of the job: MIN:MAX lets it go on when hosts are lost, and others join.",
    ),
    flag(
        "--nproc-per-node",
        type=HostsWorkers(),
        default="1",
        help="Workers on each host; gpu, xpu, cpu: one for each there; auto: per GPU, else per processor.",
    ),
    flag(
        "--env",
        type=Variable(),
        multiple=True,
        metavar="NAME[=VALUE]",
        help="A variable for the workers, over their agents' own; may be repeated.",
    ),
    flag("--cwd", type=Text(), default="", metavar="FOLDER", help="Where workers run; the agent's folder."),
    flag("--detach", is_flag=True, help="Return once all agents have the job."),
    flag(
        "--json",
        "as_json",
        is_flag=True,
        help="With --detach: print the run, where it meets, and its nodes as JSON.",
    ),
    flag(
        "--reconnect-timeout",
        type=Seconds(0, MOST_SECONDS),
        default=60.0,
        metavar="SECONDS",
        help="How long an agent may be out of reach before it is no longer followed. Its workers don't care.",
    ),
)


def _fitting_run_flags(command: _F) -> _F:
    """Gives a command the flags of `rallypoint run` that make sense here."""
    command = run_flags(command)
    parameters: list[click.Parameter] = command.__click_params__  # type: ignore[attr-defined]
    parameters[:] = [parameter for parameter in parameters if parameter.name not in _NOT_HERE]
    return command


@click.command(
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False, "max_content_width": 110},
    options_metavar="--agents HOST:PORT,… [OPTIONS] [--]",
)
@_SUBMISSION
@_fitting_run_flags
@client_options
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def submit(**given: Any) -> None:
    """Run PROGRAM on the hosts of the agents as one distributed job, and follow it to its end.

    PROGRAM is a path on the hosts. All agents take the job on, or none. Their workers' output is shown with the host
    and the rank before each line. Ctrl-C stops the job everywhere, a second one kills its workers at once. The exit
    code is that of `rallypoint run`; 130 after Ctrl-C. With --detach, follow it with `rallypoint agent logs`.
    """
    if given["as_json"] and not given["detach"]:
        raise click.UsageError("--json is for launches: what follows on is the workers' output; add --detach")
    submission = _submission(given)
    from rallypoint.agent.logs.follower import OutputThread  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.rpc.loop import run as run_loop  # noqa: PLC0415
    from rallypoint.submission.launching import NotLaunched  # noqa: PLC0415
    from rallypoint.submission.session import SubmissionSession  # noqa: PLC0415

    outputs = {1: OutputThread(1), 2: OutputThread(2)}
    session = SubmissionSession(submission, outputs, lambda line: click.echo(line, err=True))

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
    tls: ClientTLS | None = given["tls"]
    launch = pb.LaunchJobRequest(spec=_spec(agents, given), launch_id=secrets.token_hex(8))
    return Submission(agents, launch, tls, given["reconnect_timeout"], given["detach"])


def _spec(agents: Sequence[str], given: Mapping[str, Any]) -> pb.JobSpec:
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
        role=options.pop("role", ""),
        log_dir=options.pop("log-dir", ""),
        command=_command(given),
        environment=dict(variable.split("=", 1) for variable in given["env"]),
        working_directory=given["cwd"],
    )
    if given["nproc_per_node"].isdigit():
        spec.local_world_size = int(given["nproc_per_node"])
    else:
        options["nproc-per-node"] = given["nproc_per_node"]
    if (shutdown_timeout := options.pop("shutdown-timeout", "")) != "":
        spec.shutdown_timeout.FromNanoseconds(round(float(shutdown_timeout) * 1e9))
    try:
        rendezvous_conf(dict(spec.rendezvous_settings), (least, most), spec.max_restarts)
    except RunSettingError as error:
        raise click.BadParameter(str(error), param_hint="--rdzv-conf") from None
    spec.options.update(options)
    return spec


def _options(given: Mapping[str, Any]) -> dict[str, str]:
    """The options of the job as text, looked at here already: nobody waits for a host to find a mistake."""
    named = {name: given.get(name.replace("-", "_")) for name in OPTIONS}
    known = {name: value for name, value in named.items() if value not in (None, ())}
    job_fields({name: value for name, value in known.items() if name not in _OF_THE_HOST}, MOST_WORKERS)
    return {name: _text(value) for name, value in known.items()}


def _text(value: object) -> str:
    """An option's value as agents read it: commas separate the parts of one that can be repeated."""
    if isinstance(value, tuple):
        return ",".join(str(part).replace(",", ",,") for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _rendezvous(agents: Sequence[str], endpoint: str) -> str:
    """Where the agents meet: where it is said, or at the first of them; empty: a single one at its own service."""
    if endpoint:
        refuse_etcd_url(endpoint)
        parse_endpoints(endpoint)
        return endpoint
    if len(agents) == 1:
        return ""
    far = [agent for agent in agents if not parse_endpoint(agent).loopback]
    if far and parse_endpoint(agents[0]).loopback:
        raise click.BadParameter(
            f"{far[0]} can't reach the first agent at {agents[0]}, where the job's hosts are to meet; name it as "
            "the others see it, or another rendezvous service with --rdzv-endpoint",
            param_hint="--agents",
        )
    return agents[0]


def _command(given: Mapping[str, Any]) -> list[str]:
    from rallypoint.agent.supervisor.spec import AGENTS_PYTHON  # noqa: PLC0415

    program, arguments = given["program"], given["arguments"]
    if given["run_path"]:  # wins over the others, as in torchrun
        return [AGENTS_PYTHON, "-u", "-m", "rallypoint.worker.run_path", program, *arguments]
    if given["no_python"]:
        if given["module"]:
            raise click.UsageError("--module and --no-python contradict each other; leave one out")
        return [program, *arguments]
    return [AGENTS_PYTHON, "-u", *(["-m"] if given["module"] else []), program, *arguments]


def _new_run_id(program: str) -> str:
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in Path(program).stem)[:40]
    return f"{stem or os.path.basename(sys.argv[0])}-{secrets.token_hex(3)}"
