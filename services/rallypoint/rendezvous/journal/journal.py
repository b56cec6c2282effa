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
