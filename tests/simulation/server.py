"""One life of the rendezvous service: the product's engine, servicer and interceptor in a simulated process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from rallypoint.rendezvous.engine import RendezvousEngine
from rallypoint.rendezvous.errors import translate
from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.limits import RendezvousLimits
from rallypoint.rendezvous.servicer import RendezvousServicer
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.serving.calls import CallInterceptor
from rallypoint.serving.errors import ServiceError
from rallypoint.serving.lag import LagSettings
from rendezvous.homes import home_of
from simulation.clockwork import Process
from simulation.disk import Disk, DiskJournal
from simulation.handlers import handlers_of
from simulation.network import Connection
from simulation.referee import Referee
from simulation.wire import ServerCall

# A pulse of a quarter of a second, the default, would cost more than everything else in a simulation.
LAG = LagSettings(tolerance=0.25, pulse=1.0, settle=1.0)
# How long a draining server waits for its calls to end, and for what it has sent to be on its way. Seconds.
_GRACE = 5.0
_FLUSH = 0.05
_WALL_TIME = 1.7e9


class Server:
    """A process that serves; `on_exit` is called when it ends by itself."""

    def __init__(
        self,
        process: Process,
        disk: Disk,
        referee: Referee,
        *,
        limits: RendezvousLimits,
        wall_offset: float,
        on_ready: Callable[[Server], None],
        on_exit: Callable[[Server], None],
    ) -> None:
        self.process = process
        self.journal = DiskJournal(disk, process)
        self.engine = RendezvousEngine(
            self.journal,
            clock=process.time,
            wall_clock=lambda: _WALL_TIME + wall_offset + disk.clockwork.now,
            limits=limits,
            lag=LAG,
        )
        self.draining = False
        self._disk = disk
        self._referee = referee
        self._on_ready = on_ready
        self._on_exit = on_exit
        self._servicer = RendezvousServicer(home_of(self.engine))
        self._calls = CallInterceptor(translate, new_incident=self._incident, clock=process.time)
        self._handlers: dict[str, Any] = {}
        self._open: list[ServerCall] = []
        process.create_task(self._main())

    def _incident(self) -> str:
        self._referee.unforeseen(repr(sys.exception()))
        return "simulated"

    async def _main(self) -> None:
        self.engine.recover(await self.journal.open())
        self._handlers = await handlers_of(
            partial(pb_grpc.add_RendezvousServiceServicer_to_server, self._servicer), self._calls
        )
        self._on_ready(self)
        self.process.create_task(self.engine.serve()).add_done_callback(self._served)

    def _served(self, serving: asyncio.Task[None]) -> None:
        if isinstance(serving.exception(), JournalError):
            self.process.call_later(_FLUSH, self._on_exit, self)
        else:
            self._referee.unforeseen(f"the engine ended: {serving!r}")

    def accept(self, connection: Connection, method: str) -> ServerCall:
        """Take a call."""
        call = ServerCall(connection, method, self._handlers[method], self._referee)
        self._open.append(call)
        return call

    def drain(self) -> None:
        """End in good order."""
        if not self.draining:
            self.draining = True
            self.process.create_task(self._drain())

    async def _drain(self) -> None:
        self._calls.refuse(
            ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "this server is about to end")
        )
        try:
            async with asyncio.timeout(_GRACE):
                await self._servicer.drain()
                await self._calls.idle()
        except TimeoutError:
            stalled = any(call.blocked and not call.done() for call in self._open)
            excused = stalled or self.journal.busy or not self.process.awake_for(_GRACE)
            self._referee.drained_late(excused=excused)  # what is open still, is cut
        await asyncio.sleep(_FLUSH)
        self._on_exit(self)
