"""One connection to each replica, shared by the clients of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as state_grpc
from rallypoint.rendezvous.v1 import store_service_pb2_grpc as store_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import Plaintext


@dataclass(frozen=True, slots=True)
class Door:
    """The services of one replica."""

    name: str
    endpoint: str
    rendezvous: pb_grpc.RendezvousServiceAsyncStub
    store: store_grpc.StoreServiceAsyncStub
    state: state_grpc.StateServiceAsyncStub


class Doors:
    """The connections to all replicas, by name."""

    def __init__(self, channels: Mapping[str, grpc.aio.Channel], endpoints: Mapping[str, str]) -> None:
        """Use channels that the caller closes."""
        self.by_name = {
            name: Door(
                name,
                endpoints[name],
                pb_grpc.RendezvousServiceStub(channel),
                store_grpc.StoreServiceStub(channel),
                state_grpc.StateServiceStub(channel),
            )
            for name, channel in channels.items()
        }
        self._by_endpoint = {door.endpoint: door for door in self.by_name.values()}

    @property
    def names(self) -> list[str]:
        """The names of all replicas."""
        return list(self.by_name)

    def at(self, endpoint: str) -> Door | None:
        """Return the connection to the replica at an address; None if no replica has it."""
        return self._by_endpoint.get(endpoint)


@asynccontextmanager
async def open_doors(endpoints: Mapping[str, str]) -> AsyncIterator[Doors]:
    """Connect to replicas; `endpoints`: their addresses by name. Closes the connections after the block."""
    channels = {name: open_channel(endpoint, Plaintext()) for name, endpoint in endpoints.items()}
    try:
        yield Doors(channels, endpoints)
    finally:
        for channel in channels.values():
            await channel.close()
