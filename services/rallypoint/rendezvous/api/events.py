"""Journal records as events for people and tools: the change, its node and round, and the reason."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.facts import explain_eviction, explain_loss, explain_window
from rallypoint.rendezvous.core.failures import hold
from rallypoint.rendezvous.core.state import RoundEndCause, RunSettings, explain_parts
from rallypoint.rendezvous.journal.codec import DecodedRecord
from rallypoint.rendezvous.runs.run import api_messages
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import set_seconds
from rallypoint.rpc.errors import invalid
from rallypoint.serving.requests import EveryField, count, name

# The least age of a failure that is shown, seconds: a smaller one is the delay of the report.
_LEAST_SHOWN_AGE = 1.0


def event_of(record: DecodedRecord, settings: RunSettings) -> pb.Event:
    """Return the event of a record; `settings` are those of its run."""
    fact = record.fact()
    node_id, round_ = record.subject()
    event = pb.Event(
        revision=record.revision,
        time=record.time,
        actor=_actor(record.actor()),
        kind=_KINDS[record.fact_name],
        node_id=node_id,
        round=round_,
        detail=_SENTENCES[record.fact_name](fact, settings),
    )
    match fact:
        case facts.RoundFrozen():
            event.group_world_size = len(fact.seats)
            event.world_size = _workers(fact)
        case facts.RoundStarted():
            event.group_world_size = fact.group_world_size
            event.round_start.reported_nodes = fact.reported_nodes
            event.round_start.slowest_node_id = fact.slowest
            event.round_start.parts.CopyFrom(api_messages.to_message(fact.parts))
            set_seconds(event.round_start.age, fact.age)
            if fact.duration:
                set_seconds(event.round_start.duration, fact.duration)
        case facts.WorkerFailed():
            event.failure.CopyFrom(api_messages.to_message(fact.failure))
            event.earliest = fact.earliest
        case facts.RoundEnded():
            event.round_end.CopyFrom(api_messages.to_message(fact.end))
            event.counted_restarts = fact.counted_restarts
            if seconds := _held_back(fact, settings):
                set_seconds(event.held_back, seconds)
        case facts.RunClosed():
            event.run_end.CopyFrom(api_messages.to_message(fact.end))
    return event


_actor = functools.lru_cache(maxsize=1_024)(api_messages.to_message)


def _run_created(fact: facts.RunCreated, _: RunSettings) -> str:
    settings = fact.settings  # those of a run that is reopened may change
    least, most = settings.min_nodes, settings.max_nodes
    nodes = _counted(most, "node") if least == most else f"{least} to {most} nodes"
    restarts = _counted(settings.max_restarts, "restart") + explain_window(settings.restart_window)
    by_node = f", {settings.max_restarts_per_node} for one node" if settings.max_restarts_per_node else ""
    began = "was reopened" if fact.reopened else "began"
    return f"the run {began}: a round has {nodes}, and {restarts} may be used{by_node}"


def _node_joined(fact: facts.NodeJoined, settings: RunSettings) -> str:
    return f"node {fact.node_id} joined from {fact.address} with {_counted(fact.local_world_size, 'worker')}"


def _node_lost(fact: facts.NodeLost, settings: RunSettings) -> str:
    loss = explain_loss(fact.node_id, fact.reason, settings)
    if not fact.failed_round:
        return loss
    return f"{loss}; that made workers of round {fact.failed_round} fail, so the failure counts as no restart"


def _node_evicted(fact: facts.NodeEvicted, settings: RunSettings) -> str:
    if fact.lease:
        return explain_eviction(fact.node_id, fact.reason, by_service=fact.by_service)
    by = "" if fact.by_service else " by an operator"
    return f"node {fact.node_id}, which was not in the run, was barred{by}: {fact.reason}"


def _round_frozen(fact: facts.RoundFrozen, settings: RunSettings) -> str:
    nodes, workers = _counted(len(fact.seats), "node"), _counted(_workers(fact), "worker")
    return f"round {fact.round} frozen: {nodes}, {workers}"


def _round_started(fact: facts.RoundStarted, settings: RunSettings) -> str:
    nodes = _counted(fact.group_world_size, "node")
    if fact.reported_nodes < fact.group_world_size:
        nodes = f"{fact.reported_nodes} of {nodes}"
    after = f" {fact.duration:.2f} s after the end of the round before" if fact.duration else ""
    ago = f", {fact.age:.3g} s ago" if fact.age >= _LEAST_SHOWN_AGE else ""
    parts = explain_parts({part: seconds for part, seconds in asdict(fact.parts).items() if seconds})
    slowest = f"; slowest: node {fact.slowest} ({parts})" if parts else ""
    return f"round {fact.round} started on {nodes}{after}{ago}{slowest}"


def _worker_failed(fact: facts.WorkerFailed, settings: RunSettings) -> str:
    failure = fact.failure
    ago = f", {failure.age:.3g} s before it was reported" if failure.age >= _LEAST_SHOWN_AGE else ""
    return f"worker of rank {failure.rank} on node {failure.node_id} failed{ago}: {failure.message}"


def _round_ended(fact: facts.RoundEnded, settings: RunSettings) -> str:
    end = fact.end
    used = ""
    if end.cause is RoundEndCause.WORKER_FAILED:
        used = f" ({_restart(fact, settings)})"
    return f"round {end.round} ended: {end.detail}{used}"


def _restart(fact: facts.RoundEnded, settings: RunSettings) -> str:
    """Return the number of the restart, the budget, and the back-off."""
    counted = fact.counted_restarts or fact.restart_count  # older records have none
    count = f"restart {counted} of {settings.max_restarts}{explain_window(settings.restart_window)}"
    held_back = _held_back(fact, settings)
    return f"{count}, delayed by {held_back:g} s" if held_back else count


def _held_back(fact: facts.RoundEnded, settings: RunSettings) -> float:
    by_failure = fact.end.cause is RoundEndCause.WORKER_FAILED
    return hold(settings, fact.quick_restarts) if by_failure else 0.0


def _run_closed(fact: facts.RunClosed, settings: RunSettings) -> str:
    return f"the run is closed, {fact.end.outcome.name}: {fact.end.detail}"


_SENTENCES: dict[str, Callable[[Any, RunSettings], str]] = {
    "run_created": _run_created,
    "node_joined": _node_joined,
    "node_lost": _node_lost,
    "node_left": lambda fact, _: f"node {fact.node_id} left: {fact.reason}",
    "node_departing": lambda fact, _: (
        f"node {fact.node_id} stops its workers in order to leave: {fact.reason}"
    ),
    "node_evicted": _node_evicted,
    "node_readmitted": lambda fact, _: f"node {fact.node_id} may join again: {fact.reason}",
    "round_frozen": _round_frozen,
    "node_confirmed": lambda fact, _: f"node {fact.node_id} confirmed round {fact.round}",
    "round_finalized": lambda fact, _: f"round {fact.round} final: all nodes confirmed, workers start",
    "round_started": _round_started,
    "worker_failed": _worker_failed,
    "node_succeeded": lambda fact, _: f"all workers of node {fact.node_id} succeeded in round {fact.round}",
    "exit_barrier_passed": lambda fact, settings: (
        f"exit barrier of round {fact.round} over after {settings.exit_barrier_timeout:g} s: "
        "nodes whose workers succeeded no longer wait for the others"
    ),
    "restart_requested": lambda fact, _: (
        f"an operator requested a restart of round {fact.round}: {fact.reason}"
    ),
    "round_ended": _round_ended,
    "run_closed": _run_closed,
}

# A kind is named after the fact.
_KINDS = {which: pb.EventKind.Value(f"EVENT_KIND_{which.upper()}") for which in _SENTENCES}


def _workers(fact: facts.RoundFrozen) -> int:
    return sum(seat.local_world_size for seat in fact.seats)


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


# ---- Filters of events.


# Entries of each list of a filter. A run has more nodes than that; a client that wants most of them sends no filter.
_MOST_ENTRIES = 1_000
# Year 1 to year 9999, as google.protobuf.Timestamp has it, unix seconds.
_TIMES = range(-62_135_596_800, 253_402_300_800)

_Time = tuple[int, int]  # seconds, nanoseconds


@dataclass(frozen=True, slots=True)
class EventFilter:
    """A filter, checked. Empty sets and None mean any."""

    node_ids: frozenset[str] = frozenset()
    kinds: frozenset[int] = frozenset()
    rounds: frozenset[int] = frozenset()
    since: _Time | None = None
    until: _Time | None = None

    def matches(self, record: DecodedRecord) -> bool:
        """Return True if the event of a record passes the filter."""
        time = (record.time.seconds, record.time.nanos)
        if self.since is not None and time < self.since:
            return False
        if self.until is not None and time >= self.until:
            return False
        if not (self.node_ids or self.kinds or self.rounds):
            return True
        node_id, round_ = record.subject()
        return (
            (not self.node_ids or node_id in self.node_ids)
            and (not self.kinds or _KINDS[record.fact_name] in self.kinds)
            and (not self.rounds or round_ in self.rounds)
        )


def check_entries(
    field: str, values: Collection[Any], check_entry: Callable[[str, Any], None] | None = None
) -> None:
    """Check the length of a list of a filter, and each entry.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    if len(values) > _MOST_ENTRIES:
        raise invalid(field, f"must have at most {_MOST_ENTRIES} entries, not {len(values)}")
    if check_entry is not None:
        with EveryField() as check:
            for value in values:
                check(check_entry, field, value)


