"""`rallypoint rounds`: the rounds of a run, why each ended, and the time until the next one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import click

from rallypoint.cli.output import plain_console, print_table, show_moment, show_span
from rallypoint.cli.values import RunId, limit_option, service_options
from rallypoint.rendezvous.core.state import explain_parts
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.endpoint import CallTarget

# More events than a service keeps of a run: by default 50,000, of which a round has at least three.
_ALL = 1_000_000


@click.command()
@click.argument("run_id", type=RunId())
@limit_option(100, _ALL, "Show at most the last N rounds.")
@click.option("--json", "as_json", is_flag=True, help="Print the rounds as JSON.")
@service_options
def rounds(*, run_id: str, limit: int, as_json: bool, service: CallTarget) -> None:
    """Show the rounds of RUN_ID: their nodes, how long each ran, and why it ended.

    JOIN is the time that nodes took to join, CONFIRM the time to stop their old workers, and GAP the time without
    workers: from the end of the previous round to the start of this one. RECOVERY ends when the workers of all nodes
    run; SLOWEST is the node that took longest by itself, with the seconds of each part. RESTARTS is the number of
    restarts that counted against the run's budget when the round had ended.
    """
    from rallypoint.cli.event_stream import last_events  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.cli.operator import RENDEZVOUS, call  # noqa: PLC0415

    wanted = pb.EventFilter(kinds=KINDS)
    events, _ = call(RENDEZVOUS, service, lambda stub: last_events(stub, run_id, wanted, _ALL))
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
    console = plain_console()
    columns = (
        "round",
        "started",
        "nodes",
        "workers",
        "join",
        "confirm",
        "gap",
        "recovery",
        "slowest",
        "ran",
        "restarts",
        "ended because",
    )
    if history.rounds:
        print_table(columns, map(_row, history.rounds), own_line=("ended because", "slowest", "started"))
    if history.closed is not None:
        console.print(f"run {run_id} is closed: {history.closed.detail}")
    elif history.joinable is not None:
        console.print(f"nodes have been joining the next round since {show_moment(history.joinable)}")
    elif not history.rounds:
        console.print("no rounds")


def _row(each: Round) -> tuple[str, ...]:
    spans = (each.joining, each.confirming, each.gap, each.recovery)
    return (
        str(each.number),
        "-" if each.final is None else show_moment(each.final),
        str(each.nodes or "-"),
        str(each.workers or "-"),
        *map(_span, spans),
        _slowest(each),
        _span(each.lasted),
        "-" if each.restarts is None else str(each.restarts),
        _end(each),
    )


def _span(seconds: float | None) -> str:
    return "-" if seconds is None else show_span(seconds)


def _slowest(each: Round) -> str:
    if not each.slowest:
        return "-"
    parts = explain_parts({part: seconds for part, seconds in each.parts.items() if seconds})
    some = f" ({each.started_nodes} of {each.nodes} reported)" if each.started_nodes < each.nodes else ""
    return f"{each.slowest}: {parts or 0}{some}"


def _end(each: Round) -> str:
    if each.ended is not None:
        delay = f" (the next is delayed by {each.held_back:g} s)" if each.held_back else ""
        return f"{each.cause}: {each.why}{delay}"
    return "(running)" if each.final is not None else "(nodes are confirming)"


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
        "recoverySeconds": _rounded(each.recovery),
        "startedNodes": each.started_nodes,
        "slowestNodeId": each.slowest,
        "slowestParts": {part: _rounded(seconds) for part, seconds in each.parts.items()},
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


# ---- The rounds of a run, reconstructed from its events.


KINDS = (
    pb.EVENT_KIND_RUN_CREATED,
    pb.EVENT_KIND_ROUND_FROZEN,
    pb.EVENT_KIND_ROUND_FINALIZED,
    pb.EVENT_KIND_ROUND_STARTED,
    pb.EVENT_KIND_WORKER_FAILED,
    pb.EVENT_KIND_NODE_LOST,
    pb.EVENT_KIND_ROUND_ENDED,
    pb.EVENT_KIND_RUN_CLOSED,
)
"""The events that `rounds_of` reads; it ignores others."""


@dataclass(slots=True)
class Round:
    """A round. Times are Unix seconds by the service's clock; None: not yet, never, or no longer retained."""

    number: int
    nodes: int = 0
    workers: int = 0
    joinable: float | None = None  # when nodes began to join it
    frozen: float | None = None  # when it got its ranks
    final: float | None = None  # when its workers were started
    ended: float | None = None
    stopped: float | None = None  # end of the last earlier round that had running workers
    running: float | None = None  # when the workers of the last node had started
    started_nodes: int = 0  # nodes that reported that
    slowest: str = ""  # of them, the one that took longest by itself
    parts: dict[str, float] = field(default_factory=dict)  # seconds of each part of the recovery there
    cause: str = ""  # RoundEndCause, or Outcome of the run, without prefix
    node_id: str = ""
    why: str = ""  # one sentence
    restarts: int | None = None  # restarts that counted against the run's budget at its end
    held_back: float = 0.0  # seconds by which the next round is delayed

    @property
    def joining(self) -> float | None:
        """Seconds that nodes took to join."""
        return _between(self.joinable, self.frozen)

    @property
    def confirming(self) -> float | None:
        """Seconds that nodes took to stop their old workers and confirm."""
        return _between(self.frozen, self.final)

    @property
    def gap(self) -> float | None:
        """Seconds without workers before this round: from the end of the last round that had any."""
        return _between(self.stopped, self.final)

    @property
    def recovery(self) -> float | None:
        """Seconds from the end of the last round that had workers until all of this one run."""
        return _between(self.stopped, self.running)

    @property
    def lasted(self) -> float | None:
        """Seconds that the workers ran."""
        return _between(self.final, self.ended)


