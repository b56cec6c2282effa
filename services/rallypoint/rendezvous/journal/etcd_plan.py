"""How a commit is carried out: as one transaction, or, if it is too large for that, in steps. Pure.

A large commit is first written to a staging place, where nobody looks. Then one transaction marks it in the head: from
there on it is durable, and whoever reads the space puts it in its places in its mind. At last it is put in its places
in deed, which may be done twice, and the mark goes with the last of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rallypoint.etcd.values import Delete, Put, prefix_end
from rallypoint.rendezvous.journal.etcd_keys import STAGED, staged_key
from rallypoint.rendezvous.journal.etcd_packing import Change
from rallypoint.rendezvous.journal.etcd_values import PART_BYTES
from rallypoint.rendezvous.journal.journal import Checkpoint, Dropped, Entry, Forgotten, HighWater, Record
from rallypoint.rendezvous.v1.etcd_journal_pb2 import EtcdStagedOperation, EtcdStagedPart

# Of one transaction, besides the head and the end of the staging. etcd takes 128 operations and 1.5 MiB, unless it was
# told otherwise.
MOST_CHANGES = 98
MOST_BYTES = 1024 * 1024
# What a change takes in a message besides its key and value, at most.
_OVERHEAD = 32

CLEAR_STAGING = Delete(STAGED, prefix_end(STAGED))
"""Throws away what is staged."""


@dataclass(frozen=True, slots=True)
class Step:
    """One transaction of a commit.

    Attributes:
        changes: What it does besides writing the head.
        durable: Whether all of the commit is durable after it.
        staged_parts: How many staged parts the head names after it.
    """

    changes: Sequence[Change]
    durable: bool = True
    staged_parts: int = 0


def plan(changes: Sequence[Change]) -> list[Step]:
    """The steps of a commit."""
    batches = list(_cut(changes, MOST_CHANGES))
    if len(batches) <= 1:
        return [Step(changes)]
    parts = [_encode(part) for part in _cut(changes, len(changes))]
    steps = [Step([Put(staged_key(index), part)], durable=False) for index, part in enumerate(parts[:-1])]
    last = len(parts) - 1
    steps.append(Step([Put(staged_key(last), parts[last])], staged_parts=len(parts)))
    return [*steps, *finish(changes, len(parts))]


def finish(changes: Sequence[Change], staged_parts: int) -> list[Step]:
    """The steps that put a staged commit in its places."""
    batches = list(_cut(changes, MOST_CHANGES)) or [[]]
    steps = [Step(batch, staged_parts=staged_parts) for batch in batches[:-1]]
    return [*steps, Step([*batches[-1], CLEAR_STAGING])]


def unstage(part: bytes) -> Iterator[Change]:
    """What a staged part does.

    Raises:
        google.protobuf.message.DecodeError: It is damaged.
    """
    for operation in EtcdStagedPart.FromString(part).operations:
        if operation.WhichOneof("effect") == "put":
            yield Put(operation.key, operation.put)
        else:
            yield Delete(operation.key, operation.delete_to)


@dataclass(frozen=True, slots=True)
class Cost:
    """How much of a transaction entries take, by and large: `plan` looks at what they really come to."""

    changes: int
    size: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.changes + other.changes, self.size + other.size)

    @property
    def fits(self) -> bool:
        """Whether it is one transaction."""
        return self.changes <= MOST_CHANGES and self.size <= MOST_BYTES


def cost(entries: Sequence[Entry]) -> Cost:
    """What the entries of one call take: so, calls can be grouped as long as they fit together."""
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


def _cut(changes: Sequence[Change], most: int) -> Iterator[Sequence[Change]]:
    """Cut changes into pieces of at most so many, and of the bytes of a transaction."""
    begin, size = 0, 0
    for index, change in enumerate(changes):
        added = _size(change)
        if index > begin and (size + added > MOST_BYTES or index - begin == most):
            yield changes[begin:index]
            begin, size = index, 0
        size += added
    if begin < len(changes):
        yield changes[begin:]


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
