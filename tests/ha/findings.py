"""What a checker finds wrong in a history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ha.history import Entry, dump

# How much of the evidence is shown: entries, and characters of each.
_SHOWN = 12
_WIDTH = 400


class Wrong(StrEnum):
    """What may be wrong."""

    # Two writes built on one and the same state.
    FORK = "fork"
    # A write that was acknowledged is gone.
    LOST = "lost"
    # A read tells of a time before it began.
    STALE = "stale"
    # Something was read that nobody wrote, or that stands on nothing.
    FROM_NOWHERE = "from nowhere"
    # What was refused was done.
    REFUSED_BUT_DONE = "refused but done"
    # One write, however often it was repeated, was done twice.
    DONE_TWICE = "done twice"
    # What had to be done was refused.
    DENIED = "denied"
    # A token, a revision, a lease or a round number stands for two things.
    REUSED = "reused"
    # What is to grow doesn't.
    OUT_OF_ORDER = "out of order"
    # No order of the operations explains the answers.
    NOT_LINEARIZABLE = "not linearizable"
    # Something was told that is not durable, or not as it was told.
    NOT_DURABLE = "told and not durable"
    # Ranks of a round are not 0 … n-1.
    RANKS = "ranks"
    # Who was over wrote.
    UNFENCED = "unfenced"
    # The history is not enough to judge by.
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong.

    Attributes:
        wrong: What kind of thing.
        where: The run, or the key of one.
        sentence: What was found, for people.
        evidence: The entries of the history that show it.
    """

    wrong: Wrong
    where: str
    sentence: str
    evidence: Sequence[Entry] = ()

    def __str__(self) -> str:
        shown = [f"    {dump(entry)[:_WIDTH]}" for entry in self.evidence[:_SHOWN]]
        if len(self.evidence) > _SHOWN:
            shown.append(f"    … and {len(self.evidence) - _SHOWN} more")
        return "\n".join([f"{self.wrong.upper()} {self.where}: {self.sentence}", *shown])
