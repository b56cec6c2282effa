"""The violations that a checker finds in a history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ha.history import Entry, dump

# Limits of the entries shown with a finding: their number, and characters of each.
_SHOWN = 12
_WIDTH = 400


class Wrong(StrEnum):
    """The kinds of violations."""

    # Two writes built on one and the same state.
    FORK = "fork"
    # A write that was acknowledged is gone.
    LOST = "lost"
    # A read shows a state that was replaced before it began.
    STALE = "stale"
    # A read shows a value that was never written, or a state without a predecessor.
    FROM_NOWHERE = "from nowhere"
    # A refused operation took effect.
    REFUSED_BUT_DONE = "refused but done"
    # One write, sent once or repeatedly, took effect twice.
    DONE_TWICE = "done twice"
    # An operation that had to succeed was refused.
    DENIED = "denied"
    # A token, a revision, a lease or a round number stands for two things.
    REUSED = "reused"
    # A number that must grow does not.
    OUT_OF_ORDER = "out of order"
    # No order of the operations explains the answers.
    NOT_LINEARIZABLE = "not linearizable"
    # A report is not durable, or differs from the durable state.
    NOT_DURABLE = "told and not durable"
    # Ranks of a round are not 0 … n-1.
    RANKS = "ranks"
    # A writer wrote after its round or lease was over.
    UNFENCED = "unfenced"
    # The search for an order was too long to finish.
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Finding:
    """A violation.

    Attributes:
        wrong: Its kind.
        where: The run, or the key of one.
        sentence: A description for people.
        `evidence`: The entries of the history that show it.
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
