"""A timer service that follows a test's script."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.serving.server import Registration, Server
from rallypoint.timer.v1 import timer_service_pb2 as pb

SERVICE = "rallypoint.timer.v1.TimerService"


class Scripted:
    """A script for each stream in order; the last one is used for all that follow."""

    def __init__(self, *streams: Any) -> None:
        """Each is called with this object, the stream's requests and its context, and yields the events to send."""
        self.streams = list(streams)
        # The actions received, by stream, as far as the script has read.
        self.seen: list[list[pb.SuperviseAction]] = []

    async def supervise(self, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseResponse]:
        """Serve the only method of this service."""
        self.seen.append([])
        stream = self.streams[min(len(self.seen), len(self.streams)) - 1]
        async for event in stream(self, requests, context):
            yield pb.SuperviseResponse(events=[event])

    def register(self, server: grpc.aio.Server) -> None:
        """Register as the server's timer service."""

        supervise = grpc.stream_stream_rpc_method_handler(
            self.supervise,
            request_deserializer=pb.SuperviseRequest.FromString,
            response_serializer=pb.SuperviseResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Supervise": supervise})
        server.add_generic_rpc_handlers((handler,))


async def listen(script: Scripted, requests: Any, count: int) -> None:
    """Read until `count` actions of this stream were received."""
    while len(script.seen[-1]) < count:
        script.seen[-1].extend((await anext(requests)).actions)


@asynccontextmanager
async def serving(script: Scripted, folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """Start the service, and yield a channel to it."""
    server = Server(
        ServerOptions(host=f"unix:{folder / 's'}"), services=[Registration(SERVICE, script.register)]
    )
    await server.start()
    async with open_channel(server.address) as channel:
        yield channel
    await server.stop()
