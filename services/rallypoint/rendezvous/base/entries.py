"""The store's interface to the journal, and its operations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from rallypoint.rendezvous.base.refusals import OperationReused, OperationSuperseded
from rallypoint.rendezvous.core.commands import LeaseLost, NodeIsEvicted, RunIsClosed


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
"""Refusals of a write whose lease is not held."""

Settled: TypeAlias = Callable[[], Awaitable[None]]
"""Waits until everything is durable on which `CheckLease` has relied so far."""


async def at_once() -> None:
    """Return at once: nothing is on its way to the journal."""


class CheckLease(Protocol):
    """Checks that a node holds a lease."""

    def __call__(self, run_id: str, node_id: str, lease: int, /) -> None:
        """Do nothing if it does, otherwise raise.

        Raises:
            Refused: RunNotFound, RunIsClosed, NodeIsEvicted or LeaseLost, of the rendezvous core: it does not.
        """


# ---- The node for which something is written.


@dataclass(frozen=True, slots=True)
class Writer:
    """The node for which a write is done.

    Attributes:
        node_id: Name of the node.
        lease: Its right to act.
    """

    node_id: str
    lease: int


# ---- Operations: how a repeated write takes effect only once, over restarts of the server too.
#
# Each client numbers its writes in slots, one at a time per slot, as sessions of NFS 4.1 do (RFC 8881, 2.10.6).
# The last write of each slot that changed something is kept as a record, in the space it changed and in the same
# journal append, until the slot goes on or the run is forgotten. So a record exists exactly when its write was carried
# out, and a slot costs one entry after any number of writes. A write that changed nothing needs no record: it can be
# carried out again.


# No key of a client begins with it.
RESERVED = "\x01"


@dataclass(frozen=True, slots=True)
class Operation:
    """A client's name for one of its writes.

    Attributes:
        client_id: Drawn at random by each client process.
        slot: Name of a sequence of writes, one at a time.
        sequence: Grows from write to write of a slot.
    """

    client_id: str
    slot: int
    sequence: int

    @property
    def name(self) -> str:
        """The slot's name, for people."""
        return f"{self.client_id}/{self.slot}"

    @property
    def record_key(self) -> str:
        """Key under which the slot's record is kept."""
        return f"{RESERVED}operation/{self.client_id}/{self.slot}"


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """The record of a slot's last write.

    Attributes:
        sequence: Number of the write in its slot.
        stamp: Grows with every record of the run; orders the slots by their last use, after a restart too.
        fingerprint: Checksum of the request: distinguishes a repetition from a client that forgot to count.
        result: The result of the write, as an integer.
        round: The space that the write changed, and in which the journal keeps the record.
    """

    sequence: int
    stamp: int
    fingerprint: int
    result: int
    round: int = 0

    def encode(self) -> bytes:
        """Return the record as a value of the journal: four decimal numbers. Its space implies the round."""
        return b"%d %d %d %d" % (self.sequence, self.stamp, self.fingerprint, self.result)

    @classmethod
    def decode(cls, value: bytes, round: int = 0) -> OperationRecord:
        """Decode a value of `encode` from the space of `round`.

        Raises:
            ValueError: It is no such record.
        """
        sequence, stamp, fingerprint, result = (int(number) for number in value.split())
        return cls(sequence, stamp, fingerprint, result, round)


def is_repetition(operation: Operation, fingerprint: Callable[[], int], record: OperationRecord) -> bool:
    """Return True if a request was carried out before, so that its reply is in the slot's record.

    Args:
        operation: The client's name for the request.
        fingerprint: Computes the request's checksum.
        record: The record of the operation's slot.

    Raises:
        OperationSuperseded: The slot has gone on.
        OperationReused: The request that was carried out is another.
    """
    if operation.sequence > record.sequence:
        return False
    if operation.sequence < record.sequence:
        raise OperationSuperseded(operation.name, operation.sequence, record.sequence)
    if fingerprint() != record.fingerprint:
        raise OperationReused(operation.name, operation.sequence)
    return True
