"""Convert a group of entries to changes in etcd: keys to put and keys to delete. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rallypoint.etcd.values import Delete, Put, prefix_end
from rallypoint.journal.v1.etcd_pb2 import EtcdCheckpoint, EtcdRecordPack, EtcdStagedOperation, EtcdStagedPart
from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.journal.etcd.keys import (
    PART_BYTES,
    STAGED,
    checkpoint_key,
    entry_key,
    era_prefix,
    high_water_key,
    pack_key,
    part_key,
    parts_end,
    seal,
    staged_key,
)
from rallypoint.rendezvous.journal.journal import (
    Checkpoint,
    Dropped,
    Entry,
    Forgotten,
    HighWater,
    Record,
    Span,
)

_Item = TypeVar("_Item")

# Upper bound of a record's size in a pack besides its own bytes.
_RECORD_OVERHEAD = 6

Change = Put | Delete


@dataclass(slots=True)
class SpaceContents:
    """The contents of a space, as far as the next commit needs them. No two runs have a key in common.

    Attributes:
        spans: The kept records, by run.
        packs: The first revision of each stored pack, by run, in order.
        checkpoints: The runs that have one.
        parts: Number of parts of a value, by its key, if more than one.
        storing: The runs with a span that have, or had since the journal was opened, store entries of the present era.
            A fenced state needs no run: its name is in neither, or would stay in memory after the state is gone.
    """

    spans: dict[str, Span] = field(default_factory=dict)
    packs: dict[str, list[int]] = field(default_factory=dict)
    checkpoints: set[str] = field(default_factory=set)
    parts: dict[bytes, int] = field(default_factory=dict)
    storing: set[str] = field(default_factory=set)
    pack_count: int = 0


@dataclass(slots=True)
class _RunChanges:
    """The changes that a group makes to one run.

    Attributes:
        stored: Revision of the latest record that is already in etcd.
        records: New records, of the era that is current in the end.
        state: Revision and content of the new checkpoint.
        values: The store entries that change, by round and key, in that era.
        forgotten: The era at the beginning of the group, if it has ended.
        high_water: Revision and content of the part that outlives the rest.
    """

    stored: int
    records: list[Record] = field(default_factory=list)
    state: tuple[int, bytes] | None = None
    values: dict[tuple[int, str], bytes | None] = field(default_factory=dict)
    forgotten: int | None = None
    high_water: tuple[int, bytes] | None = None


class Packing:
    """Converts the entries of a commit, in their order, to their combined changes.

    A value that is replaced within the group is never written, nor is a record that is dropped within it. No key in the
    result is both put and deleted: etcd refuses that, and so the changes need no order.
    """

    def __init__(self, contents: SpaceContents) -> None:
        """`contents`: of the space; updated, and therefore unusable if the commit fails."""
        self._contents = contents
        self._runs: dict[str, _RunChanges] = {}

    def add(self, entry: Entry) -> None:
        """Add an entry; raise OutOfSequenceError if it does not continue the kept records of its run."""
        span = self._contents.spans.get(entry.run_id)
        run = self._runs.get(entry.run_id)
        if run is None:
            run = self._runs[entry.run_id] = _RunChanges(span.last if span else 0)
        if isinstance(entry, StoreChange):
            run.values[entry.round, entry.key] = entry.value
            if span is not None:
                self._contents.storing.add(entry.run_id)
            return
        if span is None:
            span = self._contents.spans[entry.run_id] = Span()
            if run.values:
                self._contents.storing.add(entry.run_id)
        if isinstance(entry, Record):
            span.add(entry)
            run.records.append(entry)
        elif isinstance(entry, Checkpoint):
            span.cover(entry)
            run.state = entry.revision, entry.content
        elif isinstance(entry, Forgotten):
            if run.forgotten is None:
                run.forgotten = span.era
            span.forget(entry)
            run.state = entry.revision, entry.content
            run.records, run.values, run.stored = [], {}, span.last
            self._contents.storing.discard(entry.run_id)
        elif isinstance(entry, Dropped):
            span.drop(entry)
        elif isinstance(entry, HighWater):
            run.high_water = entry.revision, entry.content

    def changes(self) -> list[Change]:
        """Return all changes; call once. The keys are without the prefix of the space."""
        return [change for run_id, run in self._runs.items() for change in self._of_run(run_id, run)]

    def _of_run(self, run_id: str, run: _RunChanges) -> Iterator[Change]:
        span = self._contents.spans.get(run_id) or Span()
        if run.high_water is not None:
            revision, content = run.high_water
            # Written as the checkpoint that it becomes if nothing else is left in the space: of the first era again.
            left = EtcdCheckpoint(revision=revision, keep_from=revision + 1, content=content)
            yield from self._put(high_water_key(run_id), left.SerializeToString())
        if run.forgotten is not None:
            yield self._forget(run_id, run.forgotten)
        # Not if it has store entries: their era shows if they are current, and only the checkpoint holds the era.
        if span.dropped and run_id not in self._contents.storing:
            if run_id in self._contents.checkpoints:
                self._contents.checkpoints.remove(run_id)
                yield from self._delete(checkpoint_key(run_id))
            del self._contents.spans[run_id]
            return
        if run.state is not None:
            revision, content = run.state
            state = EtcdCheckpoint(revision=revision, keep_from=span.first, era=span.era, content=content)
            self._contents.checkpoints.add(run_id)
            yield from self._put(checkpoint_key(run_id), state.SerializeToString())
            yield from self._drop_packs(run_id, run, span)
        kept = [record for record in run.records if record.revision >= span.first]
        for pack in _packs(kept):
            first = pack[0].revision
            self._contents.packs.setdefault(run_id, []).append(first)
            self._contents.pack_count += 1
            content = EtcdRecordPack(records=[record.content for record in pack]).SerializeToString()
            yield from self._put(pack_key(run_id, span.era, first), content)
        for (round_, key), value in run.values.items():
            stored_at = entry_key(run_id, span.era, round_, key)
            yield from self._delete(stored_at) if value is None else self._put(stored_at, value)

    def _forget(self, run_id: str, era: int) -> Change:
        """Delete a whole era. Later changes have keys of a later era, which the range does not touch."""
        prefix = era_prefix(run_id, era)
        self._contents.pack_count -= len(self._contents.packs.pop(run_id, ()))
        for key in [key for key in self._contents.parts if key.startswith(prefix)]:
            del self._contents.parts[key]
        return Delete(prefix, prefix_end(prefix))

    def _drop_packs(self, run_id: str, run: _RunChanges, span: Span) -> Iterator[Change]:
        """Delete the packs with no kept record; a pack with some kept records stays whole."""
        packs = self._contents.packs.get(run_id, [])
        dropped = len(packs) if span.first > run.stored else max(0, bisect_right(packs, span.first) - 1)
        if not dropped:
            return
        # No new pack begins before `span.first`.
        end = packs[dropped] if dropped < len(packs) else span.first
        for first in packs[:dropped]:
            self._contents.parts.pop(pack_key(run_id, span.era, first), None)
        yield Delete(pack_key(run_id, span.era, packs[0]), pack_key(run_id, span.era, end))
        del packs[:dropped]
        self._contents.pack_count -= dropped

    def _put(self, key: bytes, content: bytes) -> Iterator[Change]:
        sealed = seal(key, content)
        yield from (Put(part, value) for part, value in sealed)
        parts = self._contents.parts
        if (before := parts.get(key, 1)) > len(sealed):
            yield Delete(part_key(key, len(sealed)), parts_end(key))
        if len(sealed) > 1:
            parts[key] = len(sealed)
        elif before > 1:
            del parts[key]

    def _delete(self, key: bytes) -> Iterator[Change]:
        yield Delete(key)
        if self._contents.parts.pop(key, 1) > 1:
            yield Delete(part_key(key, 1), parts_end(key))


def _packs(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    """Cut consecutive records into packs that fit under one key."""
    return _cut(records, lambda record: len(record.content) + _RECORD_OVERHEAD, PART_BYTES, len(records))


def _cut(
    items: Sequence[_Item], size_of: Callable[[_Item], int], most_bytes: int, most: int
) -> Iterator[Sequence[_Item]]:
    """Cut items into pieces of at most so many bytes and items; an item that has more bytes is alone in its piece."""
    begin, size = 0, 0
    for index, item in enumerate(items):
        added = size_of(item)
        if index > begin and (size + added > most_bytes or index - begin == most):
            yield items[begin:index]
            begin, size = index, 0
        size += added
    if begin < len(items):
        yield items[begin:]


# ---- Steps of a commit: one transaction, or several if it is too large for one. Pure.
#
# A large commit is first written to staging keys, which no reader uses yet. Then one transaction marks it in the head:
# from then on it is durable, and every reader of the space applies it in memory. At last its changes are written to
# their own keys, which may be done twice; the last of these transactions removes the mark.


# Limits of one transaction, besides the head and the deletion of staged parts. etcd's default limits are 128 operations
# and 1.5 MiB.
MOST_CHANGES = 98
MOST_BYTES = 1024 * 1024
# Upper bound of a change's size in a message besides its key and value.
_OVERHEAD = 32

CLEAR_STAGING = Delete(STAGED, prefix_end(STAGED))
"""Deletes all staged parts."""


@dataclass(frozen=True, slots=True)
class CommitStep:
    """One transaction of a commit.

    Attributes:
        changes: Its changes, besides writing the head.
        durable: True if all of the commit is durable after it.
        staged_parts: The number of staged parts in the head after it.
    """

    changes: Sequence[Change]
    durable: bool = True
    staged_parts: int = 0


def plan(changes: Sequence[Change]) -> list[CommitStep]:
    """Return the steps of a commit."""
    batches = list(_cut(changes, _size, MOST_BYTES, MOST_CHANGES))
    if len(batches) <= 1:
        return [CommitStep(changes)]
    parts = [_encode(part) for part in _cut(changes, _size, MOST_BYTES, len(changes))]
    steps = [
        CommitStep([Put(staged_key(index), part)], durable=False) for index, part in enumerate(parts[:-1])
    ]
    last = len(parts) - 1
    steps.append(CommitStep([Put(staged_key(last), parts[last])], staged_parts=len(parts)))
    return [*steps, *finish(changes, len(parts))]


def finish(changes: Sequence[Change], staged_parts: int) -> list[CommitStep]:
    """Return the steps that write a staged commit to its own keys."""
    batches = list(_cut(changes, _size, MOST_BYTES, MOST_CHANGES)) or [[]]
    steps = [CommitStep(batch, staged_parts=staged_parts) for batch in batches[:-1]]
    return [*steps, CommitStep([*batches[-1], CLEAR_STAGING])]


def unstage(part: bytes) -> Iterator[Change]:
    """Return the changes in a staged part; raise protobuf's DecodeError if it is damaged."""
    for operation in EtcdStagedPart.FromString(part).operations:
        if operation.WhichOneof("effect") == "put":
            yield Put(operation.key, operation.put)
        else:
            yield Delete(operation.key, operation.delete_to)


