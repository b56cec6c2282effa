"""What the commands for people who look at one agent share: its address, the job, and states in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rallypoint.cli.nodes import Text
from rallypoint.cli.service_options import timeout_option
from rallypoint.serving.options import Setting, client_options

if TYPE_CHECKING:
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb

_Command = TypeVar("_Command", bound=Callable[..., Any])


def agent_options(command: _Command) -> _Command:
    """Gives a command `agent`, `timeout` in seconds, and `tls`, a ClientTLS or None."""
    return click.option(
        "--agent",
        cls=Setting,
        type=Text(),
        default="127.0.0.1:29420",
        metavar="HOST:PORT",
        help="Address of the agent; that of one that `rallypoint run` started is in its log, as `supervisor`.",
    )(timeout_option(client_options(command)))


def run_argument(command: _Command) -> _Command:
    """Gives a command `run_id`; empty: the one job that runs, or the last."""
    return click.argument("run_id", type=Text(), default="", metavar="[RUN_ID]")(command)


def ranks_option(command: _Command) -> _Command:
    """Gives a command `ranks`, global ones; none: all of the host."""
    return click.option(
        "--rank",
        "ranks",
        type=click.IntRange(0, 2**31 - 1),
        multiple=True,
        metavar="RANK",
        help="Only this worker, by its global rank; may be repeated.",
    )(command)


def reason_option(command: _Command) -> _Command:
    """Gives a command `reason`."""
    return click.option(
        "--reason", type=Text(), default="", help="Why; the job's report and its log show it."
    )(command)


def state_in_words(job: pb.Job) -> str:
    """What a job does, in one word."""
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415 (gRPC is not for --help)

    return pb.JobState.Name(job.state).removeprefix("JOB_STATE_")
