"""Requests of the store: what is well formed, and what it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous.store.operations import RESERVED, Operation
from rallypoint.rendezvous.v1 import store_service_pb2 as pb
from rallypoint.serving.errors import invalid

MAX_KEY_BYTES = 1024
# A gRPC message has 4 MiB by default; 16 KiB of them for the key, the names and the framing around a value.
MAX_VALUE_BYTES = 4 * 1024 * 1024 - 16 * 1024
MAX_KEYS = 10_000
# As many of the longest keys are 2 MiB: they fit into one answer.
MAX_PAGE_SIZE = 2_000
DEFAULT_PAGE_SIZE = 1_000
# Longer than anybody should wait in one call, and short enough that no timer overflows. Seconds.
MAX_WAIT = 24 * 3600.0
MAX_SLOT = 65_535

_CLIENT_ID = re.compile(r"[!-.0-~]{1,64}")


def check_space(run_id: str, round: int, writer_round: int = 0) -> None:
    """Check the fields that say where a request goes, and on whose behalf.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if not run_id:
        raise invalid("run_id", "is empty; expected the name of the run")
    if round < 0:
        raise invalid("round", f"is {round}; expected 0 for the run's own space, or the number of a round")
    if writer_round < 0:
        raise invalid("writer_round", f"is {writer_round}; expected 0 or the number of the writer's round")


def check_key(key: str, field: str = "key") -> None:
    """Check a key.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
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
    """Check keys; return each of them once, in their order.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if not 1 <= len(keys) <= MAX_KEYS:
        raise invalid("keys", f"has {len(keys):,} keys; expected 1 to {MAX_KEYS:,}")
    for index, key in enumerate(keys):
        check_key(key, f"keys[{index}]")
    return list(dict.fromkeys(keys))


def check_value(field: str, values: Iterable[bytes]) -> None:
    """Check the size of what is to be stored.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if (size := sum(map(len, values))) > MAX_VALUE_BYTES:
        raise invalid(
            field, f"has {size:,} bytes; at most {MAX_VALUE_BYTES:,} fit, split it over several keys"
        )


def wait_seconds(timeout: Duration) -> float:
    """Return how long to wait, in seconds.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    seconds = timeout.seconds + timeout.nanos / 1e9
    if not (0 <= seconds <= MAX_WAIT and abs(timeout.nanos) < 1_000_000_000):
        raise invalid("timeout", f"is {seconds:g} s; expected 0 to {MAX_WAIT:,.0f} s")
    return seconds


def page(request: pb.ListKeysRequest) -> int:
    """Return how many keys to list.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if not 0 <= request.page_size <= MAX_PAGE_SIZE:
        raise invalid("page_size", f"is {request.page_size}; expected 0 to {MAX_PAGE_SIZE:,}")
    return request.page_size or DEFAULT_PAGE_SIZE


def operation_of(
    request: pb.SetRequest | pb.AddRequest | pb.CompareSetRequest | pb.DeleteRequest,
) -> Operation | None:
    """Return the client's name for a write; None: it gave none.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if not request.HasField("operation"):
        return None
    operation = request.operation
    if not _CLIENT_ID.fullmatch(operation.client_id):
        raise invalid("operation.client_id", 'expected 1 to 64 printable ASCII characters without "/"')
    if operation.slot > MAX_SLOT:
        raise invalid("operation.slot", f"is {operation.slot}; expected at most {MAX_SLOT}")
    if operation.sequence < 1:
        raise invalid("operation.sequence", f"is {operation.sequence}; expected at least 1")
    return Operation(operation.client_id, operation.slot, operation.sequence)
