"""State of one run's spaces, and decisions on a batch of writes. Pure: no clock, no I/O.

Writes are decided in batches against a `RunDraft`, a view of the spaces after the batch. The caller makes the draft's
entries durable and only then applies its steps, so readers see durable state at any time; if the journal fails, the
draft is dropped without effect.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from rallypoint.rendezvous.base.entries import RESERVED, Operation, OperationRecord, StoreChange
from rallypoint.rendezvous.base.limits import StoreLimits
from rallypoint.rendezvous.base.refusals import RoundNotBegun, RunStoreFull, StoresFull, TooManyKeys
from rallypoint.rendezvous.core.commands import RoundOver

# ---- Keys in order, so that a page of them costs the page and not all keys.


# Moving this many pointers takes well under a microsecond, and a million keys have at most this many parts.
_PART = 1_000


class SortedKeys:
    """A set of keys in the order of their Unicode code points.

    Kept in parts of bounded length. In a single list, each new key would move all that follow it; sorting on request
    would block the process for a second with a million keys.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        ordered = sorted(keys)
        self._parts = [ordered[start : start + _PART] for start in range(0, len(ordered), _PART)]
        self._lasts = [part[-1] for part in self._parts]

    def add(self, key: str) -> None:
        """Add a key that is not in the set."""
        if not self._parts:
            self._parts.append([key])
            self._lasts.append(key)
            return
        index = min(bisect_left(self._lasts, key), len(self._parts) - 1)
        part = self._parts[index]
        insort(part, key)
        self._lasts[index] = part[-1]
        if len(part) > 2 * _PART:
            self._parts[index : index + 1] = part[:_PART], part[_PART:]
            self._lasts.insert(index, part[_PART - 1])

    def remove(self, key: str) -> None:
        """Remove a key that is in the set."""
        index = bisect_left(self._lasts, key)
        part = self._parts[index]
        del part[bisect_left(part, key)]
        if part:
            self._lasts[index] = part[-1]
        else:
            del self._parts[index], self._lasts[index]

    def page(self, prefix: str, after: str, count: int) -> list[str]:
        """Return the first `count` keys that begin with `prefix` and come after `after`."""
        # Keys with one prefix are neighbours, after everything smaller than the prefix itself.
        candidates = self._from(after, bisect_right) if after >= prefix else self._from(prefix, bisect_left)
        return list(islice(takewhile(lambda key: key.startswith(prefix), candidates), count))

    def _from(self, start: str, bisect: Callable[[list[str], str], int]) -> Iterator[str]:
        first = bisect(self._lasts, start)
        for index in range(first, len(self._parts)):
            part = self._parts[index]
            yield from islice(part, bisect(part, start) if index == first else 0, None)


# Memory of an entry besides its bytes: its objects and its slot in the dict.
ENTRY_OVERHEAD_BYTES = 128


@dataclass(slots=True)
class RoundSpace:
    """The entries of the run itself (round 0) or of one round.

    Attributes:
        values: Values by key.
        keys: The keys of `values` in order.
        used_bytes: Bytes of `values`, with overhead. Records of operations don't count: their number is bounded,
            and a full store must still accept deletions.
    """

    values: dict[str, bytes] = field(default_factory=dict)
    keys: SortedKeys = field(default_factory=SortedKeys)
    used_bytes: int = 0

    def put(self, key: str, value: bytes | None) -> None:
        """Set a key, or delete it with None."""
        before = self.values.get(key)
        self.used_bytes += entry_bytes(key, value) - entry_bytes(key, before)
        if value is not None:
            self.values[key] = value
            if before is None:
                self.keys.add(key)
        elif before is not None:
            del self.values[key]
            self.keys.remove(key)

    def names(self) -> Iterator[str]:
        """Empty the space, step by step; yield its former keys.

        Releasing a million entries at once takes a good part of a second.
        """
        self.keys = SortedKeys()
        while self.values:
            yield self.values.popitem()[0]


def entry_bytes(key: str, value: bytes | None) -> int:
    """Return the size of an entry for the limits; 0 if it is absent."""
    if value is None:
        return 0
    key_bytes = len(key) if key.isascii() else len(key.encode())
    return key_bytes + len(value) + ENTRY_OVERHEAD_BYTES


