"""A rendezvous service on a real socket with a run in a final round, and clients that list and watch its events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.servicer import RendezvousServicer
from rallypoint.rendezvous.base.limits import RendezvousLimits
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.commands import SERVICE
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import Plaintext, ServerOptions
from rallypoint.rpc.errors import ServiceError, decode
from rallypoint.serving.server import Registration, Server
from rendezvous.engine_fixtures import RUN, Stage, staged
from rendezvous.locators import locator_of
from support.waiting import PATIENCE

LIMITS = RendezvousLimits(events_per_run=200, subscribers_per_run=3)

BEGINNING = [
    "RUN_CREATED",
    "NODE_JOINED",
    "NODE_JOINED",
    "ROUND_FROZEN",
    "NODE_CONFIRMED",
    "NODE_CONFIRMED",
    "ROUND_FINALIZED",
]


class Served:
    """A rendezvous service on a real socket, over a journal and a clock that the test controls."""

    def __init__(self, stage: Stage, server: Server, servicer: RendezvousServicer) -> None:
        self.stage = stage
        self.server = server
        self.servicer = servicer
        self._channels: list[grpc.aio.Channel] = []

    def stub(self, **options: int) -> pb_grpc.RendezvousServiceAsyncStub:
        """A stub on a connection of its own."""
        if options:
            channel = grpc.aio.insecure_channel(self.server.address, list(options.items()))
        else:
            channel = open_channel(self.server.address, Plaintext())
        self._channels.append(channel)
        stub: pb_grpc.RendezvousServiceAsyncStub = pb_grpc.RendezvousServiceStub(channel)
        return stub

    async def list(self, **request: Any) -> pb.ListEventsResponse:
        """A page of events."""
        return await self.stub().ListEvents(pb.ListEventsRequest(run_id=RUN, **request), timeout=PATIENCE)

    def watch(self, revision: int = 0, run_id: str = RUN, **filter_: Any) -> Watch:
        """A stream of events."""
        request = pb.WatchEventsRequest(
            run_id=run_id, after_revision=revision, filter=pb.EventFilter(**filter_)
        )
        return Watch(self.stub().WatchEvents(request, timeout=PATIENCE))

    async def note(self, count: int) -> None:
        """Record `count` events that have no consequences."""
        for number in range(count):
            command = commands.Evict if number % 2 == 0 else commands.Readmit
            await self.stage.engine.execute(RUN, command("elsewhere", "to and fro"), SERVICE)

    def latest(self) -> int:
        """The latest revision."""
        return self.stage.engine.history(RUN).latest

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
        await self.server.stop()


class Watch:
    """A stream of events, as a client reads it."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def hear(self) -> pb.WatchEventsResponse:
        """The next message."""
        response = await self.call.read()
        assert isinstance(response, pb.WatchEventsResponse), "the stream is over"
        return response

    async def until(self, revision: int) -> list[pb.Event]:
        """All events up to a revision."""
        events: list[pb.Event] = []
        while (response := await self.hear()).revision < revision:
            events += response.events
        return [*events, *response.events]

    async def ended(self) -> tuple[list[pb.Event], ServiceError | None]:
        """Read to the end; return the events, and the error that ended the stream, if any."""
        events: list[pb.Event] = []
        try:
            while (response := await self.call.read()) is not grpc.aio.EOF:
                events += response.events
        except grpc.aio.AioRpcError as error:
            return events, decode(error)
        assert await self.call.code() is grpc.StatusCode.OK
        return events, None


@asynccontextmanager
async def serving_events() -> AsyncIterator[Served]:
    """The service, with a run of two nodes in a final round."""
    async with staged(Stage(limits=LIMITS)) as stage:
        servicer = RendezvousServicer(locator_of(stage.engine))
        add = partial(pb_grpc.add_RendezvousServiceServicer_to_server, servicer)
        name = "rallypoint.rendezvous.v1.RendezvousService"
        server = Server(
            ServerOptions(insecure=True),
            services=[Registration(name, add, servicer.drain)],
            translate=translate,
        )
        await server.start()
        await stage.running("a", "b")
        served = Served(stage, server, servicer)
        yield served
        await served.close()


def kinds(events: list[pb.Event]) -> list[str]:
    """The names of the events' kinds."""
    return [pb.EventKind.Name(event.kind).removeprefix("EVENT_KIND_") for event in events]


def revisions(events: list[pb.Event]) -> list[int]:
    """The events' revisions."""
    return [event.revision for event in events]
