"""Subscribers that stop reading, and go on some time later: by the contract, without our client code."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import grpc

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.errors import decode
from support.joining import join_request
from torture.tormented_node import PLAINTEXT, RUN

_HEARTBEAT = 1.0  # seconds


def our_channel(endpoint: str) -> grpc.aio.Channel:
    """Open a channel as our clients do: little data is on its way to a subscriber that does not read."""
    return open_channel(endpoint, PLAINTEXT)


def foreign_channel(endpoint: str) -> grpc.aio.Channel:
    """Open a channel with gRPC's own settings, which let megabytes be on their way."""
    return grpc.aio.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)])


class Subscriber(ABC):
    """One stream at a time of one kind, opened again when it broke.

    Attributes:
        revision: The last revision that it received.
        ends: The reasons with which its streams ended.
    """

    def __init__(self, channel: grpc.aio.Channel, settings: pb.RunSettings, name: str) -> None:
        """Do nothing yet.

        Args:
            channel: A channel for it alone.
            settings: Settings of the run.
            name: The name of the node, if it is one.
        """
        self.revision = 0
        self.ends: list[str] = []
        self._stub = pb_grpc.RendezvousServiceStub(channel)
        self._channel = channel
        self._settings = settings
        self._name = name
        self._call: Any = None

    async def subscribe(self) -> None:
        """Open a stream and read only its first message."""
        await self._open()
        self._take(await self._call.read())

    async def catch_up(self, revision: int) -> None:
        """Read again, and after each end of the stream act by the contract, until a revision has come."""
        while self.revision < revision:
            try:
                if self._call is None:
                    await self._open()
                message = await self._call.read()
                assert message is not grpc.aio.EOF, "a run that goes on ends no stream in order"
                self._take(message)
            except grpc.aio.AioRpcError as error:
                refusal = decode(error)
                self.ends.append(refusal.reason)
                self._call = None
                self._forget(refusal.reason)

    async def farewell(self) -> str:
        """Read to the end of the stream, which an error ends; return its reason."""
        try:
            while True:
                message = await self._call.read()
                assert message is not grpc.aio.EOF, "a run that goes on ends no stream in order"
                self._take(message)
        except grpc.aio.AioRpcError as error:
            self._call = None
            return decode(error).reason

    async def close(self) -> None:
        """Close its channel."""
        await self._channel.close()

    @abstractmethod
    async def _open(self) -> None: ...

    @abstractmethod
    def _revision_of(self, message: Any) -> int: ...

    def _forget(self, reason: str) -> None:
        assert reason == "SUBSCRIBER_TOO_SLOW", f"nothing else ends a stream: {reason}"

    def _take(self, message: Any) -> None:
        told = self._revision_of(message)
        assert told >= self.revision or told == 0, "revisions only grow"
        self.revision = max(self.revision, told)


class RunWatcher(Subscriber):
    """Watches the run's states."""

    async def _open(self) -> None:
        self._call = self._stub.WatchRun(pb.WatchRunRequest(run_id=RUN, after_revision=self.revision))

    def _revision_of(self, message: pb.WatchRunResponse) -> int:
        return message.run.revision


class EventWatcher(Subscriber):
    """Watches the run's events, and must miss none."""

    async def _open(self) -> None:
        self._call = self._stub.WatchEvents(pb.WatchEventsRequest(run_id=RUN, after_revision=self.revision))

    def _revision_of(self, message: pb.WatchEventsResponse) -> int:
        if self.revision:
            told = [event.revision for event in message.events]
            assert told == list(range(self.revision + 1, message.revision + 1)), "no event is left out"
        return message.revision


class Spare(Subscriber):
    """A node that waits beside the round, and sends heartbeats while it reads nothing."""

    def __init__(self, channel: grpc.aio.Channel, settings: pb.RunSettings, name: str) -> None:
        super().__init__(channel, settings, name)
        self._lease, self._token = 0, b""
        self._heart: asyncio.Task[None] | None = None
        self._silent = False

    async def farewell(self) -> str:
        """Read to the `draining` message, after which the stream ends with an error; return its reason."""
        self._silent = True  # a heartbeat on the ended stream would hide its error
        while not (message := await self._call.read()).HasField("draining"):
            self._take(message)
        assert message.draining.revision == self.revision, "it names what was told last"
        try:
            await self._call.read()
        except grpc.aio.AioRpcError as error:
            return decode(error).reason
        raise AssertionError("a client takes OK for the end of its membership")

    async def close(self) -> None:
        await self._still()
        await super().close()

    async def _open(self) -> None:
        await self._still()
        self._call = self._stub.Join()
        if self._lease:
            resume = pb.ResumeRun(
                run_id=RUN, node_id=self._name, lease=self._lease, after_revision=self.revision
            )
            resume.token = self._token
            await self._call.write(pb.JoinRequest(resume=resume))
        else:
            await self._call.write(join_request(RUN, self._name, self._settings))
        self._silent = False
        self._heart = asyncio.create_task(self._beat(self._call))

    def _revision_of(self, message: pb.JoinResponse) -> int:
        if message.HasField("lease"):
            self._lease, self._token = message.lease.number, message.lease.token
        return message.update.revision

    def _forget(self, reason: str) -> None:
        # It did not know that its stream was ended, so it did not resume within the disconnect grace.
        if reason == "LEASE_LOST":
            self._lease, self._token = 0, b""
        # grpc.aio reports this for any end of a stream to which a heartbeat was still written.
        elif reason != "INTERNAL":
            super()._forget(reason)

    async def _beat(self, call: Any) -> None:
        try:
            while not self._silent:
                await call.write(pb.JoinRequest(heartbeat=pb.Heartbeat()))
                await asyncio.sleep(_HEARTBEAT)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the stream has ended; its reader gets the reason

    async def _still(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.wait({self._heart})


KINDS: tuple[type[Subscriber], ...] = (RunWatcher, EventWatcher, Spare)
CHANNELS: tuple[Callable[[str], grpc.aio.Channel], ...] = (our_channel, foreign_channel)
