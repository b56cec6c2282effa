"""One process of the timer service: the product's watchdog, servicer and interceptor, simulated."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc

from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.interceptor import CallInterceptor
from rallypoint.timer.core.values import TakeoverUnconfirmed, TimerSettings
from rallypoint.timer.server.service import translate
from rallypoint.timer.server.servicer import TimerServicer
from rallypoint.timer.server.watchdog import Watchdog
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc
from simulation.clockwork import Process
from simulation.handlers import handlers_of
from simulation.network import Connection, Link
from simulation.timers.referee import Referee
from simulation.wire import ServerCall

# Seconds that a draining server waits for its calls to end, and for its last messages to be sent.
_GRACE = 5.0
_FLUSH = 0.05


class Service:
    """A process of the service. It stores nothing."""

    def __init__(
        self,
        process: Process,
        referee: Referee,
        settings: TimerSettings,
        *,
        on_ready: Callable[[Service], None],
        on_exit: Callable[[Service], None],
    ) -> None:
        self.process = process
        self.watchdog = Watchdog(settings, process.time)
        self._referee = referee
        self._on_ready = on_ready
        self._on_exit = on_exit
        self._calls = CallInterceptor(translate, new_incident=self._incident, clock=process.time)
        self._handlers: dict[str, Any] = {}
        self._servicer = TimerServicer(self.watchdog)
        self._when_called: dict[str, Callable[[], None]] = {}
        process.create_task(self._main())

    def _incident(self) -> str:
        self._referee.unforeseen(repr(sys.exception()))
        return "simulated"

    async def _main(self) -> None:
        self._handlers = await handlers_of(
            partial(pb_grpc.add_TimerServiceServicer_to_server, self._servicer), self._calls
        )
        self._on_ready(self)

    def accept(self, connection: Connection, method: str) -> ServerCall:
        """Accept a call."""
        self._when_called.pop(connection.link.name, lambda: None)()
        return ServerCall(connection, method, self._handlers[method], self._referee)

    def when_called(self, link: Link, happens: Callable[[], None]) -> None:
        """Call `happens` at the next call over a link, before the messages that are sent on it."""
        self._when_called[link.name] = happens

    def drain(self) -> None:
        """Drain the service."""
        if not self.watchdog.draining:
            self.process.create_task(self._drain())

    async def _drain(self) -> None:
        self._calls.refuse(
            ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "this server is about to end")
        )
        await self._servicer.drain()
        try:
            async with asyncio.timeout(_GRACE):
                await self._calls.idle()
        except TimeoutError:
            self._referee.note("drained late")  # calls that are still open are cut
        await asyncio.sleep(_FLUSH)
        self._on_exit(self)

    def intrude(self, run_id: str, node_id: str, lease: int, incarnation: str) -> None:
        """Subscribe as another agent of a node, with a newer lease, and unsubscribe."""
        if not self.watchdog.draining:
            subscribe = partial(self.watchdog.subscribe, run_id, node_id, lease, incarnation=incarnation)
            with suppress(TakeoverUnconfirmed):  # an agent retries then
                subscribe()
            subscription, _ = subscribe()
            self.watchdog.unsubscribe(subscription)

    @property
    def watched(self) -> set[tuple[str, str, int]]:
        """The subscribed nodes, each with its incarnation and lease."""
        subscriptions = [subscription for subscription, _ in self.watchdog._outboxes.values()]
        return {(each.node_id, each.incarnation, each.lease) for each in subscriptions}

    def ripe(self, scope: str) -> bool:
        """Return True if a scope has enough completions."""
        return any(view.learned.scope == scope and view.after for view in self.watchdog.table.scopes())
