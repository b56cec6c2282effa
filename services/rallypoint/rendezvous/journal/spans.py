"""Which records of a run are kept: what may be appended next, and whether what was read is all of it."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.rendezvous.journal.journal import Checkpoint, Dropped, Forgotten, Record


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
