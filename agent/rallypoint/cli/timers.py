"""`rallypoint timers`: the timers of workers, running and expired."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import click

from rallypoint.cli.output import json_fields, plain_console, print_table, show_span
from rallypoint.cli.values import RunId, Text, limit_option, timer_service_options
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.endpoint import CallTarget
from rallypoint.timer.v1 import timer_service_pb2 as pb


@click.command()
@click.argument("run_id", type=RunId(), required=False)
@click.option("--node", type=Text(), default="", help="Only timers of this node.")
@click.option("--expired", is_flag=True, help="Only expired timers.")
@limit_option(1_000, 1_000_000, "Show at most N timers, expired ones first.")
@click.option("--json", "as_json", is_flag=True, help="Print the timers as JSON.")
@timer_service_options
def timers(
    *, run_id: str | None, node: str, expired: bool, limit: int, as_json: bool, service: CallTarget
) -> None:
    """Show the timers of RUN_ID, or of all runs: expired ones (marked !), then those that expire soonest.

    OFFERED: expired, and sent to its agent (OFFERS times) without a reply yet. UNCLAIMED: expired, and no agent is
    connected. LEARNING: can't expire, because its timeout is still being learned (`rallypoint scopes`).
    """
    from rallypoint.cli.operator import TIMER, call, most_urgent  # noqa: PLC0415

    found, left_out = call(
        TIMER, service, lambda stub: most_urgent(run_id or "", node, limit, expired_only=expired, stub=stub)
    )
    if left_out:
        click.echo(
            "(more timers are left out; --limit shows more, RUN_ID, --node and --expired fewer)", err=True
        )
    if as_json:
        fields = [json_fields(each) for each in found]
        click.echo(json.dumps({"timers": fields}, indent=2))
    elif found:
        _print_timers(found, with_runs=run_id is None)
    else:
        click.echo("no expired timers" if expired else "no timers")


def _print_timers(timers: Sequence[pb.Timer], *, with_runs: bool) -> None:
    from rallypoint.cli.operator import RAN_OUT  # noqa: PLC0415

    rows = []
    for each in timers:
        learning = each.state == pb.TIMER_STATE_LEARNING
        after = "learning" if learning else show_span(to_seconds(each.after))
        rows.append(
            (
                "!" if each.state in RAN_OUT else "",
                *([each.run_id] if with_runs else []),
                each.node_id,
                each.worker_id,
                each.scope,
                f"{after} (learned)" if each.learned_as and not learning else after,
                "-" if learning else show_span(to_seconds(each.remaining)),
                pb.TimerState.Name(each.state).removeprefix("TIMER_STATE_"),
                str(each.offers or "-"),
            )
        )
    runs = ["run"] if with_runs else []
    columns = ("", *runs, "node", "worker", "scope", "after", "remaining", "state", "offers")
    print_table(columns, rows, own_line=["offers", "scope", "node", *runs])


# ---- `rallypoint scopes`: learned timeouts of scopes, and forgetting them.


@click.command()
@click.argument("run_id", type=RunId(), required=False)
@click.option(
    "--forget",
    "forgotten",
    type=Text(),
    multiple=True,
    metavar="SCOPE",
    help="Make RUN_ID learn this scope again; may be repeated.",
)
@click.option("--forget-all", is_flag=True, help="Make RUN_ID learn all its scopes again.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@timer_service_options
def scopes(
    *, run_id: str | None, forgotten: Sequence[str], forget_all: bool, as_json: bool, service: CallTarget
) -> None:
    """Show the timeouts that RUN_ID, or every run, has learned for its scopes with `expires(after="auto")`.

    SEEN is how often workers have left the scope, on all hosts; TIMEOUT is how long it may take; TIMERS is how many
    workers are in it now. Use --forget when a scope takes longer than before, as with larger batches: its timers can't
    expire until enough completions have been seen again.
    """
    if forgotten or forget_all:
        _check_forgetting(run_id, forgotten, forget_all)
        counts = _forget(run_id or "", forgotten or [""], service)
        if as_json:
            click.echo(json.dumps({"forgotten": sum(counts.values())}, indent=2))
        else:
            for scope, count in counts.items():
                click.echo(_describe_scope(run_id or "", scope, count))
        return
    _show(run_id or "", as_json, service)


def _check_forgetting(run_id: str | None, forgotten: Sequence[str], forget_all: bool) -> None:
    if not run_id:
        flag = "--forget-all" if forget_all else "--forget"
        raise click.UsageError(f"{flag} needs RUN_ID, the run that is to forget")
    if forgotten and forget_all:
        raise click.UsageError("--forget and --forget-all contradict each other; leave one out")
    if "" in forgotten:
        # In the request an empty scope means all of them.
        raise click.UsageError("--forget needs the name of a scope; --forget-all forgets all of the run")


def _forget(run_id: str, scopes: Sequence[str], service: CallTarget) -> dict[str, int]:
    """Return how many scopes were forgotten for each name; "" means all scopes of the run."""
    from rallypoint.cli.operator import TIMER, call  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc  # noqa: PLC0415

    async def forget(stub: pb_grpc.TimerServiceAsyncStub) -> dict[str, int]:
        return {
            scope: (await stub.ForgetScopes(pb.ForgetScopesRequest(run_id=run_id, scope=scope))).forgotten
            for scope in dict.fromkeys(scopes)
        }

    return call(TIMER, service, forget)


def _describe_scope(run_id: str, scope: str, count: int) -> str:
    if not count:
        subject = f"of the scope {scope}" if scope else "of any scope"
        return f"run {run_id} had learned nothing {subject}, so there was nothing to forget"
    if scope:
        return f"run {run_id} has forgotten the scope {scope} and learns it again"
    plural = "" if count == 1 else "s"
    return f"run {run_id} has forgotten {count} scope{plural} and learns again"


def _show(run_id: str, as_json: bool, service: CallTarget) -> None:
    from rallypoint.cli.operator import TIMER, all_scopes, call  # noqa: PLC0415

    answer = call(TIMER, service, partial(all_scopes, run_id))
    if as_json:
        fields = json_fields(answer)
        del fields["nextPageToken"]  # all pages are included
        click.echo(json.dumps(fields, indent=2))
    elif answer.scopes:
        _print(answer, with_runs=not run_id)
    else:
        click.echo('no learned timeouts; use `expires(after="auto")` to learn them')


def _print(answer: pb.ListScopesResponse, *, with_runs: bool) -> None:
    rows = [
        (
            *([each.run_id] if with_runs else []),
            each.scope,
            str(each.count),
            show_span(to_seconds(each.longest)) if each.count else "-",
            show_span(to_seconds(each.after))
            if each.HasField("after")
            else f"{each.count} of {answer.warm_up} seen",
            str(each.timers),
        )
        for each in answer.scopes
    ]
    runs = ["run"] if with_runs else []
    print_table((*runs, "scope", "seen", "longest", "timeout", "timers"), rows, own_line=["scope", *runs])
    least = show_span(to_seconds(answer.least))
    plain_console().print(
        f"a timeout is {answer.factor:g} times the longest, at least {least}, after {answer.warm_up} completions"
    )


# ---- `rallypoint progress`: the progress of a run's workers.


@click.command()
@click.argument("run_id", type=RunId())
@limit_option(10, 1_000, "Show at most the N slowest workers.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@timer_service_options
def progress(*, run_id: str, limit: int, as_json: bool, service: CallTarget) -> None:
    """Show the progress of the workers of RUN_ID, as they report it with `progress(step)`: the slowest first.

    BEHIND is how many steps the worker is behind the fastest; SINCE is how long it has been at its step.
    """
    from rallypoint.cli.operator import TIMER, call  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.cli.status import progress_lines  # noqa: PLC0415

    request = pb.GetProgressRequest(run_id=run_id, page_size=limit)
    answer = call(TIMER, service, lambda stub: stub.GetProgress(request))
    if as_json:
        click.echo(json.dumps(json_fields(answer), indent=2))
        return
    console = plain_console()
    if not answer.workers:
        console.print(f"no worker of run {run_id} reports progress; use `rallypoint.timer.progress(step)`")
        return
    for line in progress_lines(run_id, answer):
        console.print(line)
    rows = [
        (
            str(each.rank),
            each.node_id,
            each.worker_id,
            str(each.step),
            str(answer.highest_step - each.step),
            show_span(to_seconds(each.idle)),
        )
        for each in answer.slowest
    ]
    print_table(("rank", "node", "worker", "step", "behind", "since"), rows, own_line=("node",))
