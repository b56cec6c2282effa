"""Operations: how a write that is repeated takes effect once, over restarts of the server too.

Each client numbers its writes in slots, one at a time per slot, as sessions of NFS 4.1 do (RFC 8881, 2.10.6).
The last write of each slot that changed something is kept as a record, in the space it changed and in the
same journal append, until the slot goes on or the run is forgotten. So a record is there exactly when its write was
carried out, and a slot costs one entry however many writes it has seen. A write that changed nothing needs no record:
to carry it out again is as good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rallypoint.rendezvous.store.refusals import OperationReused, OperationSuperseded

# No key of a client begins so.
RESERVED = "\x01"


@dataclass(frozen=True, slots=True)
class Operation:
    """A client's name for one of its writes.

    Attributes:
        client_id: Drawn at random by each client process.
        slot: One write at a time goes through a slot.
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
    """What is kept of a slot's last write.

    Attributes:
        sequence: Number of the write in its slot.
        stamp: Grows with every record of the run; says which slots were used last, after a restart too.
        fingerprint: Checksum of the request: tells a repetition from a client that forgot to count.
        result: What the write answered, as an integer.
        round: The space that the write changed, and that the journal keeps the record in.
    """

    sequence: int
    stamp: int
    fingerprint: int
    result: int
    round: int = 0

    def encode(self) -> bytes:
        """Return the record as a value of the journal: four decimal numbers. Where that is, says the round."""
        return b"%d %d %d %d" % (self.sequence, self.stamp, self.fingerprint, self.result)

    @classmethod
    def decode(cls, value: bytes, round: int = 0) -> OperationRecord:
        """Read what `encode` wrote, in the space of `round`.

        Raises:
            ValueError: It is no such record.
        """
        sequence, stamp, fingerprint, result = (int(number) for number in value.split())
        return cls(sequence, stamp, fingerprint, result, round)


def is_repetition(operation: Operation, fingerprint: Callable[[], int], record: OperationRecord) -> bool:
    """Return whether a request was carried out before, and has its answer in the slot's record.

    Args:
        operation: The client's name for the request.
        fingerprint: Computes the request's checksum.
        record: What is kept of the operation's slot.

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
