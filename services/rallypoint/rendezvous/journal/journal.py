"""What a journal is, whatever keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from rallypoint.rendezvous.base.entries import StoreChange


@dataclass(frozen=True, slots=True)
class Record:
    """One fact of one run.

    Attributes:
        run_id: Name of the run.
        revision: Number of the fact in its run; one more than that of the record before it.
        content: A JournalRecord, encoded.
    """

    run_id: str
    revision: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run after one of its records: a recovery begins with it, and folds the later records.

    It takes the place of the run's checkpoint before. A run that begins above revision 1 begins with one.

    Attributes:
        run_id: Name of the run.
        revision: That of the last record in it.
        content: A RunSnapshot, encoded.
        keep_from: Records of earlier revisions are dropped; at most `revision` + 1. What is kept although the
            checkpoint covers it is kept for people.
    """

    run_id: str
    revision: int
    content: bytes
    keep_from: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """All records, and all store entries, of a run are dropped, and this stays in the place of its checkpoint.

    Attributes:
        run_id: Name of the run.
        revision: That of its last record: if the run comes again, its revisions go on from here.
        content: A RunSnapshot, encoded; what must outlive the run, so that no number is given out twice.
    """

    run_id: str
    revision: int
    content: bytes


@dataclass(frozen=True, slots=True)
class HighWater:
    """What outlives all other entries of a run, where these can end by themselves. It replaces the one before.

    A journal on etcd whose keys are on a lease keeps this apart. If only this is left of a run, it comes back as a
    checkpoint without records, as `Forgotten` does. Other journals are never given one.

    Attributes:
        run_id: Name of the run.
        revision: That of its last record: the revisions go on from here.
        content: A RunSnapshot, encoded: numbers and used budgets, so that none ever goes back.
    """

    run_id: str
    revision: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a `Forgotten` left of a run is dropped as well, so that nothing is kept of it.

    Unless the run has store entries, or had some since the journal was opened. And it may take a while: what is still
    there when the journal is opened comes back as ever, and is to be dropped again.

    Attributes:
        run_id: Name of a run without records.
    """

    run_id: str


Entry: TypeAlias = Record | Checkpoint | Forgotten | Dropped | HighWater | StoreChange

MARK = ""
"""In the place of a run's name: what all runs that were dropped have left together. No run is called so."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a journal held when it was opened."""

    checkpoints: Sequence[Checkpoint]  # the latest of each run; `Forgotten` comes back as one without records
    records: Sequence[Record]  # all that are kept, per run in the order of revisions
    store_entries: Sequence[StoreChange]  # the values that stand; none is a deletion


class JournalError(Exception):
    """A journal can't be opened or written; the message says why, where and what to do, in one line."""


class OwnershipLost(JournalError):
    """The journal belongs to another process by now: this one must tell nobody anything of it any more."""


class Journal(Protocol):
    """Keeps entries in the order in which they were appended.

    Whoever opened a journal owns it alone. A journal that failed to append is broken for good: what of a
    failed commit reached the disk is unknown, so no later success may be believed.
    """

    async def open(self) -> Recovered:
        """Take hold of the journal and read it.

        Raises:
            JournalError: It is damaged, of a newer version, or held by another process. Nothing was changed.
        """

    async def append(self, entries: Sequence[Entry]) -> None:
        """Keep entries; returns when they are durable. Calls made together share one commit.

        The entries of one call become durable together, or not at all. A record that does not go on from what is
        kept of its run is refused, and breaks the journal.

        Raises:
            JournalError: They may or may not be durable, and the journal takes no more.
        """

    async def close(self) -> None:
        """Give the journal up, with everything appended durable."""


# ---- A journal for as long as the process lives.


class MemoryJournal:
    """Keeps nothing beyond its process: for `--standalone`, where the run ends with the process anyway."""

    async def open(self) -> Recovered:
        """Nothing to recover."""
        return Recovered([], [], [])

    async def append(self, entries: Sequence[Entry]) -> None:
        """As durable as the process at once."""

    async def close(self) -> None:
        """Nothing to give up."""


# ---- Which records of a run are kept: what may be appended next, and whether what was read is all of it.


class OutOfSequenceError(ValueError):
    """An entry does not go on from what is kept of its run: kept, it would leave a gap that no recovery closes."""


@dataclass(slots=True)
class Span:
    """The records `first` to `last` of a run; none where `last` is `first` - 1.

    Attributes:
        first: Revision of the first record that is kept, or of the next one where none is.
        last: Revision of the latest record, whether kept or not; 0 where there never was one.
        era: How often the run was forgotten. Store entries of earlier eras are left-overs.
        dropped: Whether nothing is to be kept of the run, not even this.
    """

    first: int = 1
    last: int = 0
    era: int = 0
    dropped: bool = False

    def add(self, record: Record) -> None:
        """Take the next record.

        Raises:
            OutOfSequenceError: It is not the next one.
        """
        if record.revision != self.last + 1:
            raise OutOfSequenceError(
                f"record {record.revision} of run {record.run_id!r} comes where record {self.last + 1} is due"
            )
        self.last = record.revision

    def cover(self, checkpoint: Checkpoint) -> None:
        """Drop what a checkpoint no longer keeps; or, where no record is kept, begin after it.

        Raises:
            OutOfSequenceError: Records would be missing between the checkpoint and what follows it.
        """
        if self.first > self.last <= checkpoint.revision == checkpoint.keep_from - 1:
            self.first, self.last, self.dropped = checkpoint.keep_from, checkpoint.revision, False
            return
        first = max(self.first, checkpoint.keep_from)  # what was dropped before does not come back
        if not first - 1 <= checkpoint.revision <= self.last:
            raise OutOfSequenceError(
                f"a checkpoint of run {checkpoint.run_id!r} after record {checkpoint.revision} keeps records from "
                f"{first}, where the latest is {self.last}"
            )
        self.first = first

    def forget(self, forgotten: Forgotten) -> None:
        """Drop everything.

        Raises:
            OutOfSequenceError: Revisions would be given out twice.
        """
        if forgotten.revision < self.last:
            raise OutOfSequenceError(
                f"run {forgotten.run_id!r} is forgotten up to record {forgotten.revision}, where the latest is "
                f"{self.last}"
            )
        self.first, self.last, self.era = forgotten.revision + 1, forgotten.revision, self.era + 1
        self.dropped = False

    def drop(self, dropped: Dropped) -> None:
        """Note that nothing is to be kept.

        Raises:
            OutOfSequenceError: Records are.
        """
        if self.first <= self.last:
            raise OutOfSequenceError(
                f"run {dropped.run_id!r} is dropped, where records {self.first} to {self.last} are kept"
            )
        self.dropped = True
