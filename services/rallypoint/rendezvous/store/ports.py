"""What the store asks of a journal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from rallypoint.rendezvous.core.refusals import LeaseLost, NodeIsEvicted, RunIsClosed


@dataclass(frozen=True, slots=True)
class StoreChange:
    """One entry of one space after a change: absolute, so applying it twice is applying it once.

    Attributes:
        run_id: Name of the run.
        round: The space: 0 for the run's own, otherwise that of a round.
        key: The key. One that begins with U+0001 is the store's own (see `operations`).
        value: The value; None: the key was deleted.
    """

    run_id: str
    round: int
    key: str
    value: bytes | None


class StoreJournal(Protocol):
    """Where changes of the store become durable."""

    async def append(self, entries: Sequence[StoreChange]) -> None:
        """Return when all entries are durable; concurrent calls share a commit.

        The entries of one call become durable together or not at all: an operation's record must never be
        there without its write, nor the write without its record. Later entries of a key replace earlier
        ones. When this raises, whether they are durable is unknown, and the journal takes no more.
        """


LEASE_REFUSALS = (RunIsClosed, NodeIsEvicted, LeaseLost)
"""What a lease that is not held is refused with."""

Settled: TypeAlias = Callable[[], Awaitable[None]]
"""Waits until everything is durable that `CheckLease` has gone by so far."""


async def at_once() -> None:
    """Nothing is on its way to be durable."""


class CheckLease(Protocol):
    """Whether a node holds a lease."""

    def __call__(self, run_id: str, node_id: str, lease: int, /) -> None:
        """Do nothing if it does.

        Raises:
            Refused: RunNotFound, RunIsClosed, NodeIsEvicted or LeaseLost, of the rendezvous core: it does not.
        """
