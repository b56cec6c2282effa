"""`rallypoint agent …`: the commands that look at, and steer, the jobs of one agent."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rallypoint.agent.config.settings import MOST_SECONDS
from rallypoint.cli.main import LazyGroup
from rallypoint.cli.output import plain_console, printable, show_moment, show_span
from rallypoint.cli.service_options import timeout_option
from rallypoint.cli.values import Text
from rallypoint.rpc.endpoint import ClientTLS, SettingError
from rallypoint.serving.options import Seconds, Setting, client_options

if TYPE_CHECKING:
    from rich.table import Table

    from rallypoint.agent.v1 import supervisor_service_pb2 as pb


@click.command(
    cls=LazyGroup,
    lazy={
        "jobs": ("rallypoint.cli.agent:jobs", "Show what runs on the host, and what ended."),
        "workers": ("rallypoint.cli.agent:workers", "Show a job's workers, and what they use."),
        "logs": ("rallypoint.cli.agent:logs", "Print what workers wrote, and write."),
        "stacks": ("rallypoint.cli.agent:stacks", "Show what workers are doing right now."),
        "restart": ("rallypoint.cli.agent:restart", "Start a job's workers anew, on all hosts."),
        "reap": ("rallypoint.cli.agent:reap", "Kill a worker, with evidence of what it did."),
        "drain": ("rallypoint.cli.agent:drain", "Warn workers, give them time, then leave."),
        "stop": ("rallypoint.cli.agent:stop", "Have the host leave a job."),
    },
)
def agent() -> None:
    """Show and steer the jobs of the agent at --agent (RALLYPOINT_AGENT), by default the one of this host.

    RUN_ID may be left out where the agent runs one job. What concerns a run on all its hosts is done at the
    rendezvous service: `rallypoint status`, `restart`, `evict`, `close`.
    """


# ---- What the commands for people who look at one agent share: its address, the job, and states in words.


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


# ---- `rallypoint agent jobs` and `workers`: what runs on a host.


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@agent_options
def jobs(*, agent: str, as_json: bool, timeout: float, tls: ClientTLS | None) -> None:
    """Show the jobs that run on the agent's host, and the last that ended, the latest first."""
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415 (slow, and not for --help)

    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415
    from rallypoint.cli.operator import call_agent  # noqa: PLC0415

    response = call_agent(agent, tls, timeout, lambda stub: stub.ListJobs(pb.ListJobsRequest()))
    if as_json:
        click.echo(json.dumps(MessageToDict(response, always_print_fields_with_no_presence=True), indent=2))
    elif response.jobs:
        plain_console().print(_job_table(response))
    else:
        click.echo("no jobs")


def _job_table(response: pb.ListJobsResponse) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table("run", "state", "round", "restarts", "world", "since", "for", "detail", box=None)
    for job in response.jobs:
        begun = job.start_time.ToNanoseconds() / 1e9
        ended = job.end_time.ToNanoseconds() / 1e9 if job.HasField("end_time") else time.time()
        state = state_in_words(job)
        table.add_row(
            printable(job.run_id),
            f"{state} ({job.exit_code})" if state == "ENDED" else state,
            str(job.round or "-"),
            str(job.restart_count),
            str(job.world_size or "-"),
            show_moment(begun)[:19],
            show_span(round(ended - begun)).replace(".000s", "s"),
            printable(job.detail),
        )
    return table


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@agent_options
def workers(*, run_id: str, agent: str, as_json: bool, timeout: float, tls: ClientTLS | None) -> None:
    """Show the workers of RUN_ID on the agent's host: what they use with all that they have started, how far they are.

    `cpu` is processors kept busy since somebody last asked, 1.0 for one; `memory` is their own, with their share of
    what they share with others.
    """
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415 (slow, and not for --help)

    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415
    from rallypoint.cli.operator import call_agent  # noqa: PLC0415

    request = pb.ListWorkersRequest(run_id=run_id)
    response = call_agent(agent, tls, timeout, lambda stub: stub.ListWorkers(request))
    if as_json:
        click.echo(json.dumps(MessageToDict(response, always_print_fields_with_no_presence=True), indent=2))
    elif response.workers:
        plain_console().print(_worker_table(response))
    else:
        click.echo("no workers")


