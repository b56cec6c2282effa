"""`rallypoint agent jobs` and `workers`: what runs on a host."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from rallypoint.cli.agent_service import agent_options, run_argument, state_in_words
from rallypoint.cli.console import plain_console, printable
from rallypoint.cli.moments import show_moment, show_span
from rallypoint.rpc.endpoint import ClientTLS

if TYPE_CHECKING:
    from rich.table import Table

    from rallypoint.agent.v1 import supervisor_service_pb2 as pb

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@agent_options
def jobs(*, agent: str, as_json: bool, timeout: float, tls: ClientTLS | None) -> None:
    """Show the jobs that run on the agent's host, and the last that ended, the latest first."""
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415 (slow, and not for --help)

    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415
    from rallypoint.cli.operator import ask_agent  # noqa: PLC0415

    response = ask_agent(agent, tls, timeout, lambda stub: stub.ListJobs(pb.ListJobsRequest()))
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
    from rallypoint.cli.operator import ask_agent  # noqa: PLC0415

    request = pb.ListWorkersRequest(run_id=run_id)
    response = ask_agent(agent, tls, timeout, lambda stub: stub.ListWorkers(request))
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
