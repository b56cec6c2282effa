"""Requests of the store: check them and extract their fields.

Every function raises ServiceError (INVALID_ARGUMENT) if the request is not valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous.base.entries import RESERVED, Operation, Writer
from rallypoint.rendezvous.base.limits import (
    FRAME_BYTES,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_MULTI_BYTES,
    MAX_PAGE_SIZE,
    MAX_VALUE_BYTES,
)
from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rendezvous.v1 import store_service_pb2 as pb
from rallypoint.rpc.errors import invalid
from rallypoint.serving.requests import EveryField, count, name, page_position, page_size, seconds, token

DEFAULT_PAGE_SIZE = 1_000
# Seconds; longer than any useful wait in one call, and short enough that no timer overflows.
MAX_WAIT = 24 * 3600.0
MAX_SLOT = 65_535

WriteRequest: TypeAlias = (
    pb.SetRequest
    | pb.AddRequest
    | pb.AppendRequest
    | pb.CompareSetRequest
    | pb.MultiSetRequest
    | pb.DeleteRequest
)
ReadRequest: TypeAlias = (
    pb.GetRequest | pb.MultiGetRequest | pb.WaitRequest | pb.CheckRequest | pb.ListKeysRequest
)

_CLIENT_ID = re.compile(r"[!-.0-~]{1,64}")


def check_space(run_id: str, round: int, writer_round: int = 0) -> None:
    """Check the fields that name the space of a request and the round of its writer."""
    with EveryField() as check:
        check(name, "run_id", run_id)
        check(count, "round", round, 0)
        check(count, "writer_round", writer_round, 0)


def check_key(key: str, field: str = "key") -> None:
    """Check a key."""
    if not key:
        raise invalid(field, f"is empty; expected 1 to {MAX_KEY_BYTES} bytes of UTF-8")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise invalid(field, f"is {key[:40]!r}, which has no UTF-8") from None
    if size > MAX_KEY_BYTES:
        raise invalid(field, f"has {size:,} bytes; a key has at most {MAX_KEY_BYTES:,}")
    if key.startswith(RESERVED) or "\x00" in key:
        raise invalid(field, "begins with U+0001, which is reserved, or has a NUL in it")


def check_keys(keys: Sequence[str]) -> list[str]:
    """Check the keys of a read; return each of them once, in their order."""
    if not 1 <= len(keys) <= MAX_KEYS:
        raise invalid("keys", f"has {len(keys):,} keys; expected 1 to {MAX_KEYS:,}")
    for index, key in enumerate(keys):
        check_key(key, f"keys[{index}]")
    _check_multi("keys", sum(len(key.encode()) + FRAME_BYTES for key in keys))
    return list(dict.fromkeys(keys))


def check_value(field: str, values: Iterable[bytes], besides: str = "") -> None:
    """Check the size of a value to be stored.

    Args:
        field: Name of the value's field.
        values: The values that count together.
        besides: The field whose value is counted with it, if any.
    """
    if (size := sum(map(len, values))) > MAX_VALUE_BYTES:
        counted = f"together with {besides} has" if besides else "has"
        raise invalid(
            field, f"{counted} {size:,} bytes; at most {MAX_VALUE_BYTES:,} fit, split it over several keys"
        )


def check_entries(entries: Sequence[pb.StoreEntry]) -> dict[str, bytes]:
    """Check the entries of a MultiSet; return them by key; for a repeated key, the last one."""
    if not 1 <= len(entries) <= MAX_KEYS:
        raise invalid("entries", f"has {len(entries):,} entries; expected 1 to {MAX_KEYS:,}")
    checked: dict[str, bytes] = {}
    size = 0
    for index, entry in enumerate(entries):
        key, value = entry.key, entry.value
        check_key(key, f"entries[{index}].key")
        check_value(f"entries[{index}].value", [value])
        checked[key] = value
        size += len(key.encode()) + len(value) + FRAME_BYTES
    _check_multi("entries", size)
    return checked


def _check_multi(field: str, size: int) -> None:
    if size > MAX_MULTI_BYTES:
        raise invalid(
            field,
            f"has {size:,} bytes, {FRAME_BYTES} for each counted in; at most {MAX_MULTI_BYTES:,} fit, "
            "split it over several requests",
        )


def wait_seconds(timeout: Duration) -> float:
    """Return the time to wait, in seconds."""
    return seconds("timeout", timeout, MAX_WAIT)


def page(request: pb.ListKeysRequest) -> tuple[str, int]:
    """Return the key after which the page begins, and the number of keys on it."""
    after = page_position(request, str)[0] if request.page_token else ""
    return after, page_size(request.page_size, DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def writer_of(request: WriteRequest) -> Writer:
    """Return the node on whose behalf a write to a store is done."""
    if (writer := named_writer(request)) is None:
        raise invalid(
            "writer",
            "is absent; expected the node for which the write is done, with the lease and the token that Join sent; "
            "a worker writes through its agent, at the socket in RALLYPOINT_STORE_SOCKET",
        )
    return writer


def named_writer(request: WriteRequest | state_pb.SetStateRequest) -> Writer | None:
    """Return the node on whose behalf a write is done; None: the request names none."""
    if not request.HasField("writer"):
        return None
    writer = request.writer
    with EveryField() as check:
        check(name, "writer.node_id", writer.node_id)
        check(count, "writer.lease", writer.lease, 1)
        check(token, "writer.token", writer.token)
    return Writer(writer.node_id, writer.lease, writer.token)


def operation_of(request: WriteRequest | state_pb.SetStateRequest) -> Operation | None:
    """Return the client's name for a write; None: it has none."""
    if not request.HasField("operation"):
        return None
    operation = request.operation
    with EveryField() as check:
        check(_check_client_id, operation.client_id)
        check(count, "operation.slot", operation.slot, 0, MAX_SLOT)
        check(count, "operation.sequence", operation.sequence, 1)
    return Operation(operation.client_id, operation.slot, operation.sequence)


def _check_client_id(client_id: str) -> None:
    if not _CLIENT_ID.fullmatch(client_id):
        raise invalid("operation.client_id", 'expected 1 to 64 printable ASCII characters without "/"')
