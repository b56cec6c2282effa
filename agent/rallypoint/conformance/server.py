"""Services that play a script: two replicas of rendezvous on loopback, with a timer service each."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc
from cryptography import x509

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.errors import ServiceError, encode
from rallypoint.rpc.loop import Notifier
from rallypoint.rpc.run_secret import Authority, new_key
from rallypoint.timer.v1 import timer_service_pb2 as timer_pb

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_RENDEZVOUS = "rallypoint.rendezvous.v1.RendezvousService"
_TIMERS = "rallypoint.timer.v1.TimerService"
Reply: TypeAlias = pb.JoinResponse | timer_pb.SuperviseResponse | ServiceError | None
"""A message of the service, or the end of a stream: with an error, or with OK (None)."""

HOST = "127.0.0.1"
_CHUNK = 1 << 16
_GRACE = 60.0  # seconds that streams may last after GOAWAY
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset
# No port is shared with another server. The least interval of pings is that of the real service.
_ARGUMENTS = (
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class Stream:
    """One stream of the client, which the scenario answers. Messages of Supervise are its actions.

    Attributes:
        first: Its first message.
        opened_at: Loop time of its beginning.
        replica: The replica that it was opened to: 0 or 1.
        messages: The messages after the first, each with the loop time at which it came.
        over: True once the stream has ended, for any reason.
    """

    def __init__(self, first: Any, replica: int, changed: Notifier) -> None:
        self.first = first
        self.opened_at = asyncio.get_running_loop().time()
        self.replica = replica
        self.messages: list[tuple[float, Any]] = []
        self.over = False
        self._changed = changed
        self._outbox: asyncio.Queue[Reply] = asyncio.Queue()

    def send(self, reply: Reply) -> None:
        """Send a message, or the end of the stream."""
        self._outbox.put_nowait(reply)

    @property
    def kinds(self) -> list[str]:
        """The kind of each message after the first."""
        return [kind_of(message) for _, message in self.messages]

    def of(self, kind: str) -> list[Any]:
        """Return the messages of a kind that have come so far."""
        return [message for _, message in self.messages if kind_of(message) == kind]

    async def play(self, requests: AsyncIterator[Any], context: _Context) -> None:
        """Serve the stream until the scenario or the client ends it."""
        reader = asyncio.create_task(self._read(requests))
        try:
            while (item := await self._outbox.get()) is not None:
                if isinstance(item, ServiceError) and not item.reason:
                    await context.abort(item.code, item.message)
                elif isinstance(item, ServiceError):
                    await context.abort_with_status(encode(item))
                else:
                    await context.write(item)
        finally:
            self.over = True
            reader.cancel()
            self._changed.notify()

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for message in requests:
                self.messages.append((asyncio.get_running_loop().time(), message))
                self._changed.notify()
        finally:
            # The client has closed its side, or the whole stream.
            self.over = True
            self._changed.notify()


def kind_of(message: Any) -> str:
    """Return the name of the field that is set, or "None"."""
    return str(message.WhichOneof(message.DESCRIPTOR.oneofs[0].name))


def new_authority() -> Authority:
    """Return an authority for the time of a scenario, on hosts of which the clocks may differ by a day."""
    now = datetime.now(UTC)
    return Authority("conformance", new_key(), now - timedelta(days=1), now + timedelta(days=1))


class Relay:
    """Passes TCP connections on to a server, so that they can be reset.

    Attributes:
        connections: How many there have been.
        cutting: True to pass half of what the server sends next, and to reset the connection then.
    """

    def __init__(self, changed: Notifier) -> None:
        self.connections = 0
        self.cutting = False
        self._changed = changed
        self._target = ""
        self._server: asyncio.Server | None = None

    async def start(self, address: str, target: str) -> None:
        """Listen at an address, as host:port, for connections to another one."""
        self._target = target
        self._server = await asyncio.start_server(self._accept, *address.split(":"))

    def stop(self) -> None:
        """Take no more connections; those that there are end with the server."""
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._changed.notify()
        try:
            from_server, to_server = await asyncio.open_connection(*self._target.split(":"))
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass(reader, to_server), self._pass(from_server, writer, down=True))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, down: bool = False
    ) -> None:
        with suppress(OSError, RuntimeError):  # RuntimeError: the loop, which ends, closed the writer
            while data := await reader.read(_CHUNK):
                if down and self.cutting:
                    writer.write(data[: len(data) // 2])
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    writer.transport.abort()
                    self.cutting = False
                    return
                writer.write(data)
                await writer.drain()
        writer.close()


class ScriptedService:
    """Two replicas, and all streams that the client opens, in order.

    Attributes:
        authority: Its certificate authority; None: plaintext.
        relays: The way to each replica.
        addresses: Of the replicas, as host:port; the client gets the first.
        streams: The streams of Join so far, of both.
        watches: The streams of Supervise so far, of both.
        batches: How many messages came on those.
        script: The reply to every stream of Join that is opened from now on, by replica; empty: the scenario replies.
        refusal: The same for Supervise; None: the scenario replies.
        changed: Notified of streams, messages and ends.
    """

    def __init__(self, authority: Authority | None) -> None:
        """Reserve the addresses; serve nothing yet."""
        self.authority = authority
        # Bound and not listening, they keep the ports while the service is away.
        self._reserved = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(2)]
        for each in self._reserved:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind((HOST, 0))
        self.addresses = [f"{HOST}:{each.getsockname()[1]}" for each in self._reserved]
        self.streams: list[Stream] = []
        self.watches: list[Stream] = []
        self.batches = 0
        self.refusal: ServiceError | None = None
        self.script: list[list[Reply]] = [[], []]
        self.changed = Notifier()
        self.relays = [Relay(self.changed) for _ in self.addresses]
        self._servers: list[grpc.aio.Server] = []
        self._leaving: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        for each in self._reserved:
            each.close()

    async def start(self, authority: Authority | None = None, name: str = HOST) -> None:
        """Serve both addresses; with TLS, show a certificate of this authority, or of the right one, for a name."""
        for replica, address in enumerate(self.addresses):
            server = grpc.aio.server(options=_ARGUMENTS)
            join = grpc.stream_stream_rpc_method_handler(
                partial(self._serve, replica), pb.JoinRequest.FromString, pb.JoinResponse.SerializeToString
            )
            supervise = grpc.stream_stream_rpc_method_handler(
                partial(self._supervise, replica),
                timer_pb.SuperviseRequest.FromString,
                timer_pb.SuperviseResponse.SerializeToString,
            )
            server.add_generic_rpc_handlers(
                [
                    grpc.method_handlers_generic_handler(_RENDEZVOUS, {"Join": join}),
                    grpc.method_handlers_generic_handler(_TIMERS, {"Supervise": supervise}),
                ]
            )
            if self.authority is None:
                port = server.add_insecure_port(f"{HOST}:0")
            else:
                names = [x509.IPAddress(ip_address(name)) if name == HOST else x509.DNSName(name)]
                issuer = authority or self.authority
                certificate, key = issuer.issue("server", x509.SubjectAlternativeName(names))
                port = server.add_secure_port(f"{HOST}:0", grpc.ssl_server_credentials([(key, certificate)]))
            self._servers.append(server)
            await server.start()
            await self.relays[replica].start(address, f"{HOST}:{port}")

    async def stop(self) -> None:
        """Close all connections at once, as a process that ends."""
        for relay in self.relays:
            relay.stop()
        # Kept until then: Ctrl-C may come before, and one that still runs at the program's end shows a traceback.
        await asyncio.gather(*(server.stop(None) for server in self._servers))
        self._servers.clear()

    async def replace(self) -> None:
        """Serve new connections by another server; the old one sends GOAWAY, and ends with its streams."""
        old = list(self._servers)
        for relay in self.relays:
            relay.stop()
        await self.start()
        self._leaving = [asyncio.create_task(server.stop(_GRACE)) for server in old]

    async def _serve(self, replica: int, requests: AsyncIterator[Any], context: _Context) -> None:
        """Serve one stream of Join."""
        await self._play(self.streams, replica, self.script[replica], requests, context)

    async def _supervise(self, replica: int, requests: AsyncIterator[Any], context: _Context) -> None:
        """Serve one stream of Supervise."""

        async def actions() -> AsyncIterator[Any]:
            async for request in requests:
                self.batches += 1
                for action in request.actions:
                    yield action

        await self._play(self.watches, replica, [self.refusal] if self.refusal else [], actions(), context)

    async def _play(
        self,
        streams: list[Stream],
        replica: int,
        script: list[Reply],
        requests: AsyncIterator[Any],
        context: _Context,
    ) -> None:
        async for first in requests:
            stream = Stream(first, replica, self.changed)
            streams.append(stream)
            for reply in script:
                stream.send(reply)
            self.changed.notify()
            await stream.play(requests, context)
            return
