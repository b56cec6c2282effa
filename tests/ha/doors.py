"""Connections to each replica by itself, which those share that ask one after the other."""

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
    """One for each replica, by name."""

    def __init__(self, channels: Mapping[str, grpc.aio.Channel], endpoints: Mapping[str, str]) -> None:
        """Over channels that somebody closes."""
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
        """Of all replicas."""
        return list(self.by_name)

    def at(self, endpoint: str) -> Door | None:
        """The replica that has this address; None: none of ours."""
        return self._by_endpoint.get(endpoint)


@asynccontextmanager
async def open_doors(endpoints: Mapping[str, str]) -> AsyncIterator[Doors]:
    """Doors of replicas, by name; `endpoints`: where each listens. Closed afterwards."""
    channels = {name: open_channel(endpoint, Plaintext()) for name, endpoint in endpoints.items()}
    try:
        yield Doors(channels, endpoints)
    finally:
        for channel in channels.values():
            await channel.close()
