"""A TCP port that is a TCPStore to torch's client, and keeps its keys in the store of the run.

torch's TCPStore is two things: a server, which dies with its host, and a client of C++, which each torch program has.
Here the agent is the server, for the processes of its own host, and the run's store has the keys: a host may die, and
no program needs a class of ours, nor Python's global lock for a call.

The protocol is that of torch 2.13's client; tests/torch_client/test_tcp_store.py compares both servers. A connection
begins with VALIDATE, and carries one query at a time. Numbers have 8 bytes, the lowest first; a key and a value are
their length, and their bytes. SET, APPEND, MULTI_SET and QUEUE_PUSH have no reply, so a refused one can only end the
connection. WAIT and BARRIER are replied to when they are over, or when CANCEL_WAIT comes: the client has the timeout.

    query         carries                                       reply
    VALIDATE      MAGIC, 4 bytes
    SET           key, value
    COMPARE_SET   key, expected value, desired value            value afterwards
    GET           key                                           value; empty: there is none
    ADD           key, number                                   sum
    CHECK, WAIT   number of keys, keys                          1 byte: 0, and of CHECK 1 if one is missing
    GETNUMKEYS                                                  number of keys
    DELETE_KEY    key                                           1; 0: there was none
    APPEND        key, value
    MULTI_GET     number of keys, keys                          values
    MULTI_SET     number of keys, a key and a value for each
    CANCEL_WAIT                                                 1 byte: 1
    PING          4 bytes                                       the same
    QUEUE_PUSH    key, value
    QUEUE_POP     key                                           1, the value; 0: the queue is empty
    QUEUE_LEN     key                                           number of values
    LIST_KEYS                                                   number of keys, keys
    BARRIER       key, number of calls to wait for              1 byte: 0
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import Any, TypeVar

from rallypoint.agent.sockets.store import StoreSocketError
from rallypoint.rendezvous.base.limits import FRAME_BYTES, MAX_KEYS, MAX_MULTI_BYTES, MAX_VALUE_BYTES
from rallypoint.rendezvous.store.client import StoreClient
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.loop import cancel_all

T = TypeVar("T")

_log = get_logger("rallypoint.agent.tcp_store")

HOST = "127.0.0.1"
"""The only address: the protocol has no credentials, and no encryption."""

_MAGIC = 0x3C85F7CE
# torch's own limits of a query.
_MOST_KEYS = 128 * 1024
_LONGEST_KEY = 8 * 1024
_STOPPED_WAITING, _CANCELLED = b"\0", b"\1"
# Seconds; a wait starts again after it. The longest that the store allows.
_LONGEST_WAIT = 24 * 3600.0
_BACKLOG = 1024
_NUMBER = struct.Struct("<Q")
_SIGNED = struct.Struct("<q")


class _Query(IntEnum):
    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


class _MalformedQueryError(Exception):
    """Bytes that torch's client does not send."""


