"""What is asked of etcd and what it answers, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key of the store.

    Attributes:
        key: Never empty.
        value: Empty where only keys were asked for.
        create_revision: Revision of the store at which the key was last made: the fencing token of who made it.
        mod_revision: Revision at which it was last written.
        version: Writes since it was made, from 1.
        lease: With which it dies; 0: none.
    """

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a range held at one revision, in the order of the keys."""

    pairs: Sequence[KeyValue]
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one key. Of a deleted key, `pair` has the key and the revision of its deletion only."""

    pair: KeyValue
    deleted: bool
    revision: int


@dataclass(frozen=True, slots=True)
class CreateRevision:
    """Holds if the key was made at this revision; 0: if it isn't there."""

    key: bytes
    equals: int


@dataclass(frozen=True, slots=True)
class ModRevision:
    """Holds if the key was last written at this revision; 0: if it isn't there."""

    key: bytes
    equals: int


Compare = CreateRevision | ModRevision


@dataclass(frozen=True, slots=True)
class Put:
    """Writes a key. `lease`: with which it dies; 0: none."""

    key: bytes
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Removes a key, or the keys from it up to and without `end`."""

    key: bytes
    end: bytes = b""


@dataclass(frozen=True, slots=True)
class Get:
    """Reads a key, or the keys from it up to and without `end`; at most `limit` of them if that isn't 0."""

    key: bytes
    end: bytes = b""
    limit: int = 0
    keys_only: bool = False


Operation = Put | Delete | Get


@dataclass(frozen=True, slots=True)
class Txn:
    """Does `then` if everything in `when` holds and `otherwise` if not, as one step.

    A key may be put once only; etcd takes 128 operations and 1.5 MiB unless it was told otherwise.
    """

    when: Sequence[Compare]
    then: Sequence[Operation]
    otherwise: Sequence[Operation] = ()


@dataclass(frozen=True, slots=True)
class TxnResult:
    """What came of a transaction.

    Attributes:
        succeeded: Whether the conditions held.
        revision: Of the store after it; the mod_revision of what it wrote.
        found: The keys that each `Get` of the branch found, in order.
    """

    succeeded: bool
    revision: int
    found: Sequence[Sequence[KeyValue]]


def prefix_end(prefix: bytes) -> bytes:
    """The end of the range of all keys with this prefix; all keys there are for an empty one."""
    kept = prefix.rstrip(b"\xff")
    if not kept:
        # etcd's notation for "to the last key".
        return b"\0"
    return kept[:-1] + bytes([kept[-1] + 1])
