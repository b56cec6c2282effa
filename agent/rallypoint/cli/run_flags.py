"""The flags of `rallypoint run` by section, torchrun's under their names and our own, and the class that parses them.

A flag without a type here is parsed by `rallypoint.agent.job.options`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from rallypoint.agent.job.options import split_commas
from rallypoint.cli.values import NodeCount, Pairs, SignalList, Text, WorkerCount
from rallypoint.rendezvous.core.state import MOST_RESTARTS
from rallypoint.serving.options import Setting

_F = TypeVar("_F", bound=Callable[..., Any])


# ---- The command: flags parsed as argparse does, and help in sections.


class Flag(Setting):
    """A flag in one section of the help."""

    def __init__(
        self, *declarations: Any, section: str = "Other", torchrun: bool = False, **attributes: Any
    ) -> None:
        """Declare the flag.

        Args:
            section: Heading of the help under which the flag is listed.
            torchrun: True for torchrun's flags: an abbreviation then means them rather than our own flags.
        """
        super().__init__(*declarations, **attributes)
        self.section = section
        self.torchrun = torchrun

    def type_cast_value(self, context: click.Context, value: Any) -> Any:
        """Convert a value. After a short name, remove a leading "=" as argparse does; click keeps it."""
        if isinstance(value, str) and any(not name.startswith("--") for name in self.opts):
            value = value.removeprefix("=")
        return super().type_cast_value(context, value)

    def get_help_extra(self, context: click.Context) -> click.types.OptionHelpExtra:
        """Return the additions to the help text: the default, also if another module applies it; no range."""
        extra = super().get_help_extra(context)
        extra.pop("range", None)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default
        return extra

    def get_error_hint(self, context: click.Context | None) -> str:
        """Return the flag's name for an error, with the environment variable if the value is from there."""
        hint = super().get_error_hint(context)
        if (
            context is None
            or context.get_parameter_source(self.name or "") is not ParameterSource.ENVIRONMENT
        ):
            return hint
        variables = [self.envvar] if isinstance(self.envvar, str) else self.envvar or ()
        return f"{hint} (from {next(name for name in variables if os.environ.get(name))})"


