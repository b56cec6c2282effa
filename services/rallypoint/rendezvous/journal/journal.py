"""The interface of a journal, and the entries it stores; independent of the storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from rallypoint.rendezvous.base.entries import StoreChange


@dataclass(frozen=True, slots=True)
class Record:
    """One fact of one run.

    Attributes:
        revision: Number of the fact in its run; one more than that of the record before it.
        content: A JournalRecord, encoded.
    """

    run_id: str
    revision: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run after one of its records: recovery loads it, then applies the later records.

    It replaces the run's previous checkpoint. A run whose first record is above revision 1 begins with one.

    Attributes:
        revision: Revision of the last record in it.
        content: A RunSnapshot, encoded.
        keep_from: Records of earlier revisions are dropped; at most `revision` + 1. Records that are kept although the
            checkpoint covers them are there for people to read.
    """

    run_id: str
    revision: int
    content: bytes
    keep_from: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Drop all records and store entries of a run; this takes the place of its checkpoint.

    Attributes:
        revision: Revision of its last record: if the run comes again, its revisions continue from here.
        content: A RunSnapshot, encoded; the part that must outlive the run, so that no number is given out twice.
    """

    run_id: str
    revision: int
    content: bytes


@dataclass(frozen=True, slots=True)
class HighWater:
    """The part of a run that outlives its other entries, where those can expire. It replaces the previous one.

    A journal on etcd whose keys are bound to a lease keeps this apart. If only this is left of a run, it is recovered
    as a checkpoint without records, as `Forgotten` is. Other journals never receive one.

    Attributes:
        revision: Revision of its last record: the revisions continue from here.
        content: A RunSnapshot, encoded: numbers and used budgets, so that none ever decreases.
    """

    run_id: str
    revision: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Dropped:
    """Drop the remains of a forgotten run too, so that nothing is kept of it.

    No effect if the run has store entries, or had some since the journal was opened. The deletion may take a while:
    entries still present when the journal is opened are recovered as usual, and must be dropped again.
    """

    run_id: str


Entry: TypeAlias = Record | Checkpoint | Forgotten | Dropped | HighWater | StoreChange

MARK = ""
"""The run id under which the remains of all dropped runs are kept together. No run has this name."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The contents of a journal when it was opened."""

    checkpoints: Sequence[Checkpoint]  # the latest of each run; `Forgotten` becomes one without records
    records: Sequence[Record]  # all that are kept; per run in the order of revisions
    store_entries: Sequence[StoreChange]  # the current values; none is a deletion


class JournalError(Exception):
    """A journal can't be opened or written; the message gives the reason, the place and the remedy, in one line."""


class OwnershipLost(JournalError):
    """The journal may belong to another process now: this one must publish or return nothing more of it."""


class Journal(Protocol):
    """Stores entries in the order in which they were appended.

    The process that opened a journal is its only owner. A journal that failed to append stays broken: how much of the
    failed commit reached the disk is unknown, so no later success can be trusted.
    """

    async def open(self) -> Recovered:
        """Take ownership of the journal and read it.

        Raises:
            JournalError: It is damaged, of a newer version, or held by another process. Nothing was changed.
        """

    async def append(self, entries: Sequence[Entry]) -> None:
        """Append entries; return when they are durable. Concurrent calls share one commit.

        The entries of one call become durable together, or not at all. A record that does not continue its run's kept
        records is refused, and breaks the journal.

        Raises:
            JournalError: The entries may or may not be durable, and the journal accepts no more.
        """

    async def close(self) -> None:
        """Release the journal, with everything appended durable."""


# ---- A journal that lasts as long as the process.


class MemoryJournal:
    """Stores nothing beyond its process: for `--standalone`, where the run ends with the process anyway."""

    async def open(self) -> Recovered:
        """Return nothing to recover."""
        return Recovered([], [], [])

    async def append(self, entries: Sequence[Entry]) -> None:
        """Do nothing: as durable as the process."""

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


# ---- Which records of a run are kept: checks each append, and that a read has found all of them.


class OutOfSequenceError(ValueError):
    """An entry does not continue the kept records of its run: storing it would leave a gap that no recovery closes."""


@dataclass(slots=True)
class Span:
    """The kept records of a run, `first` to `last`; none if `last` is `first` - 1.

    Attributes:
        first: Revision of the first kept record, or of the next one if none is kept.
        last: Revision of the latest record, whether kept or not; 0 if there never was one.
        era: How often the run was forgotten. Store entries of earlier eras are left-overs.
        dropped: True if nothing is to be kept of the run, not even this.
    """

    first: int = 1
    last: int = 0
    era: int = 0
    dropped: bool = False

    def add(self, record: Record) -> None:
        """Append the next record; raise OutOfSequenceError for any other."""
        if record.revision != self.last + 1:
            raise OutOfSequenceError(
                f"record {record.revision} of run {record.run_id!r} comes where record {self.last + 1} is due"
            )
        self.last = record.revision

    def cover(self, checkpoint: Checkpoint) -> None:
        """Drop the records that a checkpoint no longer keeps; if no record is kept, begin after it.

        Raises:
            OutOfSequenceError: Records would be missing between the checkpoint and its successor.
        """
        if self.first > self.last <= checkpoint.revision == checkpoint.keep_from - 1:
            self.first, self.last, self.dropped = checkpoint.keep_from, checkpoint.revision, False
            return
        first = max(self.first, checkpoint.keep_from)  # records that were dropped before do not come back
        if not first - 1 <= checkpoint.revision <= self.last:
            raise OutOfSequenceError(
                f"a checkpoint of run {checkpoint.run_id!r} after record {checkpoint.revision} keeps records from "
                f"{first}, but the latest is {self.last}"
            )
        self.first = first

    def forget(self, forgotten: Forgotten) -> None:
        """Drop everything; raise OutOfSequenceError if revisions would be given out twice."""
        if forgotten.revision < self.last:
            raise OutOfSequenceError(
                f"run {forgotten.run_id!r} is forgotten up to record {forgotten.revision}, but the latest is "
                f"{self.last}"
            )
        self.first, self.last, self.era = forgotten.revision + 1, forgotten.revision, self.era + 1
        self.dropped = False

    def drop(self, dropped: Dropped) -> None:
        """Mark the run as not kept at all; raise OutOfSequenceError if it has kept records."""
        if self.first <= self.last:
            raise OutOfSequenceError(
                f"run {dropped.run_id!r} can't be dropped: records {self.first} to {self.last} are kept"
            )
        self.dropped = True
