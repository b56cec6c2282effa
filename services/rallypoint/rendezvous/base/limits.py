"""Limits of one service, and of one run in it, so that no run starves another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol
from weakref import WeakSet

from rallypoint.rendezvous.core.commands import Refused


@dataclass(frozen=True, slots=True)
class RendezvousLimits:
    """Limits of a rendezvous service. A request past one is refused, with the time to retry."""

    # Runs at a time, closed ones that have not expired included. An idle run takes some 10 KB.
    runs: int = 10_000
    # Those of them that one client has created: see docs/limits.md.
    runs_per_client: int = 5_000
    # Nodes of a run at a time, spares included. A node takes some 40 KB, most of it for its connection.
    nodes_per_run: int = 16_384
    # Streams of WatchRun and WatchEvents on a run at a time. Each change of a run is sent to all of them.
    subscribers_per_run: int = 1_000
    # Kept events of a run for ListEvents and WatchEvents: the last ones, by number and by bytes; the stricter limit
    # counts. Two rounds of 8,000 nodes have 32,000. They are held in memory.
    events_per_run: int = 50_000
    event_bytes_per_run: int = 16 * 1024 * 1024
    # Bytes of the kept events of all runs together: past it the longest histories are shortened first.
    event_bytes: int = 512 * 1024 * 1024
    # Seconds that a run without nodes is remembered; as long as torch's etcd rendezvous keeps one. Longer lets a
    # job come back later, and keeps more runs.
    run_ttl: float = 7_200.0
    # Messages that a node may send on its stream: so many a second for ever, and so many at once. An agent sends a
    # heartbeat every 5 s, and a few messages when a round changes; one that sends more is broken or hostile, and its
    # stream is ended with TOO_MANY_REQUESTS. A message costs some 50 us, so 200 a second are 1 % of a core.
    messages_per_second: float = 200.0
    message_burst: int = 1_000


@dataclass(eq=False)
class LimitReached(Refused):
    """A limit is reached. `reason` is the error reason for programs; `detail`: who reached it; `remedy`: how to
    make room; `retry_after` in seconds."""

    reason: str
    run_id: str
    detail: str
    remedy: str
    limit: int
    retry_after: float = 5.0

    def __str__(self) -> str:
        return f"{self.detail} (the limit is {self.limit:,}); {self.remedy}"


class EventHistory(Protocol):
    """The kept events of one run."""

    @property
    def bytes(self) -> int:
        """Bytes of all events."""

    def shorten(self, most_bytes: int) -> None:
        """Drop the oldest events, until at most `most_bytes` are kept."""


@dataclass(slots=True)
class KeptEvents:
    """A group of histories with a common limit, and the bytes of all of them."""

    bytes: int = 0
    histories: WeakSet[EventHistory] = field(default_factory=WeakSet)


# ---- Totals over all shards of a process, because the limits of a service apply to the whole process.


@dataclass(slots=True)
class SharedTotal:
    """A sum to which several quotas add."""

    used: int = 0


class ClientTotals:
    """A sum for each client that uses something; the client "" is unknown, and not counted."""

    def __init__(self) -> None:
        """Start without a client."""
        self._used: dict[str, int] = {}

    def used(self, client: str) -> int:
        """The sum of a client."""
        return self._used.get(client, 0)

    def add(self, client: str, more: int) -> None:
        """Add to the sum of a client; negative to subtract."""
        if client:
            self._used[client] = self.used(client) + more
            if not self._used[client]:
                del self._used[client]


class Quota:
    """One shard's part of a total."""

    __slots__ = ("_total", "own")

    def __init__(self, total: SharedTotal | None = None) -> None:
        """Start at 0; without a `total`, with one of its own."""
        self._total = total or SharedTotal()
        self.own = 0

    @property
    def together(self) -> int:
        """The whole total."""
        return self._total.used

    @property
    def others(self) -> int:
        """The total without the own part."""
        return self._total.used - self.own

    def add(self, more: int) -> None:
        """Add to the own part; negative to subtract."""
        self.own += more
        self._total.used += more

    def release(self) -> None:
        """Set the own part to 0."""
        self.add(-self.own)


@dataclass(slots=True)
class SharedTotals:
    """The totals of the shards of one process.

    Attributes:
        runs: Runs.
        runs_by_client: Runs that each client has created since the process began to serve them.
        events: The kept events.
        store_bytes: Bytes of the stores of all runs.
        store_bytes_by_client: Bytes of the stores of the runs in `runs_by_client`.
        states: Runs that have a fenced state.
        states_by_client: Those that each client has created since the process began to serve them.
        state_bytes: Bytes of `states`.
        state_bytes_by_client: Bytes of those in `states_by_client`.
        state_queued_bytes: Bytes of sets that wait for a commit to begin.
        state_watchers: Open watches of fenced states.
    """

    runs: SharedTotal = field(default_factory=SharedTotal)
    runs_by_client: ClientTotals = field(default_factory=ClientTotals)
    events: KeptEvents = field(default_factory=KeptEvents)
    store_bytes: SharedTotal = field(default_factory=SharedTotal)
    store_bytes_by_client: ClientTotals = field(default_factory=ClientTotals)
    states: SharedTotal = field(default_factory=SharedTotal)
    states_by_client: ClientTotals = field(default_factory=ClientTotals)
    state_bytes: SharedTotal = field(default_factory=SharedTotal)
    state_bytes_by_client: ClientTotals = field(default_factory=ClientTotals)
    state_queued_bytes: SharedTotal = field(default_factory=SharedTotal)
    state_watchers: SharedTotal = field(default_factory=SharedTotal)