def parse_filter(message: pb.EventFilter) -> EventFilter:
    """Return a filter of a request after checks.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    with EveryField() as check:
        check(check_entries, "filter.node_ids", message.node_ids, name)
        check(check_entries, "filter.kinds", message.kinds, _check_kind)
        check(check_entries, "filter.rounds", message.rounds, functools.partial(count, least=1))
        since = check(_time, "since", message.since) if message.HasField("since") else None
        until = check(_time, "until", message.until) if message.HasField("until") else None
    if since is not None and until is not None and since > until:
        raise invalid("filter.since", "must not be after filter.until")
    return EventFilter(
        frozenset(message.node_ids), frozenset(message.kinds), frozenset(message.rounds), since, until
    )


def _check_kind(field: str, kind: int) -> None:
    if kind == pb.EVENT_KIND_UNSPECIFIED or kind not in pb.EventKind.values():
        raise invalid(field, f"there is no event kind {kind}")


def _time(field: str, stamp: Timestamp) -> _Time:
    if stamp.seconds not in _TIMES or not 0 <= stamp.nanos < 10**9:
        raise invalid(
            f"filter.{field}", f"is no time: {stamp.seconds} s and {stamp.nanos} ns, expected years 1 to 9999"
        )
    return stamp.seconds, stamp.nanos
