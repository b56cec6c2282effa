"""The flags of `rallypoint run`: torchrun's under their names, and ours, by section.

A flag without a type here belongs to `rallypoint.agent.job.options`, which reads its text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from rallypoint.agent.config.settings import MOST_RESTARTS
from rallypoint.agent.job.options import split_commas
from rallypoint.cli.run_command import flag, flags
from rallypoint.cli.values import NodeCount, Pairs, SignalList, Text, WorkerCount

_F = TypeVar("_F", bound=Callable[..., Any])


class _Part(Text):
    """One value of a flag that may be given several times; in the environment, commas separate them."""

    def split_envvar_value(self, rv: str) -> tuple[str, ...]:
        """The values of a variable."""
        return split_commas(rv)


def _torchrun(*declarations: str, **attributes: Any) -> Callable[[_F], _F]:
    return flag(*declarations, torchrun=True, **attributes)


_JOB = flags(
    "Job",
    _torchrun(
        "--nnodes", type=NodeCount(), default="1:1", help="Nodes of the job: N, or MIN:MAX if elastic."
    ),
    _torchrun(
        "--nproc-per-node",
        type=WorkerCount(),
        default="1",
        metavar="N|auto|cpu|gpu|xpu",
        help="Workers on this host; gpu, xpu, cpu: one for each; auto: per GPU, else per processor.",
    ),
    _torchrun("--standalone", is_flag=True, help="A job of this host alone, with its own rendezvous inside."),
    _torchrun(
        "--max-restarts",
        type=click.IntRange(0, MOST_RESTARTS),
        default=0,
        metavar="N",
        help="Restarts of failed workers, over the whole run.",
    ),
    _torchrun("--role", type=Text(), show_default="default", help="Role of the workers."),
)
_RENDEZVOUS = flags(
    "Rendezvous",
    _torchrun(
        "--rdzv-backend",
        type=Text(),
        metavar="NAME",
        show_default="rallypoint",
        help="rallypoint: a service that stands by itself; static, c10d: one of the job's agents serves it; etcd, "
        "etcd-v2: some of them do, over an etcd.",
    ),
    _torchrun(
        "--rdzv-endpoint",
        type=Text(),
        default="",
        metavar="HOST:PORT[,...]",
        help="Address of the rendezvous service, of all its replicas, or of an etcd; or torch's "
        "etcd://HOST:PORT/RUN_ID?min_workers=N&...",
    ),
    _torchrun(
        "--rdzv-id",
        type=Text(),
        default="",
        metavar="RUN_ID",
        help="Name of the run; the same on all its hosts.",
    ),
    _torchrun(
        "--rdzv-conf",
        type=Pairs(),
        default="",
        help="Settings of the rendezvous, as in last_call_timeout=1,join_timeout=60; times in seconds.",
    ),
    _torchrun(
        "--node-rank",
        type=click.IntRange(0),
        metavar="N",
        show_default="0",
        help="Place of this host, for static.",
    ),
    _torchrun(
        "--master-addr",
        type=Text(),
        metavar="HOST",
        show_default="127.0.0.1",
        help="Host of node rank 0, for static.",
    ),
    _torchrun(
        "--master-port",
        type=click.IntRange(1, 65535),
        metavar="PORT",
        show_default="29500",
        help="Port for the workers of all hosts to meet at, for static.",
    ),
    _torchrun("--local-addr", type=Text(), default="", help="Address at which other hosts reach this one."),
    flag(
        "--node-id",
        type=Text(),
        default="",
        help="Name of this host in the run; without it, host, pid and a random part.",
    ),
    flag(
        "--topology",
        type=Text(),
        help="Where this host is, outermost place first, as in hall2/rack7; for --rdzv-conf rank_policy=topology.",
    ),
    flag(
        "--timer-endpoint",
        type=Text(),
        default="",
        metavar="HOST:PORT",
        help="Timer service; without it, one inside the agent.",
    ),
)
_WORKERS = flags(
    "Workers",
    _torchrun("-m", "--module", "module", is_flag=True, help="PROGRAM is a Python module."),
    _torchrun("--no-python", is_flag=True, help="PROGRAM is an executable, not a Python script."),
    _torchrun("--run-path", is_flag=True, help="Run PROGRAM with Python's runpy.run_path."),
    _torchrun(
        "--start-method",
        type=Text(),
        metavar="spawn|fork|forkserver",
        help="For Python functions only: every program gets a new process.",
    ),
    _torchrun(
        "--virtual-local-rank",
        is_flag=True,
        default=None,
        help="Every worker has LOCAL_RANK 0 and sees one GPU, its own.",
    ),
    _torchrun(
        "--numa-binding",
        metavar="node|socket|exclusive|core-complex",
        help="Keep each worker on processors near its GPU.",
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
    flag("--stop-signal", metavar="SIGNAL", show_default="SIGTERM", help="What stops workers, at first."),
    _torchrun(
        "--shutdown-timeout",
        metavar="SECONDS",
        envvar="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        show_default="30",
        help="How long workers may take to stop before they are killed.",
    ),
)
_LOGS = flags(
    "Logs",
    _torchrun("--log-dir", metavar="FOLDER", help="Folder for logs; without it, a new temporary one."),
    _torchrun(
        *("-r", "--redirects"),
        metavar="STREAMS",
        show_default="0",
        help="Keep off the console: 0 nothing, 1 stdout, 2 stderr, 3 both; or by local rank, as in 0:1,1:2.",
    ),
    _torchrun(
        *("-t", "--tee"),
        metavar="STREAMS",
        show_default="0",
        help="Prefix each line on the console with role and local rank: the same.",
    ),
    _torchrun("--local-ranks-filter", metavar="RANKS", help="Only these workers on the console, as in 0,1."),
    _torchrun(
        "--duplicate-stdout-filters",
        metavar="TEXTS",
        help="Copy teed lines of stdout with one of these texts to filtered_stdout.log.",
    ),
    _torchrun("--duplicate-stderr-filters", metavar="TEXTS", help="The same of stderr."),
    flag(
        "--log-line-prefix",
        metavar="TEMPLATE",
        envvar="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        help="Prefix of teed lines, of ${role_name}, ${local_rank} and ${rank}.",
    ),
    flag("--log-max-size", metavar="SIZE", help="Rotate a log file that is larger, as in 100MB."),
    flag("--log-keep-files", metavar="N", show_default="5", help="Rotated files to keep of each stream."),
    flag("--keep-attempts", metavar="N", help="Keep the logs of the last N attempts only; 0: of all."),
    flag("--failure-file", metavar="FILE", help="Write the report of a failed job there too, as JSON."),
    _torchrun("--logs-specs", type=Text(), metavar="NAME", help="Refused: logs can't be replaced."),
    flag(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="Level of the agent's own log.",
    ),
    flag(
        "--log-format",
        type=click.Choice(["auto", "human", "json"]),
        default="auto",
        help="Format of the agent's own log.",
    ),
)
_SUPERVISION = flags(
    "Supervision",
    _torchrun(
        "--event-log-handler",
        metavar="null|console|file:PATH",
        show_default="null",
        help="Where events of the job and its workers go.",
    ),
    _torchrun(
        "--monitor-interval",
        type=click.FloatRange(0),
        metavar="SECONDS",
        help="Taken, and of no use: nothing is polled.",
    ),
    flag(
        "--health-check",
        type=_Part(),
        multiple=True,
        metavar="CHECK",
        help="What must hold of this host before it takes its place in a round, as in disk:2%, "
        "memory:1GiB, gpu or command:/opt/check; may be repeated.",
    ),
    flag("--health-timeout", metavar="SECONDS", show_default="10", help="For all of them together."),
    flag(
        "--maintenance-command",
        metavar="COMMAND",
        help="Ends with exit code 0 when this host is about to go down; then it is drained.",
    ),
    flag(
        "--drain-timeout",
        metavar="SECONDS",
        show_default="90",
        help="How long workers get to finish or to save when this host is drained.",
    ),
    flag("--warn-signal", metavar="SIGNAL", help="What workers get when this host is drained."),
    flag(
        "--evidence-timeout",
        metavar="SECONDS",
        show_default="2",
        help="How long to look into a worker that hangs before it is killed; 0: not at all.",
    ),
    flag(
        "--stall-after",
        metavar="SECONDS",
        help="Report a run in which no worker advances for so long; 0: never; without it, as the timer service "
        "is set.",
    ),
    flag(
        "--require-watchdog",
        is_flag=True,
        default=None,
        help="Start workers only while the timer service guards them, and leave the run when it does so no more.",
    ),
    flag(
        "--watchdog-timeout",
        metavar="SECONDS",
        show_default="30",
        help="How long --require-watchdog does without, once that is noted.",
    ),
    flag(
        "--supervisor-address",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="Where SupervisorService listens; port 0 for any free one.",
    ),
    flag(
        "--metrics-address",
        default="",
        metavar="HOST:PORT",
        help="Where figures for Prometheus are served; without it, nowhere.",
    ),
)


def run_flags(command: _F) -> _F:
    """Gives a command all of them."""
    for section in reversed((_JOB, _RENDEZVOUS, _WORKERS, _LOGS, _SUPERVISION)):
        command = section(command)
    return command
