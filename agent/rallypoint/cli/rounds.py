"""`rallypoint rounds`: a run's rounds, why each ended, and how long it took to get going again."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from rallypoint.cli.console import plain_console
from rallypoint.cli.moments import show_moment, show_span
from rallypoint.cli.nodes import Text
from rallypoint.cli.service_options import service_options
from rallypoint.rpc.endpoint import ClientTLS

if TYPE_CHECKING:
    from rallypoint.cli.round_history import Round, RoundHistory

# More than a service keeps of a run: by default 50,000 events, of which a round has at least three.
_ALL = 1_000_000


@click.command()
@click.argument("run_id", type=Text())
@click.option(
    "--limit",
    type=click.IntRange(1, _ALL),
    default=100,
    show_default=True,
    metavar="N",
    help="At most the last N.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the rounds as JSON.")
@service_options
def rounds(
    *, run_id: str, limit: int, as_json: bool, rdzv_endpoint: str, timeout: float, tls: ClientTLS | None
) -> None:
    """Show the rounds of RUN_ID: who was in, how long it ran, and why it ended.

    JOIN is how long nodes took to join, CONFIRM how long they took to stop their old workers, and GAP how long no
    worker could run: from the end of the round before to the start of this one. RESTARTS are those that counted against
    the run's budget when the round had ended.
    """
    from rallypoint.cli.event_stream import last_events  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.cli.operator import ask  # noqa: PLC0415
    from rallypoint.cli.round_history import KINDS, rounds_of  # noqa: PLC0415
    from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb  # noqa: PLC0415

    wanted = pb.EventFilter(kinds=KINDS)
    events, _ = ask(rdzv_endpoint, tls, timeout, lambda stub: last_events(stub, run_id, wanted, _ALL))
    history = rounds_of(events)
    older = max(0, len(history.rounds) - limit)
    del history.rounds[:older]
    if as_json:
        click.echo(json.dumps({"rounds": [_fields(each) for each in history.rounds]}, indent=2))
        return
    if older:
        click.echo(f"({older} older rounds are left out; --limit shows more)", err=True)
    _print(run_id, history)


def _print(run_id: str, history: RoundHistory) -> None:
    from rich.table import Table  # noqa: PLC0415 (slow, and not for --help)

    console = plain_console()
    if history.rounds:
        columns = (
            "round",
            "started",
            "nodes",
            "workers",
            "join",
            "confirm",
            "gap",
            "ran",
            "restarts",
            "ended because",
        )
        table = Table(*columns, box=None)
        for each in history.rounds:
            table.add_row(
                str(each.number),
                "-" if each.final is None else show_moment(each.final),
                str(each.nodes or "-"),
                str(each.workers or "-"),
                *(
                    "-" if span is None else show_span(span)
                    for span in (each.joining, each.confirming, each.gap, each.lasted)
                ),
                "-" if each.restarts is None else str(each.restarts),
                _end(each),
            )
        console.print(table)
    if history.closed is not None:
        console.print(f"run {run_id} is closed: {history.closed.detail}")
    elif history.joinable is not None:
        console.print(f"nodes join for the next round since {show_moment(history.joinable)}")
    elif not history.rounds:
        console.print("no rounds")


def _end(each: Round) -> str:
    if each.ended is not None:
        held_back = f" (the next is held back {each.held_back:g} s)" if each.held_back else ""
        return f"{each.cause}: {each.why}{held_back}"
    return "(its workers run)" if each.final is not None else "(its nodes confirm)"


def _fields(each: Round) -> dict[str, Any]:
    return {
        "round": each.number,
        "nodes": each.nodes,
        "workers": each.workers,
        "joinable": _utc(each.joinable),
        "frozen": _utc(each.frozen),
        "final": _utc(each.final),
        "ended": _utc(each.ended),
        "joinSeconds": _rounded(each.joining),
        "confirmSeconds": _rounded(each.confirming),
        "gapSeconds": _rounded(each.gap),
        "ranSeconds": _rounded(each.lasted),
        "cause": each.cause,
        "nodeId": each.node_id,
        "detail": each.why,
        "countedRestarts": each.restarts,
        "heldBackSeconds": _rounded(each.held_back),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _utc(unix_seconds: float | None) -> str | None:
    if unix_seconds is None:
        return None
    moment = datetime.fromtimestamp(round(unix_seconds, 3), UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
