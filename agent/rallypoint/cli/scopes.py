"""`rallypoint scopes`: how long runs have learned that their scopes take, and forgetting it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from rallypoint.cli.console import plain_console, printable
from rallypoint.cli.moments import show_span
from rallypoint.cli.nodes import Text
from rallypoint.cli.timer_service import timer_service_options
from rallypoint.rpc.endpoint import ClientTLS

if TYPE_CHECKING:
    from rallypoint.timer.v1 import timer_service_pb2 as pb


@click.command()
@click.argument("run_id", type=Text(), required=False)
@click.option(
    "--forget",
    "forgotten",
    type=Text(),
    multiple=True,
    metavar="SCOPE",
    help="Let RUN_ID learn this one anew.",
)
@click.option("--forget-all", is_flag=True, help="Let RUN_ID learn all of them anew.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@timer_service_options
def scopes(
    *,
    run_id: str | None,
    forgotten: Sequence[str],
    forget_all: bool,
    as_json: bool,
    timer_endpoint: str,
    timeout: float,
    tls: ClientTLS | None,
) -> None:
    """Show what RUN_ID, or every run, has learned of its scopes with `expires(after="auto")`.

    SEEN is how many times workers have left the scope, on all hosts, TIMEOUT how long it may take, and TIMERS how
    many workers are in it now. --forget lets a run learn anew, say after its batches have become larger: its
    timers accuse nobody until enough was seen again.
    """
    if forgotten or forget_all:
        _check_forgetting(run_id, forgotten, forget_all)
        counts = _forget(run_id or "", forgotten or [""], timer_endpoint, tls, timeout)
        if as_json:
            click.echo(json.dumps({"forgotten": sum(counts.values())}, indent=2))
        else:
            for scope, count in counts.items():
                click.echo(_told(run_id or "", scope, count))
        return
    _show(run_id or "", as_json, timer_endpoint, tls, timeout)


def _check_forgetting(run_id: str | None, forgotten: Sequence[str], forget_all: bool) -> None:
    if not run_id:
        flag = "--forget-all" if forget_all else "--forget"
        raise click.UsageError(f"{flag} needs RUN_ID: which run is to forget?")
    if forgotten and forget_all:
        raise click.UsageError("--forget and --forget-all contradict each other; leave one out")
    if "" in forgotten:
        # On the wire an empty scope stands for all of them.
        raise click.UsageError("--forget needs the name of a scope; --forget-all forgets all of the run")


def _forget(
    run_id: str, scopes: Sequence[str], endpoint: str, tls: ClientTLS | None, timeout: float
) -> dict[str, int]:
    """How many were forgotten of each name; "" stands for all of the run."""
    from rallypoint.cli.operator import ask_timer  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.timer.v1 import timer_service_pb2 as pb  # noqa: PLC0415
    from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc  # noqa: PLC0415

    async def forget(stub: pb_grpc.TimerServiceAsyncStub) -> dict[str, int]:
        return {
            scope: (await stub.ForgetScopes(pb.ForgetScopesRequest(run_id=run_id, scope=scope))).forgotten
            for scope in dict.fromkeys(scopes)
        }

    return ask_timer(endpoint, tls, timeout, forget)


def _told(run_id: str, scope: str, count: int) -> str:
    if not count:
        what = f"of the scope {scope}" if scope else "of any scope"
        return f"run {run_id} had learned nothing {what}, so there was nothing to forget"
    if scope:
        return f"run {run_id} has forgotten the scope {scope} and learns it anew"
    plural = "" if count == 1 else "s"
    return f"run {run_id} has forgotten {count} scope{plural} and learns anew"


def _show(run_id: str, as_json: bool, endpoint: str, tls: ClientTLS | None, timeout: float) -> None:
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415 (slow, and not for --help)

    from rallypoint.cli.operator import ask_timer  # noqa: PLC0415
    from rallypoint.cli.timer_pages import all_scopes  # noqa: PLC0415

    answer = ask_timer(endpoint, tls, timeout, partial(all_scopes, run_id))
    if as_json:
        fields: dict[str, Any] = MessageToDict(answer, always_print_fields_with_no_presence=True)
        del fields["nextPageToken"]  # all pages are in it
        click.echo(json.dumps(fields, indent=2))
    elif answer.scopes:
        _print(answer, with_runs=not run_id)
    else:
        click.echo('nothing was learned; `expires(after="auto")` does')


def _print(answer: pb.ListScopesResponse, *, with_runs: bool) -> None:
    from rich.table import Table  # noqa: PLC0415

    table = Table(*(["run"] if with_runs else []), "scope", "seen", "longest", "timeout", "timers", box=None)
    for each in answer.scopes:
        known = each.HasField("after")
        table.add_row(
            *([printable(each.run_id)] if with_runs else []),
            printable(each.scope),
            str(each.count),
            show_span(each.longest.ToNanoseconds() / 1e9) if each.count else "-",
            show_span(each.after.ToNanoseconds() / 1e9)
            if known
            else f"{each.count} of {answer.warm_up} seen",
            str(each.timers),
        )
    console = plain_console()
    console.print(table)
    least = show_span(answer.least.ToNanoseconds() / 1e9)
    console.print(
        f"a timeout is {answer.factor:g} times the longest, at least {least}, once {answer.warm_up} were seen"
    )
