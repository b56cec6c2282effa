"""`rallypoint agent …`: commands that show and control the jobs of one agent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar

import click

from rallypoint.agent.config.rlimits import parse_size
from rallypoint.agent.config.settings import MOST_SECONDS
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.cli.main import LazyGroup
from rallypoint.cli.output import json_fields, print_table, show_moment, show_span
from rallypoint.cli.values import RunId, Text, agent_options, service_options
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as rendezvous_pb
from rallypoint.rpc.durations import set_seconds, to_seconds
from rallypoint.rpc.endpoint import CallTarget, SettingError
from rallypoint.rpc.text import printable, size_in_words
from rallypoint.serving.options import Seconds


@click.command(
    cls=LazyGroup,
    lazy={
        "jobs": ("rallypoint.cli.agent:jobs", "Show the running and the last ended jobs of the host."),
        "workers": ("rallypoint.cli.agent:workers", "Show the workers of a job and their resource usage."),
        "logs": ("rallypoint.cli.agent:logs", "Print the output of workers."),
        "stacks": ("rallypoint.cli.agent:stacks", "Show the stacks of running workers."),
        "restart": ("rallypoint.cli.agent:restart", "Restart the workers of a job on all hosts."),
        "reap": ("rallypoint.cli.agent:reap", "Collect diagnostics of a worker, then kill it."),
        "drain": ("rallypoint.cli.agent:drain", "Warn workers, give them time, then leave."),
        "stop": ("rallypoint.cli.agent:stop", "Make the host leave a job."),
    },
)
def agent() -> None:
    """Show and control the jobs of the agent at --agent (RALLYPOINT_AGENT); default: the agent of this host.

    RUN_ID may be omitted if the agent runs one job. To act on a run on all its hosts, use the commands of the
    rendezvous service: `rallypoint status`, `restart`, `evict`, `close`.
    """


# ---- Shared by the commands: the agent's address, the job, and states in words.


_Command = TypeVar("_Command", bound=Callable[..., Any])


def run_argument(command: _Command) -> _Command:
    """Add the argument `run_id`; empty: the one running job, or the last one."""
    return click.argument("run_id", type=RunId(), default="", metavar="[RUN_ID]")(command)


def ranks_option(command: _Command) -> _Command:
    """Add the option `ranks`: global ranks; empty: all of the host."""
    return click.option(
        "--rank",
        "ranks",
        type=click.IntRange(0, 2**31 - 1),
        multiple=True,
        metavar="RANK",
        help="Only the worker with this global rank; may be repeated.",
    )(command)


def reason_option(command: _Command) -> _Command:
    """Add the option `reason`."""
    return click.option(
        "--reason", type=Text(), default="", help="Reason, shown in the job's report and log."
    )(command)


def state_in_words(job: pb.Job) -> str:
    """Return the job's state without the enum's prefix."""
    return pb.JobState.Name(job.state).removeprefix("JOB_STATE_")


# ---- `rallypoint agent jobs` and `workers`: the jobs and workers of a host.


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@partial(agent_options, each=True)
def jobs(*, service: CallTarget, as_json: bool) -> None:
    """Show the running jobs of the agent's host and those that ended last, newest first."""
    from rallypoint.cli.operator import SUPERVISOR, call  # noqa: PLC0415

    response = call(SUPERVISOR, service, lambda stub: stub.ListJobs(pb.ListJobsRequest()))
    if as_json:
        click.echo(json.dumps(json_fields(response), indent=2))
    elif response.jobs:
        _print_jobs(response)
    else:
        click.echo("no jobs")


def _print_jobs(response: pb.ListJobsResponse) -> None:
    columns = ("run", "state", "round", "restarts", "world", "since", "for", "detail")
    rows = []
    for job in response.jobs:
        begun = to_seconds(job.start_time)
        ended = to_seconds(job.end_time) if job.HasField("end_time") else time.time()
        state = state_in_words(job)
        rows.append(
            (
                job.run_id,
                f"{state} ({job.exit_code})" if state == "ENDED" else state,
                str(job.round or "-"),
                str(job.restart_count),
                str(job.world_size or "-"),
                show_moment(begun)[:19],
                show_span(round(ended - begun)).replace(".000s", "s"),
                job.detail,
            )
        )
    print_table(columns, rows, own_line=("detail",))


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@agent_options
def workers(*, run_id: str, service: CallTarget, as_json: bool) -> None:
    """Show the workers of RUN_ID on the agent's host: resource usage, child processes included, and progress.

    `cpu` is the average number of busy processors since the previous request; `memory` is their own memory plus their
    share of memory that they share with others.
    """
    from rallypoint.cli.operator import SUPERVISOR, call  # noqa: PLC0415

    request = pb.ListWorkersRequest(run_id=run_id)
    response = call(SUPERVISOR, service, lambda stub: stub.ListWorkers(request))
    if as_json:
        click.echo(json.dumps(json_fields(response), indent=2))
    elif response.workers:
        _print_workers(response)
    else:
        click.echo("no workers")


