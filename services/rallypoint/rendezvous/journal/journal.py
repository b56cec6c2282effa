"""What a journal is, whatever keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from rallypoint.rendezvous.store.ports import StoreChange
from rallypoint.rendezvous.v1.journal_pb2 import JournalRecord

Entry: TypeAlias = JournalRecord | StoreChange


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a journal held when it was opened."""

    records: Sequence[JournalRecord]  # per run in the order of revisions
    store_entries: Sequence[StoreChange]  # the values that stand; none is a deletion


class JournalError(Exception):
    """A journal can't be opened or written; the message says why, where and what to do, in one line."""


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

        Raises:
            JournalError: They may or may not be durable, and the journal takes no more.
        """

    async def close(self) -> None:
        """Give the journal up, with everything appended durable."""
