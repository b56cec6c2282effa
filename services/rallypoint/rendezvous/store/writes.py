"""The kinds of writes, with the decision of each. Pure."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar
from zlib import crc32

from rallypoint.rendezvous.base.entries import Operation, Writer, is_repetition
from rallypoint.rendezvous.base.limits import MAX_VALUE_BYTES
from rallypoint.rendezvous.base.refusals import IntegerOverflow, NotAnInteger, OperationReused, ValueTooLarge
from rallypoint.rendezvous.store.core import ENTRY_OVERHEAD_BYTES, RunDraft

# The result of a write.
T_co = TypeVar("T_co", covariant=True)

_INTEGER = re.compile(rb"[+-]?[0-9]{1,19}")
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Write(ABC, Generic[T_co]):
    """A write to one space.

    Attributes:
        kind: The name in fingerprints. Journals keep fingerprints: never change it.
        round: The space: 0 for the run's own, otherwise that of a round.
        writer_round: The round whose worker the writer is; 0: none.
        writer: The node on whose behalf it is done; its lease must be held.
        operation: The client's name for the write; None: a repetition is a new write.
    """

    kind: ClassVar[str]

    round: int
    writer: Writer
    writer_round: int = 0
    operation: Operation | None = None

    @abstractmethod
    def target(self) -> str:
        """Return the key, or a text that identifies the keys, of the write."""

    @abstractmethod
    def content(self) -> tuple[bytes, ...]:
        """Return the written data as bytes."""

    @abstractmethod
    def carry_out(self, draft: RunDraft) -> tuple[T_co, int | None]:
        """Change the draft; return the result, and an integer from which `repeated` restores it.

        None instead of the integer: nothing has changed.
        """

    @abstractmethod
    def repeated(self, result: int) -> T_co:
        """Return the result of a write that was carried out before."""

    @property
    def queued_bytes(self) -> int:
        """Bytes that the write holds while it waits."""
        return ENTRY_OVERHEAD_BYTES + len(self.target()) + sum(map(len, self.content()))

    def fingerprint(self) -> int:
        """Return a checksum of the request. Journals keep it: it must stay the same for each write."""
        checksum = crc32(self.target().encode(), crc32(self.kind.encode()))
        for part in self.content():
            checksum = crc32(part, checksum)
        return checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWrite(Write[T_co]):
    """A write to one key."""

    key: str

    def target(self) -> str:
        return self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Set(KeyWrite[None]):
    """Store a value."""

    kind = "Set"

    value: bytes

    def content(self) -> tuple[bytes, ...]:
        return (self.value,)

    def carry_out(self, draft: RunDraft) -> tuple[None, int | None]:
        draft.put(self.round, {self.key: self.value})
        return None, 0

    def repeated(self, result: int) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(KeyWrite[int]):
    """Add to an integer; the result is the sum."""

    kind = "Add"

    amount: int

    def content(self) -> tuple[bytes, ...]:
        return (b"%d" % self.amount,)

    def carry_out(self, draft: RunDraft) -> tuple[int, int | None]:
        value = draft.value(self.round, self.key)
        present = 0 if value is None else self._integer(value)
        total = present + self.amount
        if total not in _INT64:
            raise IntegerOverflow(self.key, present, self.amount)
        draft.put(self.round, {self.key: b"%d" % total})
        return total, total

    def repeated(self, result: int) -> int:
        return result

    def _integer(self, value: bytes) -> int:
        if not _INTEGER.fullmatch(value) or (integer := int(value)) not in _INT64:
            raise NotAnInteger(self.key, value)
        return integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Append(KeyWrite[int]):
    """Add bytes to the end of a value, empty if the key is absent; the result is the length."""

    kind = "Append"

    value: bytes

    def content(self) -> tuple[bytes, ...]:
        return (self.value,)

    def carry_out(self, draft: RunDraft) -> tuple[int, int | None]:
        present = draft.value(self.round, self.key) or b""
        length = len(present) + len(self.value)
        if length > MAX_VALUE_BYTES:
            raise ValueTooLarge(self.key, length, MAX_VALUE_BYTES)
        draft.put(self.round, {self.key: present + self.value})
        return length, length

    def repeated(self, result: int) -> int:
        return result


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a CompareSet.

    Attributes:
        swapped: True if the key was set.
        value: The key's value afterwards; None: it is absent.
    """

    swapped: bool
    value: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSet(KeyWrite[Comparison]):
    """Set a key if its value is `expected`, or if it is absent and `expected` is empty."""

    kind = "CompareSet"

    expected: bytes
    desired: bytes

    def content(self) -> tuple[bytes, ...]:
        # The length keeps ("a", "bc") and ("ab", "c") apart.
        return (b"%d " % len(self.expected), self.expected, self.desired)

    def carry_out(self, draft: RunDraft) -> tuple[Comparison, int | None]:
        value = draft.value(self.round, self.key)
        if (b"" if value is None else value) != self.expected:
            return Comparison(swapped=False, value=value), None
        draft.put(self.round, {self.key: self.desired})
        return Comparison(swapped=True, value=self.desired), 1

    def repeated(self, result: int) -> Comparison:
        return Comparison(swapped=True, value=self.desired)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteKey(KeyWrite[bool]):
    """Remove a key; the result is True if it was there."""

    kind = "Delete"

    def content(self) -> tuple[bytes, ...]:
        return ()

    def carry_out(self, draft: RunDraft) -> tuple[bool, int | None]:
        if draft.value(self.round, self.key) is None:
            return False, None
        draft.put(self.round, {self.key: None})
        return True, 1

    def repeated(self, result: int) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiSet(Write[None]):
    """Store several values, at least one: all or none."""

    kind = "MultiSet"

    entries: Mapping[str, bytes]

    def target(self) -> str:
        # The length keeps ("a", "bc") and ("ab", "c") apart.
        return "".join(f"{len(key)} {len(value)} {key} " for key, value in self.entries.items())

    def content(self) -> tuple[bytes, ...]:
        return tuple(self.entries.values())

    @property
    def queued_bytes(self) -> int:
        return sum(ENTRY_OVERHEAD_BYTES + len(key) + len(value) for key, value in self.entries.items())

    def carry_out(self, draft: RunDraft) -> tuple[None, int | None]:
        draft.put(self.round, self.entries)
        return None, 0

    def repeated(self, result: int) -> None:
        return None


def decide(draft: RunDraft, write: Write[T_co], current_round: int) -> T_co:
    """Carry a write out on the draft, or return its earlier result. After a Refused the draft is unchanged."""
    operation = write.operation
    # Before the checks of rounds: a write that was carried out while its round lasted keeps its result for ever, so a
    # repetition is not refused. It takes no effect a second time, so nothing needs fencing.
    record = None if operation is None else draft.record(operation)
    if operation is not None and record is not None and is_repetition(operation, write.fingerprint, record):
        if record.round != write.round:
            raise OperationReused(operation.name, operation.sequence)
        return write.repeated(record.result)
    draft.run.check_round(write.round, current_round)
    draft.run.check_round(write.writer_round, current_round)
    if operation is None:
        return write.carry_out(draft)[0]
    answer, result = write.carry_out(draft)
    if result is not None:
        draft.remember(write.round, operation, write.fingerprint(), result)
    return answer
