"""Our values as etcd's messages, and back."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.etcd.v1 import kv_pb2, watch_pb2
from rallypoint.etcd.values import (
    Change,
    Compare,
    CreateRevision,
    Delete,
    KeyValue,
    Operation,
    Put,
    Txn,
    TxnResult,
)


def to_txn(txn: Txn) -> kv_pb2.TxnRequest:
    """A transaction as it is sent."""
    return kv_pb2.TxnRequest(
        compare=[_to_compare(each) for each in txn.when],
        success=[_to_operation(each) for each in txn.then],
        failure=[_to_operation(each) for each in txn.otherwise],
    )


def from_txn(response: kv_pb2.TxnResponse) -> TxnResult:
    """What came of it."""
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
    """Keys as they were read."""
    return [_from_pair(pair) for pair in pairs]


def from_events(events: Sequence[watch_pb2.Event]) -> list[Change]:
    """Changes as they were told."""
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
    get = kv_pb2.RangeRequest(
        key=operation.key, range_end=operation.end, limit=operation.limit, keys_only=operation.keys_only
    )
    return kv_pb2.RequestOp(request_range=get)