class RunCommand(click.Command):
    """A command that takes flags with dashes or underscores, and abbreviated, like torchrun."""

    def __init__(self, **attributes: Any) -> None:
        settings = {"allow_interspersed_args": False, "max_content_width": 110}
        super().__init__(**attributes, context_settings=settings, options_metavar="[OPTIONS] [--]")

    def make_context(self, *arguments: Any, **attributes: Any) -> click.Context:
        """Parse a command line."""
        attributes["token_normalize_func"] = self._whole_name
        return super().make_context(*arguments, **attributes)

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Parse the arguments; refuse an ambiguous abbreviation with the list of its flags."""
        try:
            return super().parse_args(context, arguments)
        except click.NoSuchOption as error:
            begun = self._match(error.option_name.lstrip("-")) if error.option_name.startswith("--") else []
            if len(begun) < 2:
                raise
            *names, last = (f"--{name}" for name in begun)
            raise click.UsageError(
                f"{error.option_name} could be {', '.join(names)} or {last}; give the full name", context
            ) from None

    def _match(self, name: str) -> list[str]:
        """Return the flags that begin with `name`; only torchrun's if it has any."""
        flags = [flag for flag in self.params if isinstance(flag, Flag)]
        for among in ([flag for flag in flags if flag.torchrun], flags):
            names = [part.lstrip("-") for flag in among for part in flag.opts if part.startswith("--")]
            if begun := [each for each in names if each.startswith(name)]:
                return begun
        return []

    def _whole_name(self, name: str) -> str:
        """Complete an abbreviated flag; `name` and result are without leading dashes, underscores become dashes.

        An ambiguous abbreviation is returned unchanged; click refuses it.
        """
        name = name.replace("_", "-")
        begun = self._match(name) if len(name) > 1 else []
        return begun[0] if len(begun) == 1 and not self._is_whole(name) else name

    def _is_whole(self, name: str) -> bool:
        return any(f"--{name}" in flag.opts for flag in self.params)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the flags by section, in the order in which sections first occur."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None and isinstance(parameter, click.Option):
                of_all_clients = "Other" if "--help" in parameter.opts else "Security"
                sections.setdefault(getattr(parameter, "section", of_all_clients), []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


def flags(section: str, *declared: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Return a decorator that adds the flags of one section to a command, in this order."""

    def decorate(command: _F) -> _F:
        for declare in reversed(declared):
            command = declare(command)
        for parameter in getattr(command, "__click_params__", [])[-len(declared) :]:
            parameter.section = section
        return command

    return decorate


def flag(*declarations: str, torchrun: bool = False, **attributes: Any) -> Callable[[_F], _F]:
    """Declare a flag that RALLYPOINT_<NAME> or, as with torchrun, PET_<NAME> can set too.

    Args:
        torchrun: True if torchrun has the flag.
        attributes: As in click; the default of `type` is Text. `envvar`: more variables, with the lowest precedence.
    """
    long = next(declaration for declaration in declarations if declaration.startswith("--"))
    name = long.lstrip("-").replace("-", "_").upper()
    variables = [f"RALLYPOINT_{name}", f"PET_{name}"]
    more = attributes.pop("envvar", ())
    variables += [more] if isinstance(more, str) else more
    if not attributes.get("is_flag"):
        attributes.setdefault("type", Text())
    return click.option(
        *declarations, cls=Flag, torchrun=torchrun, envvar=variables, show_envvar=False, **attributes
    )


# ---- The flags.


class _Part(Text):
    """One value of a repeatable flag; in the environment, commas separate the values."""

    def split_envvar_value(self, rv: str) -> tuple[str, ...]:
        """Split the value of an environment variable."""
        return split_commas(rv)


def _torchrun(*declarations: str, **attributes: Any) -> Callable[[_F], _F]:
    return flag(*declarations, torchrun=True, **attributes)


def _print_completion(context: click.Context, _: click.Parameter, shell: str | None) -> None:
    if shell is not None and not context.resilient_parsing:
        from rallypoint.cli.main import completion  # noqa: PLC0415 (it imports this module)

        context.invoke(completion, shell=shell)
        context.exit()


_JOB = flags(
    "Job",
    _torchrun(
        "--nnodes", type=NodeCount(), default="1:1", help="Number of nodes: N, or MIN:MAX for an elastic job."
    ),
    _torchrun(
        "--nproc-per-node",
        type=WorkerCount(),
        default="1",
        metavar="N|auto|cpu|gpu|xpu",
        help="Workers on this host; gpu, xpu, cpu: one per device; auto: one per GPU, else one per processor.",
    ),
    _torchrun("--standalone", is_flag=True, help="Run on this host only, with a rendezvous of its own."),
    _torchrun(
        "--max-restarts",
        type=click.IntRange(0, MOST_RESTARTS),
        default=0,
        metavar="N",
        help="Number of restarts after worker failures, over the whole run.",
    ),
    _torchrun("--role", show_default="default", help="Role of the workers."),
    _torchrun(
        "--print-completion",
        type=click.Choice(["bash", "zsh", "fish"]),
        expose_value=False,
        is_eager=True,
        callback=_print_completion,
        help="Print the completion script for this shell, as `rallypoint completion` does.",
    ),
)
_RENDEZVOUS = flags(
    "Rendezvous",
    _torchrun(
        "--rdzv-backend",
        metavar="NAME",
        show_default="rallypoint",
        help="Where rendezvous is served. rallypoint: by a separate service; static, c10d: by one of the job's agents; "
        "etcd, etcd-v2: by some of the agents, over an etcd.",
    ),
    _torchrun(
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT[,...]",
        help="Address of the rendezvous service, of all its replicas, or of an etcd; or torch's URL "
        "etcd://HOST:PORT/RUN_ID?min_workers=N&...",
    ),
    _torchrun("--rdzv-id", default="", metavar="RUN_ID", help="Name of the run, the same on all its hosts."),
    _torchrun(
        "--rdzv-conf",
        type=Pairs(),
        default="",
        help="Settings of the run, as in last_call_timeout=1,join_timeout=60; times in seconds.",
    ),
    _torchrun(
        "--node-rank",
        type=click.IntRange(0),
        metavar="N",
        show_default="0",
        help="Rank of this host, with --rdzv-backend static.",
    ),
    _torchrun(
        "--master-addr",
        metavar="HOST",
        show_default="127.0.0.1",
        help="Address of the host with node rank 0, with --rdzv-backend static.",
    ),
    _torchrun(
        "--master-port",
        type=click.IntRange(1, 65535),
        metavar="PORT",
        show_default="29500",
        help="Port at which the workers of all hosts meet, with --rdzv-backend static.",
    ),
    _torchrun("--local-addr", default="", help="Address at which other hosts reach this host."),
    flag(
        "--node-id",
        default="",
        help="Name of this host in the run; default: host name, pid and a random part.",
    ),
    flag(
        "--topology",
        help="Location of this host, largest unit first, as in hall2/rack7; for --rdzv-conf rank_policy=topology.",
    ),
    flag(
        "--timer-endpoint",
        default="",
        metavar="HOST:PORT",
        help="Address of the timer service; default: one inside the agent.",
    ),
)
_WORKERS = flags(
    "Workers",
    _torchrun("-m", "--module", "module", is_flag=True, help="PROGRAM is a Python module."),
    _torchrun("--no-python", is_flag=True, help="PROGRAM is an executable, not a Python script."),
    flag(
        "--python",
        default="",
        metavar="PATH",
        help="Python interpreter of the workers, of any environment; default: PYTHON_EXEC, or the agent's own.",
    ),
    _torchrun("--run-path", is_flag=True, help="Run PROGRAM with Python's runpy.run_path."),
    flag(
        "--use-env",
        is_flag=True,
        expose_value=False,
        help="Accepted from torch.distributed.launch; ignored: LOCAL_RANK is always set.",
    ),
    _torchrun(
        "--start-method",
        metavar="spawn|fork|forkserver",
        help="Accepted for compatibility; ignored: every program gets a new process.",
    ),
    _torchrun(
        "--virtual-local-rank",
        is_flag=True,
        default=None,
        help="Give every worker LOCAL_RANK 0 and one visible GPU.",
    ),
    _torchrun(
        "--numa-binding",
        metavar="node|socket|exclusive|core-complex",
        help="Bind each worker to processors near its GPU.",
    ),
    flag(
        "--store",
        metavar="tcp|rallypoint",
        help="Place of torch's store: the worker of rank 0 (tcp, the default), or the rendezvous service.",
    ),
    flag(
        "--rlimit",
        type=_Part(),
        multiple=True,
        metavar="NAME=SOFT[:HARD]",
        help="Resource limit of the workers, as in nofile=65536 or core=unlimited; may be repeated.",
    ),
    _torchrun(
        "--signals-to-handle",
        type=SignalList(),
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAMES",
        help="Signals on which this host leaves the job.",
    ),
    flag("--stop-signal", metavar="SIGNAL", show_default="SIGTERM", help="Stop signal, sent before SIGKILL."),
    _torchrun(
        "--shutdown-timeout",
        metavar="SECONDS",
        envvar="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        show_default="30",
        help="Time for workers to stop before they are killed.",
    ),
)
_LOGS = flags(
    "Logs",
    _torchrun("--log-dir", metavar="FOLDER", help="Folder for worker logs; default: a new temporary one."),
    _torchrun(
        *("-r", "--redirects"),
        metavar="STREAMS",
        show_default="0",
        help="Streams not shown on the console: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, as in 0:1,1:2.",
    ),
    _torchrun(
        *("-t", "--tee"),
        metavar="STREAMS",
        show_default="0",
        help="Streams shown with a prefix of role and local rank; values as for --redirects.",
    ),
    _torchrun("--local-ranks-filter", metavar="RANKS", help="Local ranks shown on the console, as in 0,1."),
    _torchrun(
        "--duplicate-stdout-filters",
        metavar="TEXTS",
        help="Copy teed stdout lines that contain one of these texts to filtered_stdout.log.",
    ),
    _torchrun("--duplicate-stderr-filters", metavar="TEXTS", help="As the stdout filters, for stderr."),
    _torchrun(
        *("--log-line-prefix-template", "log_line_prefix"),
        metavar="TEMPLATE",
        envvar=("RALLYPOINT_LOG_LINE_PREFIX", "PET_LOG_LINE_PREFIX", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        help="Prefix of teed lines; may contain ${role_name}, ${local_rank}, ${rank} and ${hostname}.",
    ),
    flag(
        "--tty",
        type=click.IntRange(0),
        metavar="LOCAL_RANK",
        help="Worker that gets this terminal: standard input, output and errors; default: the only one of this host. "
        "With several workers, local rank 0 reads standard input.",
    ),
    flag("--log-max-size", metavar="SIZE", help="Rotate a log file when it exceeds this size, as in 100MB."),
    flag("--log-keep-files", metavar="N", show_default="5", help="Number of rotated files kept per stream."),
    flag("--keep-attempts", metavar="N", help="Keep the logs of the last N attempts; 0: of all attempts."),
    flag("--failure-file", metavar="FILE", help="Also write a failed job's report to this file, as JSON."),
    _torchrun("--logs-specs", metavar="NAME", help="Only torchrun's default is supported."),
    flag(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="Level of the agent's own log.",
    ),
    flag(
        "--log-format",
        type=click.Choice(["auto", "human", "json"]),
        default="human",
        help="Format of the log and of a failure's report; auto: human on a terminal, else a JSON object a line.",
    ),
)
_SUPERVISION = flags(
    "Supervision",
    _torchrun(
        "--event-log-handler",
        metavar="null|console|file:PATH",
        show_default="null",
        help="Destination of the events of the job and its workers.",
    ),
    _torchrun(
        "--monitor-interval",
        type=click.FloatRange(0),
        metavar="SECONDS",
        help="Accepted for compatibility; ignored.",
    ),
    flag(
        "--health-check",
        type=_Part(),
        multiple=True,
        metavar="CHECK",
        help="Check that must pass before this host joins a round, as in disk:2%, memory:1GiB, gpu or "
        "command:/opt/check; may be repeated.",
    ),
    flag("--health-timeout", metavar="SECONDS", show_default="10", help="Time limit of all checks together."),
    flag(
        "--maintenance-command",
        metavar="COMMAND",
        help="Command that exits with 0 when maintenance of this host is due; the host is then drained.",
    ),
    flag(
        "--drain-timeout",
        metavar="SECONDS",
        show_default="90",
        help="Time for workers to finish or save when this host is drained.",
    ),
    flag("--warn-signal", metavar="SIGNAL", help="Signal sent to workers when this host is drained."),
    flag(
        "--evidence-timeout",
        metavar="SECONDS",
        show_default="2",
        help="Time to collect diagnostics of a hung worker before it is killed; 0: none.",
    ),
    flag(
        "--stall-after",
        metavar="SECONDS",
        help="Report the run as stalled if no worker advances for this long; 0: never; default: the setting of the "
        "timer service.",
    ),
    flag(
        "--require-watchdog",
        is_flag=True,
        default=None,
        help="Start workers only while the timer service watches them; leave the run if it stops watching.",
    ),
    flag(
        "--watchdog-timeout",
        metavar="SECONDS",
        show_default="30",
        help="How long --require-watchdog tolerates a lost timer service after the loss is detected.",
    ),
    flag(
        "--supervisor-address",
        default="",
        metavar="HOST:PORT",
        help="Address of SupervisorService; port 0: any free port. Default: a Unix socket of this user, where "
        "`rallypoint agent` finds it by the run's name.",
    ),
    flag(
        "--metrics-address",
        default="",
        metavar="HOST:PORT",
        help="Address for Prometheus metrics; default: not served.",
    ),
)


def run_flags(command: _F) -> _F:
    """Add all flags to a command."""
    for section in reversed((_JOB, _RENDEZVOUS, _WORKERS, _LOGS, _SUPERVISION)):
        command = section(command)
    return command