def _print_workers(response: pb.ListWorkersResponse) -> None:
    rows = []
    for worker in response.workers:
        state = pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_")
        used = ("-",) * 5
        if worker.HasField("usage"):
            usage = worker.usage
            used = (
                f"{usage.processors:.2f}",
                show_span(to_seconds(usage.processor_time)),
                size_in_words(usage.memory_bytes),
                str(usage.process_count),
                str(usage.thread_count),
            )
        progress = ("-", "-")
        if worker.HasField("progress"):
            latest = worker.progress
            progress = (str(latest.step), show_span(to_seconds(latest.idle)))
        state = f"{state} ({worker.exit_code})" if worker.state == pb.WORKER_STATE_FAILED else state
        rows.append((str(worker.rank), str(worker.local_rank), str(worker.pid), state, *used, *progress))
    columns = (
        "rank",
        "local",
        "pid",
        "state",
        "cpu",
        "cpu time",
        "memory",
        "processes",
        "threads",
        "step",
        "ago",
    )
    print_table(columns, rows, own_line=("processes", "threads", "cpu time", "step", "ago"))


# ---- `rallypoint agent stacks`: current stacks of workers.


@click.command()
@run_argument
@ranks_option
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@agent_options
def stacks(*, run_id: str, ranks: tuple[int, ...], service: CallTarget, as_json: bool) -> None:
    """Show the Python stacks and kernel state of the workers of RUN_ID on the agent's host.

    Nothing is killed. Workers that use rallypoint.timer write their stacks themselves; the stacks of others are read by
    py-spy, if it is installed on the host.
    """
    from rallypoint.cli.operator import SUPERVISOR, call  # noqa: PLC0415

    request = pb.DumpStacksRequest(run_id=run_id, ranks=ranks)
    response = call(SUPERVISOR, service, lambda stub: stub.DumpStacks(request))
    if as_json:
        click.echo(json.dumps(json_fields(response), indent=2))
        return
    for number, worker in enumerate(response.stacks):
        # Users choose the names of threads and functions: nothing in them may move the terminal's cursor.
        text = "\n".join(map(printable, worker.text.split("\n")))
        click.echo(("\n" if number else "") + f"=== {text}")
    if not response.stacks:
        click.echo("no workers run")


# ---- `rallypoint agent restart`, `reap`, `drain` and `stop`: actions on a job of one host.


@click.command()
@run_argument
@reason_option
@agent_options
def restart(run_id: str, service: CallTarget, reason: str) -> None:
    """Restart all workers of RUN_ID, on all its hosts. This does not count against --max-restarts."""
    from rallypoint.cli.operator import SUPERVISOR, call  # noqa: PLC0415

    request = pb.RestartWorkersRequest(run_id=run_id, reason=reason)
    response = call(SUPERVISOR, service, lambda stub: stub.RestartWorkers(request))
    click.echo(f"round {response.ended_round} ended, all workers restart")


@click.command()
@run_argument
@click.option("--rank", type=click.IntRange(0, 2**31 - 1), required=True, help="Global rank of the worker.")
@reason_option
@agent_options
def reap(*, run_id: str, rank: int, service: CallTarget, reason: str) -> None:
    """Collect diagnostics of a worker of RUN_ID, then kill it with its child processes; it counts as failed."""
    from rallypoint.cli.operator import SUPERVISOR, call  # noqa: PLC0415

    request = pb.ReapWorkerRequest(run_id=run_id, rank=rank, reason=reason)
    response = call(SUPERVISOR, service, lambda stub: stub.ReapWorker(request))
    where = f"; diagnostics are in {response.evidence_file}" if response.evidence_file else ""
    click.echo(f"rank {rank}, process {response.pid}, is killed{where}")


@click.command()
@run_argument
@click.option(
    "--grace",
    type=Seconds(0, MOST_SECONDS),
    metavar="SECONDS",
    help="Time for the workers to finish or save; default: --drain-timeout of the job.",
)
@reason_option
@agent_options
def drain(*, run_id: str, grace: float | None, service: CallTarget, reason: str) -> None:
    """Drain the agent's host: workers of RUN_ID, or of all jobs, are warned and get time, then the host leaves."""
    from rallypoint.cli.operator import SUPERVISOR, call  # noqa: PLC0415

    request = pb.DrainRequest(run_id=run_id, reason=reason, all_jobs=not run_id)
    if grace is not None:
        set_seconds(request.grace, grace)
    response = call(SUPERVISOR, service, lambda stub: stub.Drain(request))
    if response.run_ids:
        click.echo(f"the host will leave {', '.join(response.run_ids)}; its workers are warned")
    else:
        click.echo("the host has no job to leave")


