"""`rallypoint events`: the past events of a run, and new ones as they happen."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click
from google.protobuf.json_format import MessageToJson

from rallypoint.cli.output import TimestampParam, indented, plain_console, show_moment, show_span
from rallypoint.cli.values import RunId, Text, limit_option, service_options
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.endpoint import CallTarget
from rallypoint.rpc.text import printable

_PREFIX = "EVENT_KIND_"
KINDS = tuple(kind.removeprefix(_PREFIX) for kind in pb.EventKind.keys()[1:])


class _Kind(click.Choice[str]):
    """A kind of event; case is ignored, and dashes and underscores are equal."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the name."""
        return super().convert(str(value).replace("-", "_"), param, ctx)


@click.command()
@click.argument("run_id", type=RunId())
@click.option("--round", "rounds", type=click.IntRange(1), multiple=True, help="Only events of this round.")
@click.option("--node", "nodes", type=Text(), multiple=True, help="Only events of this node.")
@click.option(
    "--kind",
    "kinds",
    type=_Kind(KINDS, case_sensitive=False),
    multiple=True,
    metavar="KIND",
    help=f"Only events of this kind: {', '.join(KINDS)}.",
)
@click.option(
    "--since", type=TimestampParam(), help="Only events since this age (90s, 10m, 2h, 1d) or ISO time."
)
@click.option("--until", type=TimestampParam(), help="Only events before this age or ISO time.")
@limit_option(1_000, 1_000_000, "Show at most the last N events.")
@click.option("--follow", "-f", is_flag=True, help="Continue with new events until the run is closed.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Also print the log file and the traceback of each failed worker."
)
@click.option("--json", "as_json", is_flag=True, help="Print each event as JSON on one line.")
@service_options
def events(
    *,
    run_id: str,
    rounds: Sequence[int],
    nodes: Sequence[str],
    kinds: Sequence[str],
    since: datetime | None,
    until: datetime | None,
    limit: int,
    follow: bool,
    verbose: bool,
    as_json: bool,
    service: CallTarget,
) -> None:
    """Show the events of RUN_ID, oldest first; each of --round, --node and --kind may be repeated.

    Each line has the local time by the service's clock, the time since the previous line, the kind, and a description.
    """
    from rallypoint.cli.event_stream import Following, last_events  # noqa: PLC0415
    from rallypoint.cli.operator import RENDEZVOUS, call  # noqa: PLC0415
    from rallypoint.rpc.loop import run  # noqa: PLC0415

    if since is not None and until is not None and since > until:
        raise click.UsageError("--since is after --until.")
    wanted = pb.EventFilter(
        node_ids=nodes, kinds=[pb.EventKind.Value(_PREFIX + kind) for kind in kinds], rounds=rounds
    )
    if since is not None:
        wanted.since.FromDatetime(since)
    if until is not None:
        wanted.until.FromDatetime(until)
    line = json_line if as_json else EventLines(plain_console().width, verbose).format

    def show(these: Sequence[pb.Event]) -> None:
        for event in these:
            click.echo(line(event))

    past, older = call(RENDEZVOUS, service, lambda stub: last_events(stub, run_id, wanted, limit))
    if older:
        click.echo(f"(older events are left out; --limit {limit} shows the last {limit})", err=True)
    show(past)
    if follow:
        revision = past[-1].revision if past else 0
        request = pb.WatchEventsRequest(run_id=run_id, after_revision=revision, filter=wanted)
        following = Following(
            service, request, on_events=show, on_gap=lambda gap: click.echo(f"({gap})", err=True)
        )
        run(following.run())
    elif not past:
        click.echo("no such events", err=True)


# ---- Events as lines: for people, and for programs.


_SPAN_WIDTH = 9  # "-12m34s", and "59.999s" with its sign
_KIND_WIDTH = max(map(len, KINDS))


class EventLines:
    """Format each event as a line, with the time since the previous event."""

    def __init__(self, width: int, verbose: bool = False) -> None:
        """Start without a previous event; `width`: columns of a line; `verbose`: failed workers have further lines."""
        self._width = width
        self._verbose = verbose
        self._before: float | None = None

    def format(self, event: pb.Event) -> str:
        """Return a line: time, span, kind, description (below, if too wide); more of a failure if verbose."""
        now = to_seconds(event.time)
        span = "" if self._before is None else show_span(now - self._before)
        self._before = now
        if span and not span.startswith("-"):
            span = f"+{span}"
        kind = pb.EventKind.Name(event.kind).removeprefix(_PREFIX) if _known(event) else "?"
        # The actor is shown for operators only; other descriptions already name the cause.
        actor = event.actor
        by = f" (operator {actor.name or actor.peer})" if actor.kind == pb.ACTOR_KIND_OPERATOR else ""
        sentence = printable(f"{event.detail}{by}")
        begin = f"{show_moment(now)}  {span:>{_SPAN_WIDTH}}  {kind:<{_KIND_WIDTH}}  "
        line = begin + sentence
        if len(line) > self._width:
            line = "\n".join([begin.rstrip(), *indented(sentence, self._width)])
        if not self._verbose or not event.HasField("failure"):
            return line
        failure = event.failure
        more = [f"log file of {failure.host}: {failure.log_file}"] if failure.log_file else []
        more += failure.traceback.rstrip().splitlines()
        return "\n".join([line, *(f"    {printable(text)}" for text in more)])


def json_line(event: pb.Event) -> str:
    """Return an event as protobuf JSON, on one line."""
    return MessageToJson(event, indent=None, always_print_fields_with_no_presence=True)


def _known(event: pb.Event) -> bool:
    return event.kind in pb.EventKind.values()
