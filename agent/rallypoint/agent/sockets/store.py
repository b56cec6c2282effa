"""The agent's side of the store socket: receives workers' calls and forwards them to the store service.

The protocol is that of docs/store-socket.md. One call at a time per connection, so a call that waits delays no other
connection, and the memory that a worker can use in the agent is bounded: one frame each way per connection.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from rallypoint.rendezvous.store.client import StoreClient
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.logs import get_logger
from rallypoint.worker.store import MAX_PART_BYTES, PREFIX, encode_frame

T = TypeVar("T")

_log = get_logger("rallypoint.agent.store_socket")

# Connections that the kernel queues until they are accepted: the workers of a host connect at the same moment.
_BACKLOG = 1024


class StoreSocketError(Exception):
    """The socket can't be opened; the message has the reason and the remedy, in one line."""


class MalformedCallError(Exception):
    """A frame that violates the protocol."""


class StoreSocket:
    """Serves the store of one run to the workers of one host."""

    def __init__(self, path: Path, client: StoreClient, *, max_connections: int = 1024) -> None:
        """Make a socket that does nothing until `start`.

        Args:
            path: Of the socket; at most 107 bytes. Only the agent should have access to its folder.
            client: The store of the run; stays the caller's to close.
            max_connections: Workers' threads that may be in a call at the same time. Each may hold a frame, up
                to 8 MiB. Further ones get the error TOO_MANY_CONNECTIONS.
        """
        self._path = path
        self._client = client
        self._max_connections = max_connections
        self._connections: set[_WorkerConnection] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            StoreSocketError: The path can't be used.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_unix_server(
                lambda: _WorkerConnection(self._client, self._connections, self._max_connections),
                str(self._path),
                backlog=_BACKLOG,
            )
            # Write access to the socket is write access to the run's store.
            self._path.chmod(0o600)
        except OSError as error:
            raise StoreSocketError(
                f"can't listen for workers at {self._path}: {error.strerror or error}"
            ) from error

    async def stop(self) -> None:
        """Stop listening, end every call, close every connection."""
        if self._server is None:
            return
        self._server.close()
        await asyncio.gather(*(connection.end() for connection in tuple(self._connections)))
        await self._server.wait_closed()
        self._server = None
        self._path.unlink(missing_ok=True)


class _WorkerConnection(asyncio.Protocol):
    """One connection of a worker."""

    _transport: asyncio.WriteTransport

    def __init__(self, client: StoreClient, connections: set[_WorkerConnection], most: int) -> None:
        self._client = client
        self._connections = connections
        self._most = most
        self._received = bytearray()
        self._call: asyncio.Task[None] | None = None
        self._over_limit = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._connections.add(self)
        self._over_limit = len(self._connections) > self._most

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._call is not None:
            # The worker is gone, and no caller waits for the reply.
            self._call.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            if self._call is not None:
                raise MalformedCallError("a call arrived before the reply to the previous one")
            self._received += data
            frame = _take_frame(self._received)
        except MalformedCallError as error:
            # The next call can't be distinguished from the rest of the broken frame.
            self._close_with_error(_malformed(error))
            return
        if frame is None:
            return
        if self._over_limit:
            self._close_with_error(
                {
                    "code": "RESOURCE_EXHAUSTED",
                    "reason": "TOO_MANY_CONNECTIONS",
                    "message": f"the agent serves at most {self._most} concurrent calls to the store",
                }
            )
            return
        self._call = asyncio.get_running_loop().create_task(self._reply(*frame))

    async def end(self) -> None:
        """End the call in progress, and the connection."""
        self._transport.abort()
        if self._call is not None:
            self._call.cancel()
            await asyncio.wait([self._call])

    async def _reply(self, header: bytes, body: bytes) -> None:
        try:
            reply = await carry_out(self._client, header, body)
        except ServiceError as error:
            reply = encode_frame({"error": _described(error)}, b"")
        except MalformedCallError as error:
            reply = encode_frame({"error": _malformed(error)}, b"")
        except Exception as error:
            # Without a reply the worker would wait until its timeout. One cause is known: the agent closed the
            # channel to the service, because it is ending.
            _log.exception("store.call_failed", header=header[:200].decode(errors="replace"))
            described = {
                "code": "UNAVAILABLE",
                "reason": "AGENT_FAILED",
                "message": f"the agent failed: {error}",
            }
            reply = encode_frame({"error": described}, b"")
        # Reset before the reply is sent: the worker's next call may come at once.
        self._call = None
        self._transport.write(reply)

    def _close_with_error(self, error: dict[str, Any]) -> None:
        self._transport.write(encode_frame({"error": error, "last": True}, b""))
        self._transport.close()


def _take_frame(received: bytearray) -> tuple[bytes, bytes] | None:
    """Remove one complete frame from the received bytes; None if it is not complete yet."""
    if len(received) < PREFIX.size:
        return None
    header_size, body_size = PREFIX.unpack_from(received)
    if max(header_size, body_size) > MAX_PART_BYTES:
        raise MalformedCallError(
            f"a frame of {header_size:,} + {body_size:,} bytes; each part has at most {MAX_PART_BYTES:,}"
        )
    end = PREFIX.size + header_size + body_size
    if len(received) < end:
        return None
    if len(received) > end:
        raise MalformedCallError("a call arrived before the reply to the previous one")
    header = bytes(received[PREFIX.size : PREFIX.size + header_size])
    body = bytes(received[PREFIX.size + header_size :])
    received.clear()
    return header, body


