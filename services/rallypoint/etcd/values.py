"""Requests to etcd and its responses, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.etcd.v1 import kv_pb2, watch_pb2


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key of the store.

    Attributes:
        key: Never empty.
        value: Empty if only keys were requested.
        create_revision: Revision of the store at which the key was last created: the fencing token of its creator.
        mod_revision: Revision at which it was last written.
        version: Writes since its creation, from 1.
        lease: The lease with which it ends; 0: none.
    """

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The content of a range at one revision, in the order of the keys."""

    pairs: Sequence[KeyValue]
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one key. For a deleted key, `pair` has only the key and the revision of its deletion."""

    pair: KeyValue
    deleted: bool
    revision: int


@dataclass(frozen=True, slots=True)
class CreateRevision:
    """Holds if the key was created at this revision; 0: if it does not exist."""

    key: bytes
    equals: int


@dataclass(frozen=True, slots=True)
class ModRevision:
    """Holds if the key was last written at this revision; 0: if it does not exist."""

    key: bytes
    equals: int


Compare = CreateRevision | ModRevision


@dataclass(frozen=True, slots=True)
class Put:
    """Writes a key. `lease`: the lease with which it ends; 0: none."""

    key: bytes
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Removes a key, or the keys from it up to, and excluding, `end`."""

    key: bytes
    end: bytes = b""


@dataclass(frozen=True, slots=True)
class Get:
    """Reads a key."""

    key: bytes
    keys_only: bool = False


Operation = Put | Delete | Get


@dataclass(frozen=True, slots=True)
class Txn:
    """Performs `then` if all conditions of `when` hold and `otherwise` if not, as one step.

    A key may be put only once; etcd accepts 128 operations and 1.5 MiB by default.
    """

    when: Sequence[Compare]
    then: Sequence[Operation]
    otherwise: Sequence[Operation] = ()


@dataclass(frozen=True, slots=True)
class TxnResult:
    """The result of a transaction.

    Attributes:
        revision: Revision of the store after it; the mod_revision of the keys that it wrote.
        found: The keys that each `Get` of the branch found, in order.
    """

    succeeded: bool
    revision: int
    found: Sequence[Sequence[KeyValue]]


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys with this prefix; of all keys if it is empty."""
    kept = prefix.rstrip(b"\xff")
    if not kept:
        # etcd's notation for "to the last key".
        return b"\0"
    return kept[:-1] + bytes([kept[-1] + 1])


# ---- Conversion of our values to etcd's messages, and back.


def to_txn(txn: Txn) -> kv_pb2.TxnRequest:
    """Return a transaction as it is sent."""
    return kv_pb2.TxnRequest(
        compare=[_to_compare(each) for each in txn.when],
        success=[_to_operation(each) for each in txn.then],
        failure=[_to_operation(each) for each in txn.otherwise],
    )


def from_txn(response: kv_pb2.TxnResponse) -> TxnResult:
    """Return the result of a transaction."""
    return TxnResult(
        response.succeeded,
        response.header.revision,
        [
            from_pairs(each.response_range.kvs)
            for each in response.responses
            if each.WhichOneof("response") == "response_range"
        ],
    )


def from_pairs(pairs: Sequence[kv_pb2.KeyValue]) -> list[KeyValue]:
    """Return keys that were read."""
    return [_from_pair(pair) for pair in pairs]


def from_events(events: Sequence[watch_pb2.Event]) -> list[Change]:
    """Return changes that were received."""
    return [
        Change(_from_pair(event.kv), event.type == watch_pb2.Event.EVENT_TYPE_DELETE, event.kv.mod_revision)
        for event in events
    ]


def _from_pair(pair: kv_pb2.KeyValue) -> KeyValue:
    return KeyValue(pair.key, pair.value, pair.create_revision, pair.mod_revision, pair.version, pair.lease)


def _to_compare(compare: Compare) -> kv_pb2.Compare:
    if isinstance(compare, CreateRevision):
        return kv_pb2.Compare(
            target=kv_pb2.Compare.COMPARE_TARGET_CREATE, key=compare.key, create_revision=compare.equals
        )
    return kv_pb2.Compare(
        target=kv_pb2.Compare.COMPARE_TARGET_MOD, key=compare.key, mod_revision=compare.equals
    )


def _to_operation(operation: Operation) -> kv_pb2.RequestOp:
    if isinstance(operation, Put):
        put = kv_pb2.PutRequest(key=operation.key, value=operation.value, lease=operation.lease)
        return kv_pb2.RequestOp(request_put=put)
    if isinstance(operation, Delete):
        delete = kv_pb2.DeleteRangeRequest(key=operation.key, range_end=operation.end)
        return kv_pb2.RequestOp(request_delete_range=delete)
    get = kv_pb2.RangeRequest(key=operation.key, keys_only=operation.keys_only)
    return kv_pb2.RequestOp(request_range=get)
