"""State of one run's spaces, and how a batch of writes is decided. Pure: no clock, no I/O.

Writes are decided in batches against a `Draft`, a view of the spaces as they will be. The caller makes the
draft's entries durable and only then applies its steps, so what readers see is durable at any time; if the
journal fails, the draft is thrown away and nothing has happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice

from rallypoint.rendezvous.store.operations import RESERVED, Operation, OperationRecord
from rallypoint.rendezvous.store.ports import StoreChange
from rallypoint.rendezvous.store.refusals import RoundNotBegun, RoundOver, RunStoreFull

# What an entry costs on top of its bytes: the objects and the dict's slot that hold it.
ENTRY_OVERHEAD_BYTES = 128


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of one run's store.

    Attributes:
        run_bytes: Most bytes of keys and values of all its spaces, `ENTRY_OVERHEAD_BYTES` per entry included.
            Default 256 MiB. All of it is held in memory, and once more in the journal.
        queued_bytes: Most bytes of writes that wait for a commit to begin. Default 64 MiB: sixteen of the
            largest values. More of it lets a slow disk hold more memory; less refuses bursts (STORE_BUSY).
        operations: Most (client, slot) pairs of one space whose last write is remembered, so that repeating
            it is harmless. Default 65,536, about 16 MiB; more than any space has agents times concurrent writes.
    """

    run_bytes: int = 256 * 1024 * 1024
    queued_bytes: int = 64 * 1024 * 1024
    operations: int = 65_536


@dataclass(slots=True)
class Space:
    """The entries of the run itself (round 0) or of one round.

    Attributes:
        values: Values by key.
        operations: Last write of each slot by its record key, the one used longest ago first.
        used_bytes: Bytes of `values`, overhead included. Records don't count: they are bounded by number, and
            a full store must still be able to delete.
    """

    values: dict[str, bytes] = field(default_factory=dict)
    operations: dict[str, OperationRecord] = field(default_factory=dict)
    used_bytes: int = 0


def entry_bytes(key: str, value: bytes | None) -> int:
    """Return what an entry counts; an absent one counts nothing."""
    return 0 if value is None else len(key.encode()) + len(value) + ENTRY_OVERHEAD_BYTES


class RunSpaces:
    """The spaces of one run as they are durable."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.oldest_round = 0
        self.stamp = 0
        self._spaces: dict[int, Space] = {}

    @classmethod
    def restore(cls, run_id: str, entries: Iterable[StoreChange]) -> RunSpaces:
        """Build the spaces from a journal's entries, in the order of appending or one per key."""
        run = cls(run_id)
        for entry in entries:
            run.apply(entry)
        # A journal that keeps one row per key doesn't keep the order of use; the stamps do.
        for space in run._spaces.values():
            in_order = sorted(space.operations.items(), key=lambda item: item[1].stamp)
            space.operations = dict(in_order)
        return run

    @property
    def used_bytes(self) -> int:
        """Bytes that count towards the run's limit."""
        return sum(space.used_bytes for space in self._spaces.values())

    @property
    def rounds(self) -> list[int]:
        """The spaces that hold something, by round."""
        return sorted(self._spaces)

    def value(self, round: int, key: str) -> bytes | None:
        """Return the value of a key; None: it is absent."""
        space = self._spaces.get(round)
        return None if space is None else space.values.get(key)

    def missing(self, round: int, keys: Iterable[str]) -> list[str]:
        """Return those of the keys that are absent, in their order."""
        space = self._spaces.get(round)
        return list(keys) if space is None else [key for key in keys if key not in space.values]

    def keys(self, round: int, prefix: str, after: str, count: int) -> list[str]:
        """Return the first `count` keys that begin with `prefix` and come after `after`, by code points."""
        space = self._spaces.get(round)
        if space is None:
            return []
        return nsmallest(count, (key for key in space.values if key > after and key.startswith(prefix)))

    def operations(self, round: int) -> dict[str, OperationRecord]:
        """Return the records of a space, the one used longest ago first. Not to be changed."""
        space = self._spaces.get(round)
        return {} if space is None else space.operations

    def check_round(self, round: int, current_round: int) -> None:
        """Check that a round may be worked in; 0, the run's own space, always may.

        Raises:
            RoundOver: It has ended.
            RoundNotBegun: There was no such round yet.
        """
        if round == 0:
            return
        # What was dropped is over even if the caller of this is behind the caller of `forget_rounds_before`.
        current = max(current_round, self.oldest_round)
        if round < current:
            raise RoundOver(self.run_id, round, current)
        if round > current:
            raise RoundNotBegun(self.run_id, round, current)

    def apply(self, change: StoreChange) -> None:
        """Take over a change that is durable. One to a space that was dropped meanwhile is lost with it."""
        if 0 < change.round < self.oldest_round:
            return
        space = self._spaces.get(change.round)
        if space is None:
            if change.value is None:
                return
            space = self._spaces[change.round] = Space()
        if change.key.startswith(RESERVED):
            self._apply_record(space, change.key, change.value)
        else:
            space.used_bytes -= entry_bytes(change.key, space.values.pop(change.key, None))
            if change.value is not None:
                space.values[change.key] = change.value
                space.used_bytes += entry_bytes(change.key, change.value)
        if not space.values and not space.operations:
            del self._spaces[change.round]

    def _apply_record(self, space: Space, key: str, value: bytes | None) -> None:
        space.operations.pop(key, None)  # and not just replaced: the latest used goes to the end
        if value is not None:
            record = space.operations[key] = OperationRecord.decode(value)
            self.stamp = max(self.stamp, record.stamp)

    def forget_rounds_before(self, round: int) -> list[StoreChange]:
        """Drop the spaces of all rounds before `round`; return what deletes them from a journal."""
        self.oldest_round = max(self.oldest_round, round)
        dropped = {old: self._spaces.pop(old) for old in self.rounds if 0 < old < self.oldest_round}
        return [
            StoreChange(self.run_id, old, key, None)
            for old, space in dropped.items()
            for key in (*space.values, *space.operations)
        ]


