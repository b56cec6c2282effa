"""Which events somebody wants."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from rallypoint.rendezvous.events import subject_of
from rallypoint.rendezvous.v1 import journal_pb2
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.errors import invalid
from rallypoint.serving.requests import name

# Entries of each list of a filter. A run has more nodes than that; who wants most of them leaves the filter out.
_MOST_ENTRIES = 1_000
# Year 1 to year 9999, as google.protobuf.Timestamp has it, unix seconds.
_TIMES = range(-62_135_596_800, 253_402_300_800)

_Time = tuple[int, int]  # seconds, nanoseconds


@dataclass(frozen=True, slots=True)
class Wanted:
    """A filter, checked. Empty sets and None mean any."""

    node_ids: frozenset[str] = frozenset()
    kinds: frozenset[int] = frozenset()
    rounds: frozenset[int] = frozenset()
    since: _Time | None = None
    until: _Time | None = None

    def matches(self, record: journal_pb2.JournalRecord) -> bool:
        """Whether the event of a record is wanted."""
        time = (record.time.seconds, record.time.nanos)
        if self.since is not None and time < self.since:
            return False
        if self.until is not None and time >= self.until:
            return False
        if not (self.node_ids or self.kinds or self.rounds):
            return True
        subject = subject_of(record)
        return (
            (not self.node_ids or subject.node_id in self.node_ids)
            and (not self.kinds or subject.kind in self.kinds)
            and (not self.rounds or subject.round in self.rounds)
        )


def wanted(message: pb.EventFilter) -> Wanted:
    """A filter of a request, checked.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    for field, values in (
        ("node_ids", message.node_ids),
        ("kinds", message.kinds),
        ("rounds", message.rounds),
    ):
        if len(values) > _MOST_ENTRIES:
            raise invalid(f"filter.{field}", f"must have at most {_MOST_ENTRIES} entries, not {len(values)}")
    for node_id in message.node_ids:
        name("filter.node_ids", node_id)
    for kind in message.kinds:
        if kind == pb.EVENT_KIND_UNSPECIFIED or kind not in pb.EventKind.values():
            raise invalid("filter.kinds", f"there is no event kind {kind}")
    for round_ in message.rounds:
        if round_ < 1:
            raise invalid("filter.rounds", f"rounds are numbered from 1; there is no round {round_}")
    since = _time("since", message.since) if message.HasField("since") else None
    until = _time("until", message.until) if message.HasField("until") else None
    if since is not None and until is not None and since > until:
        raise invalid("filter.since", "must not be after filter.until")
    return Wanted(
        frozenset(message.node_ids), frozenset(message.kinds), frozenset(message.rounds), since, until
    )


def _time(field: str, stamp: Timestamp) -> _Time:
    if stamp.seconds not in _TIMES or not 0 <= stamp.nanos < 10**9:
        raise invalid(
            f"filter.{field}", f"is no time: {stamp.seconds} s and {stamp.nanos} ns, expected years 1 to 9999"
        )
    return stamp.seconds, stamp.nanos
