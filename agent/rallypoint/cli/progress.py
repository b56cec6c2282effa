"""`rallypoint progress`: how far a run's workers have come, and who stopped first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from rallypoint.cli.console import plain_console, printable
from rallypoint.cli.moments import show_span
from rallypoint.cli.nodes import Text
from rallypoint.cli.timer_service import timer_service_options
from rallypoint.rpc.endpoint import ClientTLS

if TYPE_CHECKING:
    from rich.table import Table

    from rallypoint.timer.v1 import timer_service_pb2 as pb


@click.command()
@click.argument("run_id", type=Text())
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000),
    default=10,
    show_default=True,
    metavar="N",
    help="At most the slowest N.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@timer_service_options
def progress(
    *, run_id: str, limit: int, as_json: bool, timer_endpoint: str, timeout: float, tls: ClientTLS | None
) -> None:
    """Show how far the workers of RUN_ID have come, as they say by `progress(step)`: the slowest first.

    BEHIND is how many steps the worker is behind the fastest, and SINCE how long it has been at its step.
    """
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415 (slow, and not for --help)

    from rallypoint.cli.operator import ask_timer  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.cli.progress_lines import progress_lines  # noqa: PLC0415
    from rallypoint.timer.v1 import timer_service_pb2 as pb  # noqa: PLC0415

    request = pb.GetProgressRequest(run_id=run_id, most=limit)
    answer = ask_timer(timer_endpoint, tls, timeout, lambda stub: stub.GetProgress(request))
    if as_json:
        fields = MessageToDict(answer, always_print_fields_with_no_presence=True)
        click.echo(json.dumps(fields, indent=2))
        return
    console = plain_console()
    if not answer.workers:
        console.print(f"no worker of run {run_id} tells its progress; `rallypoint.timer.progress(step)` does")
        return
    for line in progress_lines(run_id, answer):
        console.print(line)
    console.print(_worker_table(answer))


def _worker_table(answer: pb.GetProgressResponse) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table("rank", "node", "worker", "step", "behind", "since", box=None)
    for each in answer.slowest:
        table.add_row(
            str(each.rank),
            printable(each.node_id),
            printable(each.worker_id),
            str(each.step),
            str(answer.highest_step - each.step),
            show_span(each.idle.ToNanoseconds() / 1e9),
        )
    return table
