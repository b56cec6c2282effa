"""Values of flags, and the options that several commands share."""

from __future__ import annotations

import functools
import os
import shlex
import signal
from collections.abc import Callable
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from rallypoint.agent.job.options import parse_signal
from rallypoint.launcher.backends import is_etcd_url
from rallypoint.rendezvous.core.state import MOST_NODES, MOST_WORKERS_PER_NODE
from rallypoint.rpc.endpoint import CallTarget
from rallypoint.rpc.runtime_folder import SeveralRuns, found_socket, is_served, secret_beside
from rallypoint.serving.options import Seconds, Setting, client_options


class NodeCount(click.ParamType[tuple[int, int]]):
    """`N` or `MIN:MAX`, as (min, max)."""

    name = "N|MIN:MAX"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Parse and check the value."""
        if isinstance(value, tuple):
            return value
        least, separator, most = str(value).partition(":")
        try:
            nodes = int(least), int(most if separator else least)
        except ValueError:
            self.fail(
                f"{value!r} is not a number of nodes; expected N or MIN:MAX, as in 4 or 2:4", param, ctx
            )
        if nodes[0] < 1:
            self.fail(f"{value!r} asks for fewer than 1 node; the least is 1", param, ctx)
        if nodes[1] < nodes[0]:
            self.fail(
                f"{value!r} has its maximum below its minimum; did you mean {most}:{least}?", param, ctx
            )
        if nodes[1] > MOST_NODES:
            self.fail(f"{value!r} asks for more than {MOST_NODES} nodes, the most there can be", param, ctx)
        return nodes


class WorkerCount(click.ParamType[int]):
    """A number of workers, or one for each usable device of a kind."""

    name = "N|auto|cpu|gpu|xpu"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse and check the value."""
        if value in ("auto", "cpu", "gpu", "xpu"):
            return self._devices(str(value), param, ctx)
        try:
            count = int(value)
        except ValueError:
            self.fail(
                f"{value!r} is not a number of workers; expected a number, auto, cpu, gpu or xpu", param, ctx
            )
        if count < 1:
            self.fail(f"{value!r} workers can't form a job; the least is 1", param, ctx)
        if count > MOST_WORKERS_PER_NODE:
            self.fail(
                f"{value!r} workers are more than the {MOST_WORKERS_PER_NODE} that a host can have",
                param,
                ctx,
            )
        return count

    def _devices(self, kind: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from rallypoint.agent.health import gpu  # noqa: PLC0415 (needed for device counts only)

        processors = len(os.sched_getaffinity(0))
        if kind == "cpu":
            return processors
        count = gpu.count_xpus(os.environ) if kind == "xpu" else gpu.count_gpus(os.environ)
        if kind == "auto":
            return count or processors
        if not count:
            device = "Intel GPU" if kind == "xpu" else "GPU"
            self.fail(
                f"{kind!r} asks for one worker per {device}, and there is none that workers could use",
                param,
                ctx,
            )
        return count


class Text(click.ParamType[str]):
    """Text that can be encoded: a command line may hold bytes that are not UTF-8."""

    name = "TEXT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the value."""
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{text!r} is not valid UTF-8", param, ctx)
        return text


class RunId(Text):
    """Name of a run; the shell completes it with those of the rendezvous service that the command would use."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names of all runs; none on any error."""
        return _completions(ctx, incomplete, "")


class NodeId(Text):
    """Name of a node; the shell completes it with those of the run that the command line names."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names of the run's nodes; none on any error."""
        run_id = ctx.params.get("run_id")
        return _completions(ctx, incomplete, run_id) if run_id else []


_COMPLETION_TIMEOUT = 0.5  # seconds; there are two calls if an agent has the address of the service


def _completions(ctx: click.Context, incomplete: str, run_id: str) -> list[CompletionItem]:
    """Return the names of a run's nodes, or of all runs if `run_id` is empty; none that needs quotes in a shell."""

    @click.command()
    @service_options
    def names(service: CallTarget) -> list[str]:
        from rallypoint.cli.operator import RENDEZVOUS, all_nodes, all_runs, call  # noqa: PLC0415 (gRPC)

        if run_id:
            nodes = call(RENDEZVOUS, service, lambda stub: all_nodes(run_id, stub))
            return [node.node_id for node in nodes]
        runs = call(RENDEZVOUS, service, all_runs).runs
        return [run.run_id for run in runs]

    flags = ["--timeout", str(_COMPLETION_TIMEOUT)]
    for option in names.params:
        value = ctx.params.get(option.name or "")
        if value and option.name != "timeout":
            flags += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    try:
        found = names.main(flags, ctx.command_path, standalone_mode=False)
    except Exception:  # an error has no place on a command line that is being typed
        return []
    return [
        CompletionItem(name) for name in found if name.startswith(incomplete) and name == shlex.quote(name)
    ]


class Pairs(click.ParamType[dict[str, str]]):
    """`key=value,…`, as a dictionary."""

    name = "KEY=VALUE,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, str]:
        """Parse and check the value."""
        if isinstance(value, dict):
            return value
        pairs: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in str(value).split(","))):
            key, separator, text = (piece.strip() for piece in part.partition("="))
            if not separator or not key:
                self.fail(f"{part!r} is not of the form key=value", param, ctx)
            pairs[key] = text
        return pairs