@click.command()
@run_argument
@click.option("--now", is_flag=True, help="Kill the workers at once, without the stop signal.")
@reason_option
@agent_options
def stop(*, run_id: str, now: bool, service: CallTarget, reason: str) -> None:
    """Make the agent's host leave RUN_ID; the other hosts continue. (`rallypoint close` ends a run on all hosts.)"""
    from rallypoint.cli.operator import SUPERVISOR, call  # noqa: PLC0415

    which = pb.GetJobRequest(run_id=run_id)
    job = call(SUPERVISOR, service, lambda stub: stub.GetJob(which)).job
    if job.state == pb.JOB_STATE_ENDED:
        click.echo(f"the job of run {job.run_id} has ended here already, with exit code {job.exit_code}")
        return
    request = pb.StopJobRequest(run_id=job.run_id, reason=reason, now=now)
    call(SUPERVISOR, service, lambda stub: stub.StopJob(request))
    click.echo("the host is leaving the run" + (", and its workers are killed" if now else ""))


# ---- `rallypoint agent logs`: past and present output of workers.


class ByteCount(click.ParamType[int]):
    """A size in bytes, with or without a unit, as in 64KiB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse and check."""
        text = str(value).strip()
        if (size := parse_size(text)) is None:
            self.fail(f"{text!r} is not a size; expected bytes, or as in 64KiB or 1MB", param, ctx)
        return size


def _log_options(command: _Command) -> _Command:
    """Add the options of commands that print logs: `ranks`, `follow`, `tail`, `stream` and `no_prefix`."""
    for option in (
        click.option(
            "--no-prefix", is_flag=True, help="Print the bytes unchanged, without the rank before each line."
        ),
        click.option(
            "--stream",
            type=click.Choice(["stdout", "stderr", "both"]),
            default="both",
            help="Which stream to print.",
        ),
        click.option(
            "--tail",
            type=ByteCount(),
            default="0",
            metavar="SIZE",
            help="Only the last SIZE of each stream of the latest attempt, as in 64KiB; default: all of every attempt.",
        ),
        click.option(
            "-f", "--follow", is_flag=True, help="Continue with new output, over restarts, to the end."
        ),
        ranks_option,
    ):
        command = option(command)
    return command


def _log_request(
    run_id: str, ranks: Sequence[int], follow: bool, tail: int, stream: str
) -> pb.StreamLogsRequest:
    request = pb.StreamLogsRequest(run_id=run_id, ranks=ranks, follow=follow, tail_bytes=tail)
    request.stream = {"stdout": pb.LOG_STREAM_STDOUT, "stderr": pb.LOG_STREAM_STDERR}.get(
        stream, pb.LOG_STREAM_UNSPECIFIED
    )
    return request


@click.command()
@run_argument
@_log_options
@agent_options
def logs(
    *,
    run_id: str,
    ranks: tuple[int, ...],
    follow: bool,
    tail: int,
    stream: str,
    no_prefix: bool,
    service: CallTarget,
) -> None:
    """Print the output of the workers of RUN_ID on the agent's host: stdout to stdout, stderr to stderr.

    With --follow, output continues at the same position after a broken connection.
    """
    from rallypoint.cli.operator import SUPERVISOR, call  # noqa: PLC0415
    from rallypoint.rpc.loop import run  # noqa: PLC0415

    call(SUPERVISOR, service, lambda stub: stub.GetJob(pb.GetJobRequest(run_id=run_id)))
    request = _log_request(run_id, ranks, follow, tail, stream)
    run(_print_logs(request, service, prefixed=not no_prefix))


async def _print_logs(request: pb.StreamLogsRequest, service: CallTarget, *, prefixed: bool) -> None:
    from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc  # noqa: PLC0415
    from rallypoint.rpc.channel import open_channel  # noqa: PLC0415
    from rallypoint.submission.following import LogPieces, Lost  # noqa: PLC0415

    endpoint, security = service.endpoint, service.security
    async with _LogPrinter(prefixed) as printer, open_channel(endpoint, security) as channel:
        stub = pb_grpc.SupervisorServiceStub(channel)
        # --follow retries an agent that has answered before; a first connection that fails is reported at once.
        pieces = LogPieces(stub, request, security, lambda: service.timeout if pieces.begun else 0.0)
        try:
            async for piece in pieces.read():
                await printer.take("", piece)
        except Lost as loss:
            raise SettingError(f"{endpoint}: {loss}") from None