# ---- Limits of one run in a store that serves many.


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of one run's store, and of all together.

    Attributes:
        all_bytes: Most bytes of the stores of all runs. Default 2 GiB. Without it, a client that may create runs could
            fill the memory and the journal of the process with the stores of a few.
        client_bytes: Most bytes of the stores of all runs that one client has created. Default 1 GiB: a client leaves
            as much for all others.
        run_bytes: Most bytes of keys and values of all its spaces, 128 per entry included. Default 256 MiB. All
            of it is held in memory, and once more in the journal.
        run_keys: Most keys of all its spaces. Default 1,000,000. The overhead of a key is counted in
            `run_bytes`; this bounds how long the store takes to read them all at its start, about 4 s.
        waiters: Most requests that wait for keys at the same time. Default 100,000. Each takes about 1 KiB here,
            and is an open call besides.
        waited_keys: Most keys that these wait for, a key counted once for each that waits for it. Default
            2,000,000, about 200 MiB: room for 1,024 nodes that each wait for a key of every other.
        queued_bytes: Most bytes of writes that wait for a commit to begin. Default 64 MiB: sixteen of the
            largest values. More of it lets a slow disk hold more memory; less refuses bursts (STORE_BUSY).
        batch_bytes: Bytes after which a commit takes no further write. Default 8 MiB. One write more than these
            always fits, so the largest does. Runs take turns commit by commit: more of it makes each of them
            wait longer for the others, less costs a run that writes much.
        batch_entries: Writes, and entries changed by them, after which a commit takes no further write. Default
            1,000: about 10 ms in which the process does nothing else.
        operations: Most (client, slot) pairs of one run whose last write is remembered, so that repeating
            it is harmless. Default 65,536, about 16 MiB; more than any run has agents times concurrent writes.
    """

    all_bytes: int = 2 * 1024 * 1024 * 1024
    client_bytes: int = 1024 * 1024 * 1024
    run_bytes: int = 256 * 1024 * 1024
    run_keys: int = 1_000_000
    waiters: int = 100_000
    waited_keys: int = 2_000_000
    queued_bytes: int = 64 * 1024 * 1024
    batch_bytes: int = 8 * 1024 * 1024
    batch_entries: int = 1_000
    operations: int = 65_536


# ---- Limits of fenced states, and all limits together.


# Seconds; as long as torch's etcd rendezvous keeps its state. A shorter time frees memory sooner, but a job whose nodes
# are silent for longer loses its state and must start again.
STATE_TTL = 7_200.0


@dataclass(frozen=True, slots=True)
class StateLimits:
    """Bounds of one service.

    Attributes:
        states: Most runs that have a state. Default 10,000.
        states_per_client: Most of them that one client has created. Default 5,000: a client leaves as many for all
            others.
        state_bytes: Most bytes of all states, with `STATE_OVERHEAD_BYTES` for each and `OPERATION_BYTES` for each
            recorded operation. Default 1 GiB. All of it is held in memory, and once more in the journal.
        client_bytes: Most bytes of the states that one client has created. Default 512 MiB.
        operations: Most (client, slot) pairs of one run whose last set is recorded, so that repeating it is harmless.
            Default 4,096: more nodes than are likely to set the state of one run between an attempt and its repetition.
            Each set of a run copies this many references.
        queued_bytes: Most bytes of sets that wait for a commit to begin. Default 64 MiB: sixteen of the largest states.
            More lets a slow disk hold more memory; less refuses bursts (STATE_BUSY).
        watchers: Most open watches. Default 10,000. Each costs a stream, about 40 KB.
    """

    states: int = 10_000
    states_per_client: int = 5_000
    state_bytes: int = 1024 * 1024 * 1024
    client_bytes: int = 512 * 1024 * 1024
    operations: int = 4_096
    queued_bytes: int = 64 * 1024 * 1024
    watchers: int = 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a rendezvous service, with the defaults of each part.

    Attributes:
        rendezvous: Limits of the service and of each run.
        store: Limits of the store of each run.
        state: Limits of fenced states.
        state_ttl: Seconds that a fenced state is kept without being read, set or watched.
    """

    rendezvous: RendezvousLimits = field(default_factory=RendezvousLimits)
    store: StoreLimits = field(default_factory=StoreLimits)
    state: StateLimits = field(default_factory=StateLimits)
    state_ttl: float = STATE_TTL


# A commit on etcd is one transaction as long as it has at most 100 operations and about 1 MiB: with more it takes three
# or more, one after the other.
ETCD_BATCH_BYTES = 1024 * 1024
ETCD_BATCH_ENTRIES = 100


def on_etcd(limits: StoreLimits) -> StoreLimits:
    """Return the limits for a journal in etcd: usual commits fit into one of its transactions."""
    return replace(
        limits,
        batch_bytes=min(limits.batch_bytes, ETCD_BATCH_BYTES),
        batch_entries=min(limits.batch_entries, ETCD_BATCH_ENTRIES),
    )


# ---- Sizes that the contract fixes (store_service.proto). All of them follow from the size of one message.


MAX_KEY_BYTES = 1024
# A gRPC message has 4 MiB by default; 16 KiB of them for the key, the names and the framing around a value.
MAX_VALUE_BYTES = 4 * 1024 * 1024 - 16 * 1024
# Bytes of several keys and values together, each pair counted with its framing: three tags and three
# lengths take up to 13 bytes. Above the largest value with the longest key, so that one pair always fits; the
# remaining 8 KiB hold the names of the run, the node and the operation.
MAX_MULTI_BYTES = 4 * 1024 * 1024 - 8 * 1024
FRAME_BYTES = 16
MAX_KEYS = 10_000
# This many of the longest keys are 2 MiB: they fit into one response.
MAX_PAGE_SIZE = 2_000