class SignalList(click.ParamType[tuple[int, ...]]):
    """Names of signals, separated by commas, as their numbers."""

    name = "NAMES"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse and check the value."""
        if isinstance(value, tuple):
            return value
        numbers = []
        for name in filter(None, (part.strip() for part in str(value).split(","))):
            try:
                number = parse_signal(name)
            except ValueError:
                self.fail(f"{name!r} is not a signal; expected names, as in SIGTERM,SIGUSR1", param, ctx)
            if number in (signal.SIGKILL, signal.SIGSTOP):
                self.fail(f"{name!r} can't be handled by any program; leave it out", param, ctx)
            numbers.append(number)
        return tuple(numbers)


# ---- Options of the commands that call a service.

_Command = TypeVar("_Command", bound=Callable[..., Any])


class ServiceAddress(Text):
    """Address of a rendezvous service; the URL of an etcd, which `rallypoint run` accepts, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the value."""
        text = super().convert(value, param, ctx)
        refuse_etcd_url(text)
        return text


def refuse_etcd_url(endpoint: str) -> None:
    """Raise click.BadParameter for an etcd URL in `--rdzv-endpoint`, without quoting it: it may hold a password."""
    if is_etcd_url(endpoint):
        raise click.BadParameter(
            "this command needs the address of a rendezvous replica (host:port), not the URL of an etcd",
            param_hint="--rdzv-endpoint",
        )


def service_options(command: _Command, *, each: bool = False) -> _Command:
    """Add the options of a call to a rendezvous service; the command gets them as `service`, a CallTarget."""
    return _endpoint_option(
        "--rdzv-endpoint",
        "rendezvous",
        ServiceAddress(),
        "HOST:PORT[,...]",
        "Address of the rendezvous service, or of its replicas.",
        each=each,
    )(command)


def timer_service_options(command: _Command) -> _Command:
    """Add the options of a call to a timer service; the command gets them as `service`, a CallTarget."""
    return _endpoint_option(
        "--timer-endpoint", "timer", Text(), "HOST:PORT", "Address of the timer service."
    )(command)


def agent_options(command: _Command, *, each: bool = False) -> _Command:
    """Add the options of a call to an agent; the command gets them as `service`, a CallTarget."""
    option = _endpoint_option("--agent", "agent", Text(), "HOST:PORT", "Address of the agent.", each=each)
    return option(command)


def _endpoint_option(
    flag: str, role: str, kind: click.ParamType[str], metavar: str, help_: str, *, each: bool = False
) -> Callable[[_Command], _Command]:
    """Return the option for a service's address, with those of every call to a service.

    Without the option the service is found by name: in the agent of the run on this host that is asked about, or the
    role's own on this host. With `each`, the command is called for each run of this host if there are several,
    unless `as_json` is set: its output is one document.
    """
    option = click.option(
        flag,
        cls=Setting,
        type=kind,
        metavar=metavar,
        help=f"{help_} Default: the one of this user on this host, alone or in the agent of the run.",
    )
    name = flag.removeprefix("--").replace("-", "_")

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def call(**arguments: Any) -> Any:
            endpoint, security, timeout = (arguments.pop(each) for each in (name, "security", "timeout"))
            if endpoint is not None:
                return command(**arguments, service=CallTarget(endpoint, security, timeout))
            try:
                endpoints = [_found(role, arguments.get("run_id") or "", timeout)]
            except SeveralRuns as several:
                if not each or arguments["as_json"] or several.role != role:
                    raise
                endpoints = several.endpoints
            for endpoint in endpoints:
                service = CallTarget(endpoint, security or secret_beside(endpoint), timeout)
                result = command(**arguments, service=service)
            return result

        return option(timeout_option(client_options(cast(_Command, call))))

    return decorate


def _found(role: str, run_id: str, timeout: float) -> str:
    """Return the address of the service of this user on this host; or else the one that the run's agent here uses."""
    endpoint = found_socket(role, run_id)
    if role != "rendezvous" or is_served(endpoint) or not is_served(agent := found_socket("agent", run_id)):
        return endpoint
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.cli.operator import SUPERVISOR, call  # noqa: PLC0415

    request, target = pb.GetJobRequest(run_id=run_id), CallTarget(agent, secret_beside(agent), timeout)
    return call(SUPERVISOR, target, lambda stub: stub.GetJob(request)).job.rendezvous_endpoint


def timeout_option(command: _Command) -> _Command:
    """Add the option `timeout`: the time limit of the command, in seconds."""
    return click.option(
        "--timeout",
        cls=Setting,
        type=Seconds(0.1),
        default=10.0,
        metavar="SECONDS",
        help="How long to wait for a response, retries included.",
    )(command)


def limit_option(default: int, most: int, help_: str) -> Callable[[_Command], _Command]:
    """Return the option `limit`: how many entries the command shows."""
    return click.option(
        "--limit", type=click.IntRange(1, most), default=default, show_default=True, metavar="N", help=help_
    )
