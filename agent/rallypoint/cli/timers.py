"""`rallypoint timers`: what counts down, and what ran out."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
@click.argument("run_id", type=Text(), required=False)
@click.option("--node", type=Text(), default="", help="Only of this node.")
@click.option("--expired", is_flag=True, help="Only those that ran out.")
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=1_000,
    show_default=True,
    metavar="N",
    help="At most N; those that ran out come first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the timers as JSON.")
@timer_service_options
def timers(
    *,
    run_id: str | None,
    node: str,
    expired: bool,
    limit: int,
    as_json: bool,
    timer_endpoint: str,
    timeout: float,
    tls: ClientTLS | None,
) -> None:
    """Show the timers of RUN_ID, or of all runs: what ran out first (marked !), then what runs out soonest.

    OFFERED ran out, and its agent was told so often, but has not reported yet. UNCLAIMED ran out, and no agent is
    there to be told. LEARNING can't run out: how long it may take is not known yet (`rallypoint scopes`).
    """
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415 (slow, and not for --help)

    from rallypoint.cli.operator import ask_timer  # noqa: PLC0415
    from rallypoint.cli.timer_pages import most_urgent  # noqa: PLC0415

    found, left_out = ask_timer(
        timer_endpoint,
        tls,
        timeout,
        lambda stub: most_urgent(run_id or "", node, limit, expired_only=expired, stub=stub),
    )
    if left_out:
        click.echo(
            "(more timers are left out; --limit shows more, RUN_ID, --node and --expired fewer)", err=True
        )
    if as_json:
        fields = [MessageToDict(each, always_print_fields_with_no_presence=True) for each in found]
        click.echo(json.dumps({"timers": fields}, indent=2))
    elif found:
        plain_console().print(_timer_table(found, with_runs=run_id is None))
    else:
        click.echo("no timers that ran out" if expired else "no timers")


def _timer_table(timers: Sequence[pb.Timer], *, with_runs: bool) -> Table:
    from rich.table import Table  # noqa: PLC0415

    from rallypoint.cli.timer_pages import RAN_OUT  # noqa: PLC0415
    from rallypoint.timer.v1 import timer_service_pb2 as pb  # noqa: PLC0415

    columns = ("node", "worker", "scope", "after", "remaining", "state", "offers")
    table = Table("", *(["run"] if with_runs else []), *columns, box=None)
    for each in timers:
        learning = each.state == pb.TIMER_STATE_LEARNING
        after = "learning" if learning else show_span(each.after.ToNanoseconds() / 1e9)
        table.add_row(
            "!" if each.state in RAN_OUT else "",
            *([printable(each.run_id)] if with_runs else []),
            printable(each.node_id),
            printable(each.worker_id),
            printable(each.scope),
            f"{after} (learned)" if each.learned_as and not learning else after,
            "-" if learning else show_span(each.remaining.ToNanoseconds() / 1e9),
            pb.TimerState.Name(each.state).removeprefix("TIMER_STATE_"),
            str(each.offers or "-"),
        )
    return table