class TCPStorePort:
    """Serves one key space of a run after the other, to the processes of this host and user."""

    def __init__(self, client: StoreClient, *, max_connections: int = 1024) -> None:
        """Make a port that does nothing until `start`.

        Args:
            client: The store of the run; stays the caller's to close.
            max_connections: Further ones are closed. Each may hold a query, up to 8 MiB.
        """
        self._client = client
        self._max_connections = max_connections
        self._round = 0
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def start(self) -> int:
        """Listen at a free port, and return it.

        Raises:
            StoreSocketError: No port is free, or the kernel does not name the owners of connections.
        """
        try:
            with (
                socket.create_server((HOST, 0)) as probe,
                socket.create_connection(probe.getsockname()) as own,
            ):
                owner = owner_of(own.getsockname(), probe.getsockname())
            self._server = await asyncio.start_server(self._accept, HOST, 0, backlog=_BACKLOG)
        except OSError as error:
            raise StoreSocketError(
                f"can't serve a TCPStore at {HOST}: {error.strerror or error}; leave out --store rallypoint"
            ) from error
        if owner != os.geteuid():
            raise StoreSocketError(
                "can't serve a TCPStore: this kernel does not name the owner of a TCP connection (INET_DIAG); "
                "leave out --store rallypoint"
            )
        return int(self._server.sockets[0].getsockname()[1])

    def serve(self, round_: int) -> None:
        """Give the space of a round to connections from now on, and end those of the round before."""
        if round_ != self._round:
            self._round = round_
            for writer in self._connections.values():
                writer.transport.abort()

    async def stop(self) -> None:
        """Stop listening, and end all connections."""
        if self._server is None:
            return
        self._server.close()
        await cancel_all(tuple(self._connections))
        await self._server.wait_closed()
        self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(self._connections.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._admits(writer):
                await _Connection(reader, writer, _Space(self._client, self._round)).serve()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the program has closed it
        except _MalformedQueryError as error:
            _log.warning("a connection to the TCPStore port was ended", reason=str(error))
        except ServiceError as error:
            # The client only learns that the connection is lost.
            _log.warning("a call to the TCPStore port failed", reason=error.reason, error=error.message)
        except Exception as error:
            _log.exception("a call to the TCPStore port failed", error=error)
        finally:
            writer.close()

    def _admits(self, writer: asyncio.StreamWriter) -> bool:
        refusal = ""
        peer, own = (writer.get_extra_info(name) for name in ("peername", "sockname"))
        if len(self._connections) > self._max_connections:
            refusal = f"there are {self._max_connections:,} already"
        elif (owner := owner_of(peer, own)) != os.geteuid():
            refusal = f"its user id is {'unknown' if owner is None else owner}; expected {os.geteuid()}"
        if refusal:
            _log.warning("a connection to the TCPStore port was refused", peer=str(peer), reason=refusal)
        return not refusal


class _Connection:
    """One connection of a torch program."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, space: _Space) -> None:
        self._reader = reader
        self._writer = writer
        self._space = space
        # The first byte of the next query, which is awaited during a wait.
        self._ahead: asyncio.Task[bytes] | None = None
        # The key of the last wait, and its value: the client's `get` is a WAIT, and then a GET.
        self._fetched: tuple[str, bytes] | None = None

    async def serve(self) -> None:
        """Reply to queries, one after the other, until the client closes the connection."""
        if await self._reader.readexactly(5) != struct.pack("<BI", _Query.VALIDATE, _MAGIC):
            raise _MalformedQueryError("it does not begin as torch's TCPStore client does")
        try:
            while True:
                code = (await self._next())[0]
                self._ahead = None
                if code not in _ANSWERS:
                    raise _MalformedQueryError(f"query {code} is unknown")
                if code != _Query.GET:
                    self._fetched = None
                await _ANSWERS[code](self)
                await self._writer.drain()
        finally:
            if self._ahead is not None:
                await cancel_all((self._ahead,))

    def _next(self) -> asyncio.Task[bytes] | Coroutine[Any, Any, bytes]:
        return self._ahead if self._ahead is not None else self._reader.readexactly(1)

    # ---- The parts of a query, and of a reply.

    async def _number(self) -> int:
        return int(_NUMBER.unpack(await self._reader.readexactly(8))[0])

    async def _signed(self) -> int:
        return int(_SIGNED.unpack(await self._reader.readexactly(8))[0])

    async def _bytes(self, most: int) -> bytes:
        if (size := await self._number()) > most:
            raise _MalformedQueryError(f"a key or a value of {size:,} bytes; at most {most:,} fit")
        return await self._reader.readexactly(size)

    async def _key(self) -> str:
        try:
            return (await self._bytes(_LONGEST_KEY)).decode()
        except UnicodeDecodeError:
            raise _MalformedQueryError("a key is not UTF-8") from None

    async def _value(self) -> bytes:
        return await self._bytes(MAX_VALUE_BYTES)

    async def _count(self) -> int:
        if (count := await self._number()) > _MOST_KEYS:
            raise _MalformedQueryError(f"{count:,} keys; at most {_MOST_KEYS:,} fit")
        return count

    async def _keys(self) -> list[str]:
        keys: list[str] = []
        size = 0
        for _ in range(await self._count()):
            keys.append(await self._key())
            size += len(keys[-1])
            if size > MAX_MULTI_BYTES:
                raise _MalformedQueryError(f"keys of more than {MAX_MULTI_BYTES:,} bytes in sum")
        return keys

    def _reply(self, *parts: int | bytes) -> None:
        """Send numbers as they are, and bytes with their length before them."""
        for part in parts:
            if isinstance(part, int):
                self._writer.write(_SIGNED.pack(part))
            else:
                self._writer.write(_NUMBER.pack(len(part)) + part)

    # ---- The queries.

    async def set(self) -> None:
        await self._space.set(await self._key(), await self._value())

    async def compare_set(self) -> None:
        self._reply(
            await self._space.compare_set(await self._key(), await self._value(), await self._value())
        )

    async def get(self) -> None:
        key = await self._key()
        fetched, self._fetched = self._fetched, None
        if fetched is not None and fetched[0] == key:
            self._reply(fetched[1])
        else:
            self._reply(await self._space.get(key) or b"")

    async def add(self) -> None:
        self._reply(await self._space.add(await self._key(), await self._signed()))

    async def check(self) -> None:
        self._writer.write(b"\0" if await self._space.check(await self._keys()) else b"\1")

    async def wait(self) -> None:
        keys = await self._keys()
        await self._until_over(self._fetch(keys[0]) if len(keys) == 1 else self._space.wait(keys))

    async def _fetch(self, key: str) -> None:
        self._fetched = key, await self._space.awaited_value(key)

    async def num_keys(self) -> None:
        self._reply(len(await self._space.keys()))

    async def delete_key(self) -> None:
        self._reply(int(await self._space.delete(await self._key())))

    async def append(self) -> None:
        await self._space.append(await self._key(), await self._value())

    async def multi_get(self) -> None:
        for value in await self._space.multi_get(await self._keys()):
            self._reply(value)

    async def multi_set(self) -> None:
        entries: dict[str, bytes] = {}
        size = 0
        for _ in range(await self._count()):
            key, value = await self._key(), await self._value()
            size += len(key.encode()) + len(value) + 2 * FRAME_BYTES
            if size > MAX_MULTI_BYTES or len(entries) == MAX_KEYS:
                await self._space.multi_set(entries)
                entries, size = {}, len(key.encode()) + len(value) + 2 * FRAME_BYTES
            entries[key] = value
        if entries:
            await self._space.multi_set(entries)

    async def cancel_wait(self) -> None:
        self._writer.write(_CANCELLED)  # the reply to the wait is on its way

    async def ping(self) -> None:
        self._writer.write(await self._reader.readexactly(4))

    async def queue_push(self) -> None:
        await self._space.queue_push(await self._key(), await self._value())

    async def queue_pop(self) -> None:
        value = await self._space.queue_pop(await self._key())
        self._reply(*((0,) if value is None else (1, value)))

    async def queue_len(self) -> None:
        self._reply(await self._space.queue_len(await self._key()))

    async def list_keys(self) -> None:
        keys = await self._space.keys()
        self._reply(len(keys), *(key.encode() for key in keys))

    async def barrier(self) -> None:
        key, calls = await self._key(), await self._signed()
        await self._until_over(self._space.barrier(key, calls))

    async def _until_over(self, work: Coroutine[Any, Any, None]) -> None:
        waiting = asyncio.create_task(work)
        self._ahead = asyncio.create_task(self._reader.readexactly(1))
        try:
            await asyncio.wait((waiting, self._ahead), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
                self._writer.write(_STOPPED_WAITING)
                return
            if self._ahead.result()[0] != _Query.CANCEL_WAIT:
                raise _MalformedQueryError("a query came during a wait")
            self._ahead = None
            self._writer.write(_CANCELLED)
        finally:
            await cancel_all((waiting,))


_ANSWERS: dict[int, Callable[[_Connection], Coroutine[Any, Any, None]]] = {
    _Query.SET: _Connection.set,
    _Query.COMPARE_SET: _Connection.compare_set,
    _Query.GET: _Connection.get,
    _Query.ADD: _Connection.add,
    _Query.CHECK: _Connection.check,
    _Query.WAIT: _Connection.wait,
    _Query.GETNUMKEYS: _Connection.num_keys,
    _Query.DELETE_KEY: _Connection.delete_key,
    _Query.APPEND: _Connection.append,
    _Query.MULTI_GET: _Connection.multi_get,
    _Query.MULTI_SET: _Connection.multi_set,
    _Query.CANCEL_WAIT: _Connection.cancel_wait,
    _Query.PING: _Connection.ping,
    _Query.QUEUE_PUSH: _Connection.queue_push,
    _Query.QUEUE_POP: _Connection.queue_pop,
    _Query.QUEUE_LEN: _Connection.queue_len,
    _Query.LIST_KEYS: _Connection.list_keys,
    _Query.BARRIER: _Connection.barrier,
}


class _Space:
    """A key space of the run, with the operations of a TCPStore.

    A queue is the list of its values' numbers, under one key, so that an append puts a value at its end and a
    comparison takes one from its front, each at once. As torch's client waits for a queue as for a key, that key exists
    while the queue has values.
    """

    _KEY, _QUEUE, _ITEM, _BARRIER = "c10d:", "c10d-queue:", "c10d-item:", "c10d-barrier:"
    _ITEM_BYTES = 8

    def __init__(self, client: StoreClient, round_: int) -> None:
        self._client = client
        self._at: dict[str, Any] = {"round": round_}
        self._writing: dict[str, Any] = {"round": round_, "writer_round": round_}

    async def set(self, key: str, value: bytes) -> None:
        await self._client.set(self._KEY + key, value, **self._writing)

    async def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        comparison = await self._client.compare_set(self._KEY + key, expected, desired, **self._writing)
        return expected if comparison.value is None else comparison.value

    async def get(self, key: str, kind: str = _KEY) -> bytes | None:
        try:
            return await self._client.get(kind + key, timeout=0.0, **self._at)
        except ServiceError as error:
            if error.reason != "KEY_WAIT_TIMED_OUT":
                raise
            return None

    async def add(self, key: str, amount: int) -> int:
        return await self._client.add(self._KEY + key, amount, **self._writing)

    async def append(self, key: str, value: bytes) -> None:
        await self._client.append(self._KEY + key, value, **self._writing)

    async def delete(self, key: str) -> bool:
        return await self._client.delete(self._KEY + key, **self._writing)

    async def check(self, keys: Sequence[str]) -> bool:
        for some in self._portions(keys):
            if not await self._client.check(some, **self._at):
                return False
        return True

    async def wait(self, keys: Sequence[str], kind: str = _KEY) -> None:
        for some in self._portions(keys, kind):
            await self._until_there(partial(self._client.wait, some))

    async def awaited_value(self, key: str) -> bytes:
        """Return the value of a key once there is one."""
        return await self._until_there(partial(self._client.get, self._KEY + key))

    async def _until_there(self, call: Callable[..., Coroutine[Any, Any, T]]) -> T:
        while True:
            try:
                return await call(timeout=_LONGEST_WAIT, **self._at)
            except ServiceError as error:
                if error.reason != "KEY_WAIT_TIMED_OUT":
                    raise

    async def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values: list[bytes] = []
        for some in self._portions(keys):
            try:
                values += await self._client.multi_get(some, timeout=0.0, **self._at)
            except ServiceError as error:
                if error.reason not in ("KEY_WAIT_TIMED_OUT", "ANSWER_TOO_LARGE"):
                    raise
                values += [await self.get(key, "") or b"" for key in some]
        return values

    async def multi_set(self, entries: dict[str, bytes]) -> None:
        await self._client.multi_set(
            {self._KEY + key: value for key, value in entries.items()}, **self._writing
        )

    async def keys(self) -> list[str]:
        found: list[str] = []
        page = ""
        while True:
            keys, page = await self._client.list_keys(self._KEY, page, **self._at)
            found += (key.removeprefix(self._KEY) for key in keys)
            if not page:
                return found

    async def barrier(self, key: str, calls: int) -> None:
        """Return when so many calls were made with this key, as torch's server does: a call that gave up counts."""
        if await self.add(key, 1) < calls:
            await self.wait([key], self._BARRIER)
        else:
            await self._client.set(self._BARRIER + key, b"", **self._writing)

    async def queue_push(self, key: str, value: bytes) -> None:
        # In this order: a number in the queue has a value, and a key that exists has had a number.
        number = secrets.token_bytes(self._ITEM_BYTES)
        await self._client.set(self._ITEM + number.hex(), value, **self._writing)
        await self._client.append(self._QUEUE + key, number, **self._writing)
        await self.set(key, b"")

    async def queue_pop(self, key: str) -> bytes | None:
        while True:
            numbers = await self.get(key, self._QUEUE)
            if not numbers:
                return None
            number, rest = numbers[: self._ITEM_BYTES].hex(), numbers[self._ITEM_BYTES :]
            comparison = await self._client.compare_set(self._QUEUE + key, numbers, rest, **self._writing)
            if comparison.swapped:
                break
        value = await self.get(number, self._ITEM)
        await self._client.delete(self._ITEM + number, **self._writing)
        if not rest:
            await self.delete(key)
            if await self.queue_len(key):  # one was pushed before the key was deleted
                await self.set(key, b"")
        return value

    async def queue_len(self, key: str) -> int:
        return len(await self.get(key, self._QUEUE) or b"") // self._ITEM_BYTES

    def _portions(self, keys: Sequence[str], kind: str = _KEY) -> Iterator[list[str]]:
        """Split keys into as many as a request to the store may have; FRAME_BYTES and the kind count for each."""
        portion: list[str] = []
        size = 0
        for key in keys:
            cost = len(key.encode()) + 2 * FRAME_BYTES
            if len(portion) == MAX_KEYS or size + cost > MAX_MULTI_BYTES:
                yield portion
                portion, size = [], 0
            portion.append(kind + key)
            size += cost
        if portion:
            yield portion


# ---- The owner of a connection: TCP has no SO_PEERCRED, but the kernel names the user of each socket.

_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST = 1
_ESTABLISHED = 1
_NO_COOKIE = 0xFFFF_FFFF
_HEADER = struct.Struct("=IHHII")
# family, protocol, extensions, padding, states; ports and addresses in network order; interface, cookie.
_DIAG_REQUEST = (struct.Struct("=BBBBI"), struct.Struct("!HH4s12x4s12x"), struct.Struct("=III"))
# family, state, timer, retransmissions; the connection; expiry, both queues, owner, inode.
_DIAG_REPLY = struct.Struct("=BBBB48xIIIII")


def owner_of(address: tuple[str, int], peer: tuple[str, int]) -> int | None:
    """Return the user id that owns the socket with this address, connected to `peer`; None: unknown.

    Both are IPv4 addresses of this host, in one network namespace.
    """
    query = (
        _DIAG_REQUEST[0].pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED)
        + _DIAG_REQUEST[1].pack(address[1], peer[1], socket.inet_aton(address[0]), socket.inet_aton(peer[0]))
        + _DIAG_REQUEST[2].pack(0, _NO_COOKIE, _NO_COOKIE)
    )
    header = _HEADER.pack(_HEADER.size + len(query), _SOCK_DIAG_BY_FAMILY, _REQUEST, 0, 0)
    with suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.sendto(header + query, (0, 0))
        reply = kernel.recv(1 << 16)
        if _HEADER.unpack_from(reply)[1] == _SOCK_DIAG_BY_FAMILY:
            _, state, _, _, *_, owner, inode = _DIAG_REPLY.unpack_from(reply, _HEADER.size)
            # A socket that its program has closed is reported as root's. So its program must still have it: that of
            # an established connection which has an inode.
            if state == _ESTABLISHED and inode:
                return int(owner)
    return None
