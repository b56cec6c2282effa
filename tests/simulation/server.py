"""One process of the rendezvous service: the product's shard, servicers and interceptor, simulated."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import grpc

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.service import registrations
from rallypoint.rendezvous.base.cooperative import CooperativeRunner
from rallypoint.rendezvous.base.limits import Limits, RendezvousLimits
from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.shard.locator import SingleShardLocator
from rallypoint.rendezvous.shard.shard import Shard, open_shard
from rallypoint.rpc.clock import LagSettings
from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.interceptor import CallInterceptor
from rallypoint.serving.server import Registration
from simulation.clockwork import Process
from simulation.disk import Disk, DiskJournal
from simulation.handlers import handlers_of
from simulation.network import Connection
from simulation.referee import Referee
from simulation.store_calls import judge_stores
from simulation.wire import ServerCall

# The default pulse, a quarter of a second, would cost more than everything else in a simulation.
LAG = LagSettings(tolerance=0.25, pulse=1.0, settle=1.0)
# Seconds that a draining server waits for its calls to end, and for its last messages to be sent.
_GRACE = 5.0
_FLUSH = 0.05
WALL_TIME = 1.7e9


class Server:
    """A server process; `on_exit` is called when it ends by itself."""

    def __init__(
        self,
        process: Process,
        disk: Disk,
        referee: Referee,
        *,
        limits: RendezvousLimits,
        wall_clock: Callable[[], float],
        draw: Callable[[int], bytes],
        on_ready: Callable[[Server], None],
        on_exit: Callable[[Server], None],
    ) -> None:
        self.process = process
        self.journal = DiskJournal(disk, process)
        self.draining = False
        self._referee = referee
        self._on_ready = on_ready
        self._on_exit = on_exit
        self._limits = limits
        self._wall_clock = wall_clock
        self._draw = draw
        self._shard: Shard | None = None
        self._registrations: list[Registration] = []
        self._calls = CallInterceptor(translate, new_incident=self._incident, clock=process.time)
        self._handlers: dict[str, Any] = {}
        self._open: list[ServerCall] = []
        process.create_task(self._main())

    def _incident(self) -> str:
        self._referee.unforeseen(repr(sys.exception()))
        return "simulated"

    def writable_round(self, run_id: str) -> int | None:
        """Return the round of a run whose workers may write; None: there is none, or the server is not ready."""
        return None if self._shard is None else self._shard.engine.writable_round(run_id)

    async def _main(self) -> None:
        self._shard = await open_shard(
            self.journal,
            clock=self.process.boot_time,
            wall_clock=self._wall_clock,
            draw=self._draw,
            limits=Limits(self._limits),
            lag=LAG,
            slices=CooperativeRunner(self.process.time),
            on_failure=self._failed,
        )
        self._registrations = registrations(SingleShardLocator(self._shard), Limits(self._limits))
        for each in self._registrations:
            self._handlers |= await handlers_of(each.add, self._calls)
        judge_stores(self._handlers, self._referee.store)
        self._on_ready(self)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, JournalError):
            self.process.call_later(_FLUSH, self._on_exit, self)
        else:
            self._referee.unforeseen(f"the shard failed: {error!r}")

    def accept(self, connection: Connection, method: str) -> ServerCall:
        """Accept a call."""
        call = ServerCall(connection, method, self._handlers[method], self._referee)
        self._open.append(call)
        return call

    def drain(self) -> None:
        """Drain the server."""
        if not self.draining:
            self.draining = True
            self.process.create_task(self._drain())

    async def _drain(self) -> None:
        self._calls.refuse(
            ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "this server is about to end")
        )
        try:
            async with asyncio.timeout(_GRACE):
                await asyncio.gather(*(each.on_drain() for each in self._registrations if each.on_drain))
                await self._calls.idle()
        except TimeoutError:
            stalled = any(call.blocked and not call.done() for call in self._open)
            excused = stalled or self.journal.busy or not self.process.awake_for(_GRACE)
            self._referee.drained_late(excused=excused)  # calls that are still open are cut
        await asyncio.sleep(_FLUSH)
        self._on_exit(self)