@dataclass(frozen=True, slots=True)
class _StoreCall:
    """One call: header fields and body."""

    fields: Mapping[str, Any]
    body: bytes

    def field(self, name: str, kind: type[T]) -> T:
        value = self.fields.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise MalformedCallError(f"field {name!r} is {value!r}; expected {kind.__name__}")
        return value

    def string(self, name: str) -> str:
        value = self.field(name, str)
        if not _is_text(value):
            raise MalformedCallError(f"field {name!r} is {value!r}, which cannot be encoded as UTF-8")
        return value

    def strings(self, name: str) -> list[str]:
        values = self.field(name, list)
        if not all(isinstance(value, str) and _is_text(value) for value in values):
            raise MalformedCallError(f"field {name!r} must be a list of Unicode strings only")
        return values

    def integer(self, name: str, bits: int) -> int:
        value = self.field(name, int)
        if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise MalformedCallError(f"field {name!r} is {value}, which does not fit into {bits} bits")
        return value

    @property
    def space(self) -> dict[str, Any]:
        timeout = self.fields.get("timeout")
        # In Python True is an integer, and its JSON parser accepts Infinity.
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is None or not is_number or not 0 <= timeout < math.inf:
            raise MalformedCallError(f"field 'timeout' is {timeout!r}; expected seconds, at least 0")
        return {"round": self.integer("round", 32), "timeout": float(timeout)}

    @property
    def writing(self) -> dict[str, Any]:
        return self.space | {"writer_round": self.integer("writer_round", 32)}


async def carry_out(client: StoreClient, header: bytes, body: bytes) -> bytes:
    """Carry out one call; return the reply frame.

    Raises:
        ServiceError: The store refused it, or can't be reached.
        MalformedCallError: It violates the protocol.
    """
    try:
        fields = json.loads(header)
    except ValueError:
        raise MalformedCallError("the header is not JSON") from None
    if not isinstance(fields, dict):
        raise MalformedCallError("the header is not a JSON object")
    call = _StoreCall(fields, body)
    name = call.string("op")
    if name not in _OPERATIONS:
        raise MalformedCallError(f"field 'op' is {name!r}; expected one of {', '.join(_OPERATIONS)}")
    reply, value = await _OPERATIONS[name](client, call)
    return encode_frame(reply, value)


_Reply = tuple[dict[str, Any], bytes]


async def _set(client: StoreClient, call: _StoreCall) -> _Reply:
    await client.set(call.string("key"), call.body, **call.writing)
    return {}, b""


async def _get(client: StoreClient, call: _StoreCall) -> _Reply:
    return {}, await client.get(call.string("key"), **call.space)


async def _add(client: StoreClient, call: _StoreCall) -> _Reply:
    amount = call.integer("amount", 64)
    return {"value": await client.add(call.string("key"), amount, **call.writing)}, b""


async def _compare_set(client: StoreClient, call: _StoreCall) -> _Reply:
    length = call.integer("expected_length", 32)
    if not 0 <= length <= len(call.body):
        raise MalformedCallError(f"field 'expected_length' is {length}; the body has {len(call.body)} bytes")
    expected, desired = call.body[:length], call.body[length:]
    comparison = await client.compare_set(call.string("key"), expected, desired, **call.writing)
    exists = comparison.value is not None
    return {"swapped": comparison.swapped, "exists": exists}, comparison.value or b""


async def _wait(client: StoreClient, call: _StoreCall) -> _Reply:
    await client.wait(call.strings("keys"), **call.space)
    return {}, b""


async def _check(client: StoreClient, call: _StoreCall) -> _Reply:
    return {"present": await client.check(call.strings("keys"), **call.space)}, b""


async def _delete(client: StoreClient, call: _StoreCall) -> _Reply:
    return {"deleted": await client.delete(call.string("key"), **call.writing)}, b""


async def _keys(client: StoreClient, call: _StoreCall) -> _Reply:
    keys, page = await client.list_keys(call.string("prefix"), call.string("page"), **call.space)
    return {"next_page": page}, json.dumps(keys).encode()


_OPERATIONS: dict[str, Callable[[StoreClient, _StoreCall], Awaitable[_Reply]]] = {
    "set": _set,
    "get": _get,
    "add": _add,
    "compare_set": _compare_set,
    "wait": _wait,
    "check": _check,
    "delete": _delete,
    "keys": _keys,
}


def _is_text(value: str) -> bool:
    """True if a string can be encoded as UTF-8; JSON can express half of a surrogate pair, which cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _malformed(error: MalformedCallError) -> dict[str, Any]:
    return {"code": "INVALID_ARGUMENT", "reason": "MALFORMED_CALL", "message": str(error)}


def _described(error: ServiceError) -> dict[str, Any]:
    described: dict[str, Any] = {"code": error.code.name, "reason": error.reason, "message": error.message}
    current_round = error.metadata.get("current_round", "")
    if current_round.isdigit():
        described["current_round"] = int(current_round)
    return described
