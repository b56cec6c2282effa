"""Interfaces between the runs, their store and states, and the journal; the operations of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rallypoint.rendezvous.base.errors import Refusal, RunBroken
from rallypoint.rendezvous.base.refusals import OperationReused, OperationSuperseded
from rallypoint.rendezvous.core.commands import LeaseLost, LeaseNotProven, NodeIsEvicted, RunIsClosed


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


LEASE_REFUSALS = (RunIsClosed, NodeIsEvicted, LeaseLost, LeaseNotProven)
"""Refusals of a write whose lease is not held."""


class WriteAdmission(Protocol):
    """Decides which writes of a run are admitted, by its rounds and leases. `RendezvousEngine` implements it.

    The store and the fenced states call it in the event loop, for reads and to decide writes: it must not block, nor
    raise anything but these refusals.
    """

    def writable_round(self, run_id: str) -> int | None:
        """Return the only round of a run whose workers may write, as durable; reads are judged by it.

        It is 0 before the first round; None: there is no such run.

        Raises:
            RunBroken: An unexpected error has stopped the run.
        """

    def latest_round(self, run_id: str) -> int | None:
        """As `writable_round`, by the latest facts appended to the same journal, durable or not.

        Writes are judged by it, in the step of the event loop in which they are appended.
        """

    def check_lease(self, run_id: str, node_id: str, lease: int, token: bytes) -> None:
        """Check that a node holds the lease it sent, by the latest facts, durable or not; called to decide a write.

        Raises:
            Refused: RunNotFound, RunIsClosed, NodeIsEvicted, LeaseLost, LeaseNotProven or RunBroken: it does not.
        """

    def creator_of(self, run_id: str) -> str:
        """Return the client whose limits hold for the data of a run; empty: it is unknown."""

    async def settled(self) -> None:
        """Return when all facts are durable on which the methods above have relied so far.

        No refusal because of a round or a lease is sent before.
        """


class RunData(Protocol):
    """Data of runs, kept beside them. `StoreService` and `FencedStateService` implement it.

    `DurableRuns` calls it in the event loop, when it publishes a commit and before it replies to the commands of that
    commit. A method must not block, nor raise: an error stops the run, and one of `stop_run` stops all runs.
    """

    def forget_rounds_before(self, run_id: str, round: int) -> None:
        """Drop all rounds before `round`; called when the end of the round before it is durable."""

    def forget_run(self, run_id: str) -> None:
        """Drop a run; called when it is durable that the run is forgotten.

        That append has also dropped the run's entries from the journal, and the append returned in the same step of the
        event loop: later commits of the journal are still in flight. `writable_round` of the run is None from then on,
        until the run comes again.
        """

    def is_empty(self, run_id: str) -> bool:
        """Return True if nothing is left that ends with the run, and no commit may add to it."""

    async def clear(self, run_id: str, refusal: Refusal) -> None:
        """Delete that of a closed run, to which nothing is added; return when the deletion is durable.

        Requests that wait are refused. If the service ends meanwhile, this returns early.
        """

    def stop_run(self, refusal: RunBroken) -> None:
        """Refuse the requests of a run that an unexpected error has stopped; the journal keeps its entries."""


# ---- The node for which something is written.


@dataclass(frozen=True, slots=True)
class Writer:
    """The node for which a write is done, its lease, and the lease's token."""

    node_id: str
    lease: int
    token: bytes = field(default=b"", repr=False)


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