def _worker_table(response: pb.ListWorkersResponse) -> Table:
    from rich.table import Table  # noqa: PLC0415

    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415

    columns = ("local", "pid", "state", "cpu", "cpu time", "memory", "processes", "threads", "step", "ago")
    table = Table("rank", *columns, box=None)
    for worker in response.workers:
        state = pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_")
        used = ("-",) * 5
        if worker.HasField("usage"):
            usage = worker.usage
            used = (
                f"{usage.processors:.2f}",
                show_span(usage.processor_time.ToNanoseconds() / 1e9),
                show_bytes(usage.memory_bytes),
                str(usage.process_count),
                str(usage.thread_count),
            )
        progress = ("-", "-")
        if worker.HasField("progress"):
            told = worker.progress
            progress = (str(told.step), show_span(told.age.ToNanoseconds() / 1e9))
        table.add_row(
            str(worker.rank),
            str(worker.local_rank),
            str(worker.pid),
            f"{state} ({worker.exit_code})" if worker.state == pb.WORKER_STATE_FAILED else state,
            *used,
            *progress,
        )
    return table


def show_bytes(size: int) -> str:
    """A size in its largest unit."""
    number, unit = float(size), 0
    while number >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.1f} {_UNITS[unit]}" if unit else f"{size} B"


# ---- `rallypoint agent stacks`: what workers are doing.


@click.command()
@run_argument
@ranks_option
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@agent_options
def stacks(
    *,
    run_id: str,
    ranks: tuple[int, ...],
    agent: str,
    as_json: bool,
    timeout: float,
    tls: ClientTLS | None,
) -> None:
    """Show what the workers of RUN_ID on the agent's host are doing: Python stacks, and what the kernel says.

    Nothing is killed. Workers that use rallypoint.timer write their stacks themselves; of others py-spy reads them,
    if it is installed on the host.
    """
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415 (slow, and not for --help)

    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415
    from rallypoint.cli.operator import call_agent  # noqa: PLC0415

    request = pb.DumpStacksRequest(run_id=run_id, ranks=ranks)
    response = call_agent(agent, tls, timeout, lambda stub: stub.DumpStacks(request))
    if as_json:
        click.echo(json.dumps(MessageToDict(response, always_print_fields_with_no_presence=True), indent=2))
        return
    for number, worker in enumerate(response.stacks):
        # Names of threads and functions are users' own: nothing in them may move the terminal's cursor.
        text = "\n".join(
            "".join(c if c.isprintable() else " " for c in line) for line in worker.text.split("\n")
        )
        click.echo(("\n" if number else "") + f"=== {text}")
    if not response.stacks:
        click.echo("no workers run")


# ---- `rallypoint agent restart`, `reap`, `drain` and `stop`: what is done to a job of one host.


@click.command()
@run_argument
@reason_option
@agent_options
def restart(run_id: str, agent: str, reason: str, timeout: float, tls: ClientTLS | None) -> None:
    """Start all workers of RUN_ID anew, on all its hosts. It uses up none of the run's restarts."""
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.cli.operator import call_agent  # noqa: PLC0415

    request = pb.RestartWorkersRequest(run_id=run_id, reason=reason)
    response = call_agent(agent, tls, timeout, lambda stub: stub.RestartWorkers(request))
    click.echo(f"round {response.ended_round} ended, all workers are started anew")


@click.command()
@run_argument
@click.option("--rank", type=click.IntRange(0, 2**31 - 1), required=True, help="Which, by its global rank.")
@reason_option
@agent_options
def reap(*, run_id: str, rank: int, agent: str, reason: str, timeout: float, tls: ClientTLS | None) -> None:
    """Kill a worker of RUN_ID with all it has started; it counts as failed. What it was doing is written down first."""
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.cli.operator import call_agent  # noqa: PLC0415

    request = pb.ReapWorkerRequest(run_id=run_id, rank=rank, reason=reason)
    response = call_agent(agent, tls, timeout, lambda stub: stub.ReapWorker(request))
    where = f"; what it was doing is in {response.evidence_file}" if response.evidence_file else ""
    click.echo(f"rank {rank}, process {response.pid}, is killed{where}")


@click.command()
@run_argument
@click.option(
    "--grace",
    type=Seconds(0, MOST_SECONDS),
    metavar="SECONDS",
    help="How long workers may take; without it, as the job was told (--drain-timeout).",
)
@reason_option
@agent_options
def drain(
    *, run_id: str, grace: float | None, agent: str, reason: str, timeout: float, tls: ClientTLS | None
) -> None:
    """Have the agent's host leave RUN_ID, or all its jobs, gently: workers are warned, get their time, then go."""
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.cli.operator import call_agent  # noqa: PLC0415

    request = pb.DrainRequest(run_id=run_id, reason=reason)
    if grace is not None:
        request.grace.FromNanoseconds(round(grace * 1e9))
    response = call_agent(agent, tls, timeout, lambda stub: stub.Drain(request))
    if response.run_ids:
        click.echo(f"the host is going to leave {', '.join(response.run_ids)}; its workers are warned")
    else:
        click.echo("the host has no job that it could leave")


