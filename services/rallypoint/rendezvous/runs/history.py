"""The last events of a run, for people: the content of ListEvents and WatchEvents."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import singledispatch
from itertools import islice
from typing import Any

from rallypoint.rendezvous.base.cooperative import Work, finish
from rallypoint.rendezvous.base.limits import KeptEvents
from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.journal.journal import Record
from rallypoint.rpc.logs import get_logger

# Past the bound, the sum is reduced to this share of it: the search for the largest must not come often.
_ROOM = 0.9


class Histories:
    """The histories of the runs of a service, within one bound."""

    def __init__(
        self, most_events: int, most_bytes: int, most_bytes_together: int, kept: KeptEvents | None = None
    ) -> None:
        """The first two bound each history, the third the sum over all in `kept`; None: over the new ones alone."""
        self._most_events = most_events
        self._most_bytes = most_bytes
        self._most_bytes_together = most_bytes_together
        self._kept = kept or KeptEvents()

    @property
    def bytes(self) -> int:
        """Bytes of all histories together."""
        return self._kept.bytes

    def open(self, apart: KeptEvents | None = None) -> History:
        """Return a new history, counted until it is cleared: with the others, or in `apart` until `take_in`."""
        return History(self._most_events, self._most_bytes, self._kept if apart is None else apart)

    def take_in(self, history: History) -> None:
        """Count a history with the others that was not counted yet, or apart."""
        history.count_in(self._kept)

    def keep_within(self) -> None:
        """If the sum is past its bound, halve the largest histories, so that a short one stays whole."""
        if self.bytes > self._most_bytes_together:
            finish(self.make_room())

    def make_room(self, apart: KeptEvents | None = None) -> Work[None]:
        """As `keep_within`, as cooperative work; makes room for those in `apart` too."""
        all_kept = [self._kept] if apart is None else [self._kept, apart]

        def past(bound: float) -> bool:
            return sum(kept.bytes for kept in all_kept) > bound

        if not past(self._most_bytes_together):
            return
        histories = [history for kept in all_kept for history in kept.histories]
        for history in sorted(histories, key=lambda each: each.bytes, reverse=True):
            if not past(self._most_bytes_together * _ROOM):
                return
            history.shorten(history.bytes // 2)
            yield


class History:
    """The durable records of a run, as many of the last ones as its bounds allow."""

    def __init__(self, most_events: int, most_bytes: int, kept: KeptEvents | None = None) -> None:
        """Keep at most `most_events` and `most_bytes`, counted in `kept`; the last event is always kept."""
        self._most_events = most_events
        self._most_bytes = most_bytes
        self._records: deque[Record] = deque()
        self._kept = kept or KeptEvents()
        self._kept.histories.add(self)
        self.bytes = 0

    @property
    def oldest(self) -> int:
        """Revision of the oldest event that is kept; 0: none is."""
        return self._records[0].revision if self._records else 0

    @property
    def latest(self) -> int:
        """Revision of the latest event; 0: there is none."""
        return self._records[-1].revision if self._records else 0

    def add(self, record: Record) -> None:
        """Add the next record, which is durable; drop the oldest past the bounds."""
        self._records.append(record)
        self._count(len(record.content))
        while len(self._records) > self._most_events:
            self._drop_oldest()
        self.shorten(self._most_bytes)

    def shorten(self, most_bytes: int) -> None:
        """Drop the oldest events past so many bytes; the last one stays."""
        while self.bytes > most_bytes and len(self._records) > 1:
            self._drop_oldest()

    def clear(self) -> None:
        """Drop them all."""
        while self._records:
            self._drop_oldest()

    def leave_count(self) -> None:
        """Count in a counter of its own from now on."""
        self.count_in(KeptEvents())

    def count_in(self, kept: KeptEvents) -> None:
        """Count in `kept` from now on, and no longer in the counter before."""
        self._kept.bytes -= self.bytes
        self._kept.histories.discard(self)
        self._kept = kept
        kept.bytes += self.bytes
        kept.histories.add(self)

    def _drop_oldest(self) -> None:
        self._count(-len(self._records.popleft().content))

    def _count(self, more: int) -> None:
        self.bytes += more
        self._kept.bytes += more

    def after(self, revision: int, count: int) -> list[Record]:
        """Return the first `count` kept events after a revision."""
        start = max(0, revision + 1 - self.oldest)
        # From the nearer end: a deque finds elements in its middle by walking.
        if start > len(self._records) // 2:
            tail = list(islice(reversed(self._records), max(0, len(self._records) - start)))
            return tail[::-1][:count]
        return list(islice(self._records, start, start + count))

    def before(self, revision: int) -> Iterator[Record]:
        """Return events before a revision, the newest first; invalid once `add` was called."""
        return islice(reversed(self._records), max(0, self.latest + 1 - revision), None)


# ---- Facts as log lines for operators.


_log = get_logger("rallypoint.rendezvous")


# In a run of more nodes than this, routine facts of every node in every round are logged as debug only: n lines a round
# hide the one that matters, and writing them costs the server as much as the joining. ListEvents has them all.
_MANY_NODES = 16
_ROUTINE = (facts.NodeJoined, facts.NodeConfirmed, facts.NodeSucceeded)


def log_fact(run_id: str, fact: facts.Fact, nodes: int) -> None:
    """Log a fact that became durable; `nodes`: the present number of nodes of the run."""
    routine = nodes > _MANY_NODES and isinstance(fact, _ROUTINE)
    if routine and not _log.debugging:
        return
    log = _log.debug if routine else _log.info
    event, fields = _describe(fact)
    log(event, run_id=run_id, **fields)


@singledispatch
def _describe(fact: facts.Fact) -> tuple[str, dict[str, Any]]:
    raise TypeError(f"not a fact: {fact!r}")


@_describe.register
def _(fact: facts.RunCreated) -> tuple[str, dict[str, Any]]:
    return "run created", {"min_nodes": fact.settings.min_nodes, "max_nodes": fact.settings.max_nodes}


@_describe.register
def _(fact: facts.NodeJoined) -> tuple[str, dict[str, Any]]:
    return "node joined", {"node_id": fact.node_id, "lease": fact.lease, "workers": fact.local_world_size}


@_describe.register
def _(fact: facts.NodeLost) -> tuple[str, dict[str, Any]]:
    return "node lost", {"node_id": fact.node_id, "reason": fact.reason.name}


@_describe.register
def _(fact: facts.NodeLeft) -> tuple[str, dict[str, Any]]:
    return "node left", {"node_id": fact.node_id, "reason": fact.reason}


@_describe.register
def _(fact: facts.NodeDeparting) -> tuple[str, dict[str, Any]]:
    return "node departing", {"node_id": fact.node_id, "reason": fact.reason}


@_describe.register
def _(fact: facts.NodeEvicted) -> tuple[str, dict[str, Any]]:
    by = "service" if fact.by_service else "operator"
    return "node evicted", {"node_id": fact.node_id, "by": by, "reason": fact.reason}


@_describe.register
def _(fact: facts.NodeReadmitted) -> tuple[str, dict[str, Any]]:
    return "node readmitted", {"node_id": fact.node_id, "reason": fact.reason}


@_describe.register
def _(fact: facts.RestartRequested) -> tuple[str, dict[str, Any]]:
    return "restart requested", {"round": fact.round, "reason": fact.reason}


@_describe.register
def _(fact: facts.ExitBarrierPassed) -> tuple[str, dict[str, Any]]:
    return "exit barrier passed", {"round": fact.round}


@_describe.register
def _(fact: facts.RoundFrozen) -> tuple[str, dict[str, Any]]:
    workers = sum(seat.local_world_size for seat in fact.seats)
    return "round frozen", {"round": fact.round, "nodes": len(fact.seats), "workers": workers}


@_describe.register
def _(fact: facts.NodeConfirmed) -> tuple[str, dict[str, Any]]:
    return "node confirmed", {"round": fact.round, "node_id": fact.node_id}


@_describe.register
def _(fact: facts.RoundFinalized) -> tuple[str, dict[str, Any]]:
    return "round final", {"round": fact.round}


@_describe.register
def _(fact: facts.RoundStarted) -> tuple[str, dict[str, Any]]:
    fields = {"round": fact.round, "nodes": fact.group_world_size, "reported": fact.reported_nodes}
    return "round started", fields | {"seconds": round(fact.duration, 3), "slowest": fact.slowest}


@_describe.register
def _(fact: facts.WorkerFailed) -> tuple[str, dict[str, Any]]:
    failure = fact.failure
    return "worker failed", {
        "node_id": failure.node_id,
        "rank": failure.rank,
        "message": failure.message,
        "earliest": fact.earliest,
    }


@_describe.register
def _(fact: facts.NodeSucceeded) -> tuple[str, dict[str, Any]]:
    return "node succeeded", {"round": fact.round, "node_id": fact.node_id}


@_describe.register
def _(fact: facts.RoundEnded) -> tuple[str, dict[str, Any]]:
    end = fact.end
    return "round ended", {"round": end.round, "reason": end.detail, "restart_count": fact.restart_count}


@_describe.register
def _(fact: facts.RunClosed) -> tuple[str, dict[str, Any]]:
    return "run closed", {"outcome": fact.end.outcome.name, "reason": fact.end.detail}