class RunSpaces:
    """The durable spaces of one run, and the last write of each slot.

    A record is kept in the journal beside the write itself, in the space that the write changed; each slot has one. It
    belongs to the run and outlives the space, so that a write repeated after the end of its round gets its result; and
    it refuses a late write, for any space.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.oldest_round = 0
        self.stamp = 0
        self._spaces: dict[int, RoundSpace] = {}
        # By record key, the least recently used first.
        self._operations: dict[str, OperationRecord] = {}
        # Records of slots with a later record in another space: earlier versions kept one for each space.
        self._outdated: list[StoreChange] = []

    @classmethod
    def restore(cls, run_id: str, entries: Iterable[StoreChange]) -> Generator[None, None, RunSpaces]:
        """Build the spaces from a journal's entries, in the order of appending or one per key.

        In small steps (see `cooperative.Work`), except for the sorting of keys: for a million keys in order, as most
        journals return them, that takes some 50 ms.

        Raises:
            ValueError: An entry can't be read by this version.
        """
        run = cls(run_id)
        contents: dict[tuple[int, str], bytes | None] = {}
        for entry in entries:
            contents[entry.round, entry.key] = entry.value
            yield
        for (round, key), value in contents.items():
            if value is None:
                continue
            if key.startswith(RESERVED):
                run._restore_record(key, OperationRecord.decode(value, round))
            else:
                space = run._spaces.setdefault(round, RoundSpace())
                space.values[key] = value
                space.used_bytes += entry_bytes(key, value)
            yield
        for space in run._spaces.values():
            space.keys = SortedKeys(space.values)
            yield
        # A journal that keeps one row per key does not keep the order of use; the stamps do.
        run._operations = dict(sorted(run._operations.items(), key=lambda item: item[1].stamp))
        run.stamp = max((record.stamp for record in run._operations.values()), default=0)
        return run

    def _restore_record(self, key: str, record: OperationRecord) -> None:
        other = self._operations.get(key)
        if other is not None:
            # The later write counts, as if the slot had moved on from the other's space.
            earlier, record = sorted((other, record), key=lambda each: (each.sequence, each.stamp))
            self._outdated.append(StoreChange(self.run_id, earlier.round, key, None))
        self._operations[key] = record

    def outdated(self) -> list[StoreChange]:
        """Return, once, the deletions of records that `restore` found and that no longer count."""
        outdated, self._outdated = self._outdated, []
        return outdated

    @property
    def used_bytes(self) -> int:
        """Bytes that count towards the run's limit."""
        return sum(space.used_bytes for space in self._spaces.values())

    @property
    def is_empty(self) -> bool:
        """True if there is no entry, neither a value nor a record."""
        return not self._spaces and not self._operations

    @property
    def used_keys(self) -> int:
        """Keys that count towards the run's limit."""
        return sum(len(space.values) for space in self._spaces.values())

    @property
    def rounds(self) -> list[int]:
        """The rounds whose spaces are not empty."""
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
        return [] if space is None else space.keys.page(prefix, after, count)

    @property
    def operations(self) -> Mapping[str, OperationRecord]:
        """The last write of each slot by its record key, the one used longest ago first."""
        return self._operations

    def check_round(self, round: int, current_round: int) -> None:
        """Check that a round is the current one; 0, the run's own space, is always valid.

        Raises:
            RoundOver: It has ended.
            RoundNotBegun: There was no such round yet.
        """
        if round == 0:
            return
        # A dropped round is over even if this caller is behind the caller of `forget_rounds_before`.
        current = max(current_round, self.oldest_round)
        if round < current:
            raise RoundOver(self.run_id, round, current)
        if round > current:
            raise RoundNotBegun(self.run_id, round, current)

    def apply(self, change: StoreChange) -> None:
        """Apply a durable change. A value of a space that was dropped meanwhile is lost with it."""
        if change.key.startswith(RESERVED):
            self._apply_record(change)
            return
        if 0 < change.round < self.oldest_round:
            return
        space = self._spaces.get(change.round)
        if space is None:
            if change.value is None:
                return
            space = self._spaces[change.round] = RoundSpace()
        space.put(change.key, change.value)
        if not space.values:
            del self._spaces[change.round]

    def _apply_record(self, change: StoreChange) -> None:
        if change.value is not None:
            self._operations.pop(change.key, None)  # not just replaced: the latest used goes to the end
            record = self._operations[change.key] = OperationRecord.decode(change.value, change.round)
            self.stamp = max(self.stamp, record.stamp)
        elif self._has_record(change.round, change.key):
            del self._operations[change.key]

    def _has_record(self, round: int, key: str) -> bool:
        record = self._operations.get(key)
        return record is not None and record.round == round

    def holds(self, round: int, key: str) -> bool:
        """Return True if there is an entry, a value or a record."""
        return self.value(round, key) is not None or self._has_record(round, key)

    def forget_rounds_before(self, round: int) -> Iterator[StoreChange]:
        """Drop the spaces of all rounds before `round`; return the deletions for the journal, one by one.

        Records stay: their writes may be repeated.
        """
        self.oldest_round = max(self.oldest_round, round)
        rounds = [old for old in self.rounds if 0 < old < self.oldest_round]
        return self._emptied({old: self._spaces.pop(old) for old in rounds})

    def forget(self) -> Iterator[StoreChange]:
        """Drop all spaces and records; return the deletions for the journal, one by one."""
        spaces, self._spaces = self._spaces, {}
        operations, self._operations = self._operations, {}
        return self._emptied(spaces, operations)

    def _emptied(
        self, spaces: Mapping[int, RoundSpace], operations: dict[str, OperationRecord] | None = None
    ) -> Iterator[StoreChange]:
        for round, space in spaces.items():
            for key in space.names():
                yield StoreChange(self.run_id, round, key, None)
        while operations:
            key, record = operations.popitem()
            yield StoreChange(self.run_id, record.round, key, None)