class Draft:
    """A run's spaces as a batch of writes will leave them."""

    def __init__(self, run: RunSpaces, limits: StoreLimits) -> None:
        self._run = run
        self._limits = limits
        self._values: dict[tuple[int, str], bytes | None] = {}
        self._records: dict[tuple[int, str], OperationRecord] = {}
        self._used_bytes = run.used_bytes
        self._stamp = run.stamp
        self._steps: list[StoreChange] = []

    @property
    def run(self) -> RunSpaces:
        """The spaces as they are now."""
        return self._run

    def value(self, round: int, key: str) -> bytes | None:
        """Return the value of a key, after the writes decided so far; None: it is absent."""
        if (round, key) in self._values:
            return self._values[round, key]
        return self._run.value(round, key)

    def put(self, round: int, key: str, value: bytes | None) -> None:
        """Set a key, or delete it with None.

        Raises:
            RunStoreFull: The run would grow past its limit. What doesn't grow is never refused.
        """
        growth = entry_bytes(key, value) - entry_bytes(key, self.value(round, key))
        used = self._used_bytes + growth
        if growth > 0 and used > self._limits.run_bytes:
            raise RunStoreFull(self._run.run_id, key, used, self._limits.run_bytes)
        self._used_bytes = used
        self._values[round, key] = value
        self._steps.append(StoreChange(self._run.run_id, round, key, value))

    def record(self, round: int, operation: Operation) -> OperationRecord | None:
        """Return the record of the operation's slot, after the writes decided so far."""
        key = operation.record_key
        drafted = self._records.get((round, key))
        return drafted or self._run.operations(round).get(key)

    def remember(self, round: int, operation: Operation, fingerprint: int, result: int) -> None:
        """Record a write, in the place of the one before in its slot."""
        self._stamp += 1
        record = OperationRecord(operation.sequence, self._stamp, fingerprint, result)
        self._records.pop((round, operation.record_key), None)  # the latest used goes to the end
        self._records[round, operation.record_key] = record

    def steps(self) -> list[StoreChange]:
        """Return every change of a value in the order of the writes: what waiters are told."""
        return self._steps

    def values(self) -> list[StoreChange]:
        """Return the values as they are in the end, each key once: what is to be made durable."""
        run_id = self._run.run_id
        return [StoreChange(run_id, round, key, value) for (round, key), value in self._values.items()]

    def records(self) -> list[StoreChange]:
        """Return the records of the batch, and the end of those that make room: to be made durable as well."""
        run_id = self._run.run_id
        kept = [
            StoreChange(run_id, round, key, record.encode()) for (round, key), record in self._records.items()
        ]
        rounds = {round for round, _ in self._records}
        return kept + [
            StoreChange(run_id, round, key, None) for round in rounds for key in self._evicted(round)
        ]

    def _evicted(self, round: int) -> list[str]:
        kept = self._run.operations(round)
        new = sum(1 for space, key in self._records if space == round and key not in kept)
        excess = max(0, len(kept) + new - self._limits.operations)
        unused = (key for key in kept if (round, key) not in self._records)
        return list(islice(unused, excess))