class _LogPrinter:
    """Prints pieces of workers' output, lines that are not complete at the end."""

    def __init__(self, prefixed: bool) -> None:
        from rallypoint.agent.logs.follower import OutputThread  # noqa: PLC0415
        from rallypoint.submission.output import Lines  # noqa: PLC0415

        self._prefixed = prefixed
        self._outputs = {1: OutputThread(1), 2: OutputThread(2)}
        self._lines: Lines[tuple[str, int]] = Lines(self._outputs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for source in sorted(self._lines.sources):
            await self._lines.finish(source)
        for output in self._outputs.values():
            await output.close(5.0)

    async def take(self, node: str, piece: pb.StreamLogsResponse) -> None:
        """Print a piece of the output of a worker of a node."""
        from rallypoint.submission.output import lost_in_words  # noqa: PLC0415

        stream, rank = piece.cursor.stream, piece.rank
        if piece.lost_bytes:
            click.echo(lost_in_words(piece), err=True)
        if self._prefixed:
            await self._lines.add((node, rank), stream, f"[{rank}]: ".encode(), piece.data)
        else:
            await self._outputs[stream].write(piece.data)


# ---- `rallypoint logs`: the same of a run, from the agents of all its hosts.


@click.command(name="logs")
@run_argument
@_log_options
@service_options
def run_logs(
    *,
    run_id: str,
    ranks: tuple[int, ...],
    follow: bool,
    tail: int,
    stream: str,
    no_prefix: bool,
    service: CallTarget,
) -> None:
    """Print the output of the workers of RUN_ID on all its hosts: stdout to stdout, stderr to stderr.

    Each host's agent is asked at its --supervisor-address; without one, it answers on its own host only. RUN_ID may be
    omitted if there is one run. With --follow, hosts that join are followed too.
    """
    from rallypoint.cli.operator import RENDEZVOUS, call, only_run, whole_run  # noqa: PLC0415 (not for --help)
    from rallypoint.rpc.loop import run  # noqa: PLC0415

    if not run_id:
        run_id = call(RENDEZVOUS, service, only_run)
    found = call(RENDEZVOUS, service, lambda stub: whole_run(run_id, stub)).run
    if not found.nodes:
        failed = found.run_end.failure
        where = f"; {failed.host} has {failed.log_file}" if failed.log_file else ""
        raise SettingError(f"run {run_id!r} has no nodes, and so no agents that have its logs{where}")
    request = _log_request(run_id, ranks, follow, tail, stream)
    run(_print_run_logs(request, found, service, prefixed=not no_prefix))


async def _print_run_logs(
    request: pb.StreamLogsRequest, run: rendezvous_pb.Run, service: CallTarget, *, prefixed: bool
) -> None:
    from rallypoint.cli.event_stream import Following  # noqa: PLC0415
    from rallypoint.cli.operator import whole_run  # noqa: PLC0415
    from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc  # noqa: PLC0415
    from rallypoint.rpc.calls import call_any  # noqa: PLC0415
    from rallypoint.rpc.errors import ServiceError  # noqa: PLC0415
    from rallypoint.rpc.loop import cancel_all  # noqa: PLC0415
    from rallypoint.rpc.replica_client import ReplicaClient  # noqa: PLC0415
    from rallypoint.submission.run_logs import RunLogs  # noqa: PLC0415

    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        click.echo(printable(text), err=True)

    async with _LogPrinter(prefixed) as printer:
        logs = RunLogs(request, service.security, service.timeout, printer.take, note)
        sources = [*logs.find(run)]
        if not sources:
            ranks = " or ".join(map(str, request.ranks))
            raise SettingError(
                notes[-1]
                if notes
                else f"run {run.run_id!r} has no worker of rank {ranks}; it has {run.world_size}"
            )
        if not request.follow:
            for source in sources:
                await logs.read(source)
            return
        readers = {asyncio.create_task(logs.read(source)) for source in sources}

        async def read_newcomers() -> None:
            with suppress(SettingError, ServiceError):  # the service may end with the run; the agents go on
                async with ReplicaClient(service.endpoint, service.security) as client:
                    while True:
                        await grown.wait()
                        grown.clear()
                        response = await call_any(
                            client,
                            rendezvous_grpc.RendezvousServiceStub,
                            lambda stub: whole_run(run.run_id, stub),
                        )
                        readers.update(
                            asyncio.create_task(logs.read(source)) for source in logs.find(response.run)
                        )

        async def watch_rounds() -> None:
            with suppress(SettingError):
                await following.run()

        grown = asyncio.Event()
        request_of_rounds = rendezvous_pb.WatchEventsRequest(
            run_id=run.run_id,
            after_revision=run.revision,
            filter=rendezvous_pb.EventFilter(kinds=[rendezvous_pb.EVENT_KIND_ROUND_FINALIZED]),
        )
        following = Following(service, request_of_rounds, on_events=lambda _events: grown.set(), on_gap=note)
        watching = [asyncio.create_task(read_newcomers()), asyncio.create_task(watch_rounds())]
        while left := [reader for reader in readers if not reader.done()]:
            await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        await cancel_all(watching)
