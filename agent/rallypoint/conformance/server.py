"""A rendezvous service that plays a script: two replicas on loopback, plaintext, whose streams a scenario serves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias

import grpc

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.errors import ServiceError, encode
from rallypoint.rpc.loop import Notifier

_Context: TypeAlias = "grpc.aio.ServicerContext[pb.JoinRequest, pb.JoinResponse]"

_SERVICE = "rallypoint.rendezvous.v1.RendezvousService"
Reply: TypeAlias = pb.JoinResponse | ServiceError | None
"""A message of the service, or the end of a stream: with an error, or with OK (None)."""

# No port is shared with another server. The least interval of pings is that of the real service.
_ARGUMENTS = (
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class Stream:
    """One stream of the client, which the scenario answers.

    Attributes:
        first: Its first message.
        opened_at: Loop time of its beginning.
        replica: The replica that it was opened to: 0 or 1.
        messages: The messages after the first, each with the loop time at which it came.
        over: True once the stream has ended, for any reason.
    """

    def __init__(self, first: pb.JoinRequest, replica: int, changed: Notifier) -> None:
        self.first = first
        self.opened_at = asyncio.get_running_loop().time()
        self.replica = replica
        self.messages: list[tuple[float, pb.JoinRequest]] = []
        self.over = False
        self._changed = changed
        self._outbox: asyncio.Queue[Reply] = asyncio.Queue()

    def send(self, reply: Reply) -> None:
        """Send a message, or the end of the stream."""
        self._outbox.put_nowait(reply)

    def of(self, kind: str) -> list[pb.JoinRequest]:
        """Return the messages of a kind that have come so far."""
        return [message for _, message in self.messages if message.WhichOneof("message") == kind]

    async def play(self, requests: AsyncIterator[pb.JoinRequest], context: _Context) -> None:
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

    async def _read(self, requests: AsyncIterator[pb.JoinRequest]) -> None:
        try:
            async for message in requests:
                self.messages.append((asyncio.get_running_loop().time(), message))
                self._changed.notify()
        finally:
            # The client has closed its side, or the whole stream.
            self.over = True
            self._changed.notify()


class ScriptedService:
    """Two replicas, and all streams that the client opens, in order.

    Attributes:
        addresses: Of the replicas, as host:port; the client gets the first.
        streams: The streams so far, of both.
        script: The reply to every stream that is opened from now on, by replica; empty: the scenario replies.
        changed: Notified of streams, messages and ends.
    """

    def __init__(self) -> None:
        """Reserve the addresses; serve nothing yet."""
        # Bound and not listening, they keep the ports while the service is away.
        self._reserved = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(2)]
        for each in self._reserved:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        self.addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in self._reserved]
        self.streams: list[Stream] = []
        self.script: list[list[Reply]] = [[], []]
        self.changed = Notifier()
        self._servers: list[grpc.aio.Server] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        for each in self._reserved:
            each.close()

    async def start(self) -> None:
        """Serve both addresses."""
        for replica, address in enumerate(self.addresses):
            server = grpc.aio.server(options=_ARGUMENTS)
            handler = grpc.stream_stream_rpc_method_handler(
                partial(self._serve, replica), pb.JoinRequest.FromString, pb.JoinResponse.SerializeToString
            )
            server.add_generic_rpc_handlers(
                [grpc.method_handlers_generic_handler(_SERVICE, {"Join": handler})]
            )
            server.add_insecure_port(address)
            await server.start()
            self._servers.append(server)

    async def stop(self) -> None:
        """Close all connections at once, as a process that ends."""
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(None) for server in servers))

    async def _serve(self, replica: int, requests: AsyncIterator[pb.JoinRequest], context: _Context) -> None:
        """Serve one stream."""
        async for first in requests:
            stream = Stream(first, replica, self.changed)
            self.streams.append(stream)
            for reply in self.script[replica]:
                stream.send(reply)
            self.changed.notify()
            await stream.play(requests, context)
            return
