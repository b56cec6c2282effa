"""One process of a replica: the product's replica, its client of etcd, and its servicers, simulated."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from typing import Any

import grpc

from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.base.limits import Limits, RendezvousLimits
from rallypoint.rendezvous.cluster.replica import Replicas
from rallypoint.rendezvous.cluster.service import ReplicatedServices, replicated_services
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.pace import Pace
from rallypoint.serving.interceptor import CallInterceptor
from simulation.clockwork import Clockwork, Process
from simulation.handlers import handlers_of
from simulation.network import Connection
from simulation.referee import Referee
from simulation.store_calls import judge_stores
from simulation.wire import ServerCall

# Seconds that a draining replica waits for its calls to end, and for its last messages to be sent.
_GRACE = 5.0
_FLUSH = 0.05
_WALL_TIME = 1.7e9


class ReplicaServer:
    """A process that serves a part of the shards."""

    def __init__(
        self,
        process: Process,
        clockwork: Clockwork,
        referee: Referee,
        *,
        name: str,
        address: str,
        etcd: EtcdAddress,
        wanted: Replicas,
        limits: RendezvousLimits,
        wall_offset: float,
        chance: random.Random,
        on_ready: Callable[[ReplicaServer], None],
        on_exit: Callable[[ReplicaServer], None],
    ) -> None:
        self.process = process
        self.name = name
        self.address = address
        self.draining = False
        self.services: ReplicatedServices | None = None
        self._clockwork = clockwork
        self._referee = referee
        self._etcd = etcd
        self._wanted = wanted
        self._limits = limits
        self._wall_offset = wall_offset
        self._chance = chance
        self._on_ready = on_ready
        self._on_exit = on_exit
        self._calls = CallInterceptor(translate, new_incident=self._incident, clock=process.time)
        self._handlers: dict[str, Any] = {}
        self._ended = asyncio.Event()
        process.create_task(self._main())

    def _incident(self) -> str:
        self._referee.unforeseen(repr(sys.exception()))
        return "simulated"

    @property
    def serves(self) -> bool:
        """True if it serves a shard."""
        return self.services is not None and bool(self.services.locator.shards())

    async def _main(self) -> None:
        process, clockwork = self.process, self._clockwork
        async with replicated_services(
            self._etcd,
            self._wanted,
            clock=process.boot_time,
            wall_clock=lambda: _WALL_TIME + self._wall_offset + clockwork.now,
            draw=self._chance.randbytes,
            pace=Pace(process.time, asyncio.sleep, self._chance.random),
            limits=Limits(self._limits),
        ) as services:
            self.services = services
            for each in services.registrations:
                self._handlers |= await handlers_of(each.add, self._calls)
            judge_stores(self._handlers, self._referee.store)
            services.begin(self.name, self.address, self._failed)
            self._on_ready(self)
            await self._ended.wait()
        self._on_exit(self)

    def _failed(self, error: BaseException) -> None:
        # Another process of the same name may still be alive; a supervisor restarts this one.
        self._referee.note("replica failed", self.name, error)
        self.process.call_later(_FLUSH, self._on_exit, self)

    def accept(self, connection: Connection, method: str) -> ServerCall:
        """Accept a call."""
        return ServerCall(connection, method, self._handlers[method], self._referee)

    def drain(self) -> None:
        """Drain the replica."""
        if not self.draining and self.services is not None:
            self.draining = True
            self.process.create_task(self._drain())

    async def _drain(self) -> None:
        assert self.services is not None
        await self.services.drain()
        self._calls.refuse(
            ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "this server is about to end")
        )
        try:
            async with asyncio.timeout(_GRACE):
                drains = [each.on_drain() for each in self.services.registrations if each.on_drain]
                await asyncio.gather(*drains)
                await self._calls.idle()
        except TimeoutError:
            pass  # calls that are still open are cut
        await asyncio.sleep(_FLUSH)
        self._ended.set()