@dataclass(frozen=True, slots=True)
class Room:
    """A bound of the bytes of several runs: `others` are those of all but one; `client`: whose runs, empty: all."""

    limit: int
    others: int
    client: str = ""


class RunDraft:
    """A run's spaces after a batch of writes.

    Attributes:
        changed_entries: Number of entries set or deleted by the writes decided so far.
        changed_bytes: Bytes of these, with overhead; an entry that was set twice counts twice.
    """

    def __init__(self, run: RunSpaces, limits: StoreLimits, rooms: Sequence[Room] = ()) -> None:
        """Begin with the present spaces; `rooms`: the bounds that the run shares with others."""
        self._run = run
        self._limits = limits
        self._rooms = rooms
        self._values: dict[tuple[int, str], StoreChange] = {}
        self._records: dict[str, OperationRecord] = {}
        self._used_bytes = run.used_bytes
        self._used_keys = run.used_keys
        self._stamp = run.stamp
        self._steps: list[Sequence[StoreChange]] = []
        self.changed_entries = 0
        self.changed_bytes = 0

    @property
    def run(self) -> RunSpaces:
        """The present spaces."""
        return self._run

    @property
    def used_bytes(self) -> int:
        """Bytes that count towards the limits, after the writes decided so far."""
        return self._used_bytes

    def value(self, round: int, key: str) -> bytes | None:
        """Return the value of a key, after the writes decided so far; None: it is absent."""
        drafted = self._values.get((round, key))
        return self._run.value(round, key) if drafted is None else drafted.value

    def put(self, round: int, values: Mapping[str, bytes | None]) -> None:
        """Set keys, or delete them with None: all of them, or none if this raises.

        Raises:
            RunStoreFull, TooManyKeys, StoresFull: The run, or several together, would exceed a limit. A write that
                doesn't grow it is never refused.
        """
        run_id, limits = self._run.run_id, self._limits
        more_bytes = more_keys = changed_bytes = 0
        for key, value in values.items():
            before = self.value(round, key)
            size = entry_bytes(key, value)
            changed_bytes += size
            more_bytes += size - entry_bytes(key, before)
            more_keys += (value is not None) - (before is not None)
        used_bytes, used_keys = self._used_bytes + more_bytes, self._used_keys + more_keys
        if more_bytes > 0 and used_bytes > limits.run_bytes:
            raise RunStoreFull(run_id, next(iter(values)), used_bytes, limits.run_bytes)
        for room in self._rooms:
            if more_bytes > 0 and used_bytes + room.others > room.limit:
                raise StoresFull(run_id, self._used_bytes + room.others, room.limit, room.client)
        if more_keys > 0 and used_keys > limits.run_keys:
            raise TooManyKeys(run_id, next(iter(values)), limits.run_keys)
        self._used_bytes, self._used_keys = used_bytes, used_keys
        step = [StoreChange(run_id, round, key, value) for key, value in values.items()]
        self._values.update({(round, change.key): change for change in step})
        self._steps.append(step)
        self.changed_entries += len(step)
        self.changed_bytes += changed_bytes

    def record(self, operation: Operation) -> OperationRecord | None:
        """Return the record of the operation's slot, after the writes decided so far."""
        key = operation.record_key
        return self._records.get(key) or self._run.operations.get(key)

    def remember(self, round: int, operation: Operation, fingerprint: int, result: int) -> None:
        """Record a write, replacing the previous one of its slot."""
        self._stamp += 1
        record = OperationRecord(operation.sequence, self._stamp, fingerprint, result, round)
        self._records.pop(operation.record_key, None)  # the latest used goes to the end
        self._records[operation.record_key] = record

    def steps(self) -> list[Sequence[StoreChange]]:
        """Return the changes of values write by write, for the waiting requests: a write becomes visible as a whole."""
        return self._steps

    def values(self) -> list[StoreChange]:
        """Return the final values, each key once, to be made durable."""
        return list(self._values.values())

    def records(self) -> list[StoreChange]:
        """Return the records of the batch, and deletions of those they replace, also to be made durable."""
        run_id, kept = self._run.run_id, self._run.operations
        new = [
            StoreChange(run_id, record.round, key, record.encode()) for key, record in self._records.items()
        ]
        # A slot that moved on to another space has its record there.
        moved = [
            (key, kept[key].round)
            for key, record in self._records.items()
            if key in kept and kept[key].round != record.round
        ]
        ended = [*moved, *((key, kept[key].round) for key in self._evicted())]
        return new + [StoreChange(run_id, round, key, None) for key, round in ended]

    def _evicted(self) -> list[str]:
        kept = self._run.operations
        new = sum(1 for key in self._records if key not in kept)
        excess = max(0, len(kept) + new - self._limits.operations)
        unused = (key for key in kept if key not in self._records)
        return list(islice(unused, excess))