@dataclass(frozen=True, slots=True)
class Cost:
    """The estimated size of entries in a transaction; `plan` uses the real size."""

    changes: int
    size: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.changes + other.changes, self.size + other.size)

    @property
    def fits(self) -> bool:
        """True if one transaction is enough."""
        return self.changes <= MOST_CHANGES and self.size <= MOST_BYTES


def cost(entries: Sequence[Entry]) -> Cost:
    """Estimate the entries of one call, so that calls can be grouped while they fit together."""
    changes = size = 0
    with_records = set()
    for entry in entries:
        if isinstance(entry, Record):
            with_records.add(entry.run_id)
            content = entry.content
        elif isinstance(entry, Checkpoint | Forgotten | HighWater):
            changes += 2
            content = entry.content
        elif isinstance(entry, Dropped):
            changes += 2
            content = b""
        else:
            changes += 1
            content = entry.value or b""
            size += len(entry.key)
        changes += len(content) // PART_BYTES
        size += len(content) + len(entry.run_id) + 2 * _OVERHEAD
    return Cost(changes + len(with_records), size)


def _size(change: Change) -> int:
    more = change.value if isinstance(change, Put) else change.end
    return len(change.key) + len(more) + _OVERHEAD


def _encode(changes: Sequence[Change]) -> bytes:
    part = EtcdStagedPart()
    for change in changes:
        if isinstance(change, Put):
            part.operations.append(EtcdStagedOperation(key=change.key, put=change.value))
        else:
            part.operations.append(EtcdStagedOperation(key=change.key, delete_to=change.end))
    return part.SerializeToString()