@click.command()
@run_argument
@click.option("--now", is_flag=True, help="Kill the workers, without asking them first.")
@reason_option
@agent_options
def stop(*, run_id: str, now: bool, agent: str, reason: str, timeout: float, tls: ClientTLS | None) -> None:
    """Have the agent's host leave RUN_ID; the other hosts go on. (`rallypoint close` ends a run on all hosts.)"""
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.cli.operator import call_agent  # noqa: PLC0415

    which = pb.GetJobRequest(run_id=run_id)
    job = call_agent(agent, tls, timeout, lambda stub: stub.GetJob(which)).job
    if job.state == pb.JOB_STATE_ENDED:
        click.echo(f"the job of run {job.run_id} has ended here already, with exit code {job.exit_code}")
        return
    request = pb.StopJobRequest(run_id=job.run_id, reason=reason, now=now)
    call_agent(agent, tls, timeout, lambda stub: stub.StopJob(request))
    click.echo("the host is leaving the run" + (", and its workers are killed" if now else ""))


# ---- `rallypoint agent logs`: what workers wrote, and write.


_SIZE_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("KMG", start=1)
    for end, base in (("", 1000), ("B", 1000), ("iB", 1024))
}


class ByteCount(click.ParamType[int]):
    """A size: a number of bytes, or as in 64KiB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse and check."""
        text = str(value).strip()
        number = text.rstrip("KMGiB")
        factor = _SIZE_UNITS.get(text[len(number) :].strip())
        if not (number.strip().isascii() and number.strip().isdigit()) or factor is None or len(number) > 15:
            self.fail(f"{text!r} is no size; expected bytes, or as in 64KiB or 1MB", param, ctx)
        return int(number) * factor


@click.command()
@run_argument
@ranks_option
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, over restarts, to the job's end.")
@click.option(
    "--tail",
    type=ByteCount(),
    default="0",
    metavar="SIZE",
    help="Only so much of the end of each stream of the latest attempt, as in 64KiB; without it, all attempts.",
)
@click.option(
    "--stream", type=click.Choice(["stdout", "stderr", "both"]), default="both", help="Which output."
)
@click.option(
    "--no-prefix", is_flag=True, help="Print the bytes as they are, without ranks before the lines."
)
@agent_options
def logs(
    *,
    run_id: str,
    ranks: tuple[int, ...],
    follow: bool,
    tail: int,
    stream: str,
    no_prefix: bool,
    agent: str,
    timeout: float,
    tls: ClientTLS | None,
) -> None:
    """Print what the workers of RUN_ID on the agent's host wrote, stdout to stdout and stderr to stderr.

    Following, it goes on where it was when the connection breaks.
    """
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.rpc.loop import run  # noqa: PLC0415

    request = pb.StreamLogsRequest(run_id=run_id, ranks=ranks, follow=follow, tail_bytes=tail)
    request.stream = {"stdout": pb.LOG_STREAM_STDOUT, "stderr": pb.LOG_STREAM_STDERR}.get(
        stream, pb.LOG_STREAM_UNSPECIFIED
    )
    run(_print_logs(request, agent, tls, timeout, prefixed=not no_prefix))


async def _print_logs(
    request: pb.StreamLogsRequest, endpoint: str, tls: ClientTLS | None, timeout: float, *, prefixed: bool
) -> None:
    from rallypoint.agent.logs.follower import OutputThread  # noqa: PLC0415
    from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc  # noqa: PLC0415
    from rallypoint.rpc.channel import open_channel  # noqa: PLC0415
    from rallypoint.submission.following import LogPieces, Lost  # noqa: PLC0415
    from rallypoint.submission.output import (  # noqa: PLC0415
        Lines,
        lost_in_words,
    )

    outputs = {1: OutputThread(1), 2: OutputThread(2)}
    lines: Lines[int] = Lines(outputs)
    async with open_channel(endpoint, tls) as channel:
        stub = pb_grpc.SupervisorServiceStub(channel)
        # Who follows waits for an agent that was there; one that never was is told at once.
        pieces = LogPieces(stub, request, tls, lambda: timeout if pieces.begun else 0.0)
        try:
            async for piece in pieces.read():
                if piece.lost_bytes:
                    click.echo(lost_in_words(piece), err=True)
                if prefixed:
                    await lines.add(piece.rank, piece.cursor.stream, f"[{piece.rank}]: ".encode(), piece.data)
                else:
                    await outputs[piece.cursor.stream].write(piece.data)
        except Lost as loss:
            raise SettingError(f"{endpoint}: {loss}") from None
        finally:
            for rank in sorted(lines.sources):
                await lines.finish(rank)
            for output in outputs.values():
                await output.close(5.0)
