"""Replicas on real sockets over a real etcd, all in the process of the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio

from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.base.limits import STATE_TTL, Limits
from rallypoint.rendezvous.cluster.ownership import MoveSettings, by_preference, shard_of
from rallypoint.rendezvous.cluster.replica import Replicas
from rallypoint.rendezvous.cluster.service import ReplicatedServices, replicated_services
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as state_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.rpc.errors import decode
from rallypoint.serving.server import Server
from support.joining import join_request
from support.waiting import PATIENCE, until

_T = TypeVar("_T")


SHARDS = 8
TTL = 6.0
QUICK = MoveSettings(settle=0.3, claim_interval=1.0)


@dataclass
class Served:
    """One replica."""

    name: str
    services: ReplicatedServices
    server: Server
    channel: grpc.aio.Channel
    failures: list[BaseException] = field(default_factory=list)
    readiness: list[bool] = field(default_factory=list)

    @property
    def address(self) -> str:
        """The address at which it listens."""
        return self.server.address

    @property
    def serving(self) -> set[int]:
        """The shards that it serves."""
        hosting = self.services.replica.shard_manager
        return set(hosting.serving) if hosting is not None else set()

    @property
    def known_owners(self) -> dict[int, str]:
        """The owner of each shard, as far as it knows."""
        cluster = self.services.replica.cluster
        return {shard: owned.owner.replica for shard, owned in cluster.owned.items()} if cluster else {}

    @property
    def rendezvous(self) -> pb_grpc.RendezvousServiceAsyncStub:
        """A stub that follows no redirect."""
        stub: pb_grpc.RendezvousServiceAsyncStub = pb_grpc.RendezvousServiceStub(self.channel)
        return stub

    @property
    def states(self) -> state_grpc.StateServiceAsyncStub:
        """The same for the fenced states."""
        stub: state_grpc.StateServiceAsyncStub = state_grpc.StateServiceStub(self.channel)
        return stub

    async def set_state(
        self, run_id: str, state: bytes, token: bytes | None = None
    ) -> state_pb.SetStateResponse:
        """Set a fenced state here."""
        request = state_pb.SetStateRequest(run_id=run_id, state=state)
        if token is not None:
            request.token = token
        return await self.states.SetState(request, timeout=PATIENCE)

    async def get_state(self, run_id: str) -> state_pb.FencedState:
        """Return its view of a state; retry once if it redirects to the owner, which it does to count the use there."""
        request = state_pb.GetStateRequest(run_id=run_id)
        try:
            return (await self.states.GetState(request, timeout=PATIENCE)).current
        except grpc.aio.AioRpcError as error:
            if "owner_address" not in decode(error).metadata:
                raise
            return (await self.states.GetState(request, timeout=PATIENCE)).current

    async def listed(self, run_id: str = "") -> pb.ListReplicasResponse:
        """Return its list of all replicas."""
        return await self.rendezvous.ListReplicas(pb.ListReplicasRequest(run_id=run_id), timeout=PATIENCE)


@asynccontextmanager
async def served(
    address: EtcdAddress,
    name: str,
    *,
    ttl: float = TTL,
    shards: int | None = SHARDS,
    moves: MoveSettings = QUICK,
    keeps_etcd: bool = True,
    clock: Callable[[], float] = time.monotonic,
    state_ttl: float = STATE_TTL,
) -> AsyncIterator[Served]:
    """Run a replica that has begun to serve; at the end it stops without handing its shards over."""
    async with AsyncExitStack() as stack:
        readiness: list[bool] = []

        async def on_ready(ready: bool) -> None:
            readiness.append(ready)

        services = await stack.enter_async_context(
            replicated_services(
                address,
                Replicas(lease_ttl=ttl, shards=shards, moves=moves, keeps_etcd=keeps_etcd),
                on_ready=on_ready,
                clock=clock,
                limits=Limits(state_ttl=state_ttl),
            )
        )
        server = Server(
            ServerOptions(host="127.0.0.1"), services=services.registrations, translate=translate, ready=False
        )
        await server.start()
        stack.push_async_callback(server.stop)
        channel = open_channel(server.address)
        stack.push_async_callback(channel.close)
        replica = Served(name, services, server, channel, readiness=readiness)
        services.begin(name, server.address, replica.failures.append)
        yield replica


async def shared_out(*replicas: Served, shards: int = SHARDS) -> None:
    """Wait until every shard is served by the preferred replica, and all of them know it."""
    names = [replica.name for replica in replicas]
    owners = {shard: by_preference(shard, names)[0] for shard in range(shards)}

    def settled() -> bool:
        return all(replica.known_owners == owners for replica in replicas) and all(
            replica.serving == {shard for shard, owner in owners.items() if owner == replica.name}
            for replica in replicas
        )

    await until(settled, f"{names} to have shared {shards} shards out")


def run_in(shard: int, shards: int = SHARDS) -> str:
    """Return the name of a run in a shard."""
    return next(name for number in range(9999) if shard_of(name := f"run-{number}", shards) == shard)


async def insisting(call: Callable[[], Awaitable[_T]]) -> _T:
    """Retry a call while a shard moves from one owner to the next."""
    began = time.monotonic()
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as refused:
            error = decode(refused)
            moving = error.reason in ("NOT_OWNER", "OWNERSHIP_LOST", "JOURNAL_BROKEN", "JOURNAL_FAILED")
            if not moving or time.monotonic() - began > PATIENCE:
                raise
        await asyncio.sleep(error.retry_after or 0.02)


async def joined(replica: Served, run_id: str) -> Any:
    """Return the open stream of a run's only node, with its lease read."""
    stream = replica.rendezvous.Join(timeout=PATIENCE)
    await stream.write(join_request(run_id))
    first = await stream.read()
    assert isinstance(first, pb.JoinResponse)
    assert first.HasField("lease")
    return stream