@dataclass(slots=True)
class RoundHistory:
    """The rounds of a run in order, and its state after the last one."""

    rounds: list[Round] = field(default_factory=list)
    joinable: float | None = None  # when nodes began to join a round that has no number yet
    closed: pb.RunEnd | None = None


def rounds_of(events: Iterable[pb.Event]) -> RoundHistory:
    """Reconstruct rounds from a run's events in order; the oldest events may be missing."""
    history = RoundHistory()
    stopped: float | None = None
    for event in events:
        time = to_seconds(event.time)
        match event.kind:
            case pb.EVENT_KIND_RUN_CREATED:
                history.joinable = time
            case pb.EVENT_KIND_ROUND_FROZEN:
                history.rounds.append(
                    Round(
                        event.round,
                        event.group_world_size,
                        event.world_size,
                        joinable=history.joinable,
                        frozen=time,
                        stopped=stopped,
                    )
                )
                history.joinable = None
            case pb.EVENT_KIND_ROUND_FINALIZED:
                _last(history, event.round).final = time
            case pb.EVENT_KIND_ROUND_STARTED:
                started, start = _last(history, event.round), event.round_start
                started.running = time - to_seconds(start.age)
                started.started_nodes, started.slowest = start.reported_nodes, start.slowest_node_id
                started.parts = {part.name: to_seconds(value) for part, value in start.parts.ListFields()}
            case pb.EVENT_KIND_ROUND_ENDED:
                ended = _last(history, event.round)
                ended.ended = history.joinable = time
                ended.cause = _name(pb.RoundEndCause, event.round_end.cause, "ROUND_END_CAUSE_")
                ended.node_id, ended.why = event.round_end.node_id, event.round_end.detail
                ended.restarts = event.counted_restarts
                ended.held_back = to_seconds(event.held_back)
                if ended.final is not None or ended.frozen is None:
                    stopped = time
            case pb.EVENT_KIND_WORKER_FAILED:
                _note_late_first(history, event)
            case pb.EVENT_KIND_NODE_LOST:
                _attribute_failure(history, event)
            case pb.EVENT_KIND_RUN_CLOSED:
                history.joinable, history.closed = None, event.run_end
                if history.rounds and history.rounds[-1].ended is None:
                    last = history.rounds[-1]
                    last.ended, last.why = time, event.run_end.detail
                    last.node_id = event.run_end.failure.node_id
                    last.cause = _name(pb.Outcome, event.run_end.outcome, "OUTCOME_")
    return history


def _note_late_first(history: RoundHistory, event: pb.Event) -> None:
    """Attribute a round's end to an earlier failure that was reported after the end."""
    for each in reversed(history.rounds):
        if each.number == event.round:
            if event.earliest and each.cause == "WORKER_FAILED":
                failure = event.failure
                each.node_id = failure.node_id
                each.why = (
                    f"worker of rank {failure.rank} on node {failure.node_id} failed: {failure.message}"
                )
            return


def _attribute_failure(history: RoundHistory, event: pb.Event) -> None:
    """Correct a round that ended by a failure, after the loss of a node is found to be the cause."""
    for each in reversed(history.rounds):
        if each.number == event.round and each.cause == "WORKER_FAILED":
            each.cause, each.node_id, each.why, each.held_back = "NODE_LOST", event.node_id, event.detail, 0.0
            if each.restarts is not None:
                each.restarts -= 1
            return


def _last(history: RoundHistory, number: int) -> Round:
    """Return the last round, which has this number; append it if its earlier events are no longer retained."""
    if not history.rounds or history.rounds[-1].number != number:
        history.rounds.append(Round(number))
    return history.rounds[-1]


def _name(enum: object, number: int, prefix: str) -> str:
    try:
        name: str = enum.Name(number)  # type: ignore[attr-defined]
    except ValueError:  # a value of a newer service
        return str(number)
    return name.removeprefix(prefix)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
