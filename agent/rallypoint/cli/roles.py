"""Servers made of the services: what `serve` runs alone, and `run` runs inside its own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rallypoint.agent.daemon import Daemon
from rallypoint.cli.inherited import ENVIRONMENT
from rallypoint.cli.limit_options import Limits
from rallypoint.rendezvous.errors import translate as translate_rendezvous
from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.journal.memory import MemoryJournal
from rallypoint.rendezvous.service import open_journal, rendezvous_services
from rallypoint.serving.server import Server
from rallypoint.serving.settings import ClientTLS, ServerOptions, SettingError
from rallypoint.timer.errors import translate as translate_timer
from rallypoint.timer.service import timer_registration, timer_service
from rallypoint.timer.values import TimerSettings


async def serve_rendezvous_role(options: ServerOptions, journal_url: str, limits: Limits) -> None:
    """Serve rendezvous until a signal, or until its journal breaks.

    Raises:
        SettingError: It can't start, or its journal broke; one line.
    """
    broken: list[BaseException] = []
    stopping: list[asyncio.Task[None]] = []

    def stop(error: BaseException) -> None:
        broken.append(error)
        stopping.append(asyncio.create_task(server.stop()))

    try:
        async with rendezvous_services(
            open_journal(journal_url),
            limits=limits.rendezvous,
            store_limits=limits.store,
            state_limits=limits.state,
            state_ttl=limits.state_ttl,
            on_failure=stop,
        ) as services:
            server = Server(options, services=services, translate=translate_rendezvous)
            await server.serve_until_signal()
    except JournalError as error:
        raise SettingError(str(error)) from error
    if broken:
        raise SettingError(str(broken[0])) from broken[0]


async def serve_timer_role(options: ServerOptions, settings: TimerSettings, learned: Path | None) -> None:
    """Serve timers until a signal. What is learned is kept in a file; None: in memory.

    Raises:
        SettingError: It can't start; one line.
    """
    async with timer_service(settings, learned=learned) as service:
        server = Server(options, services=[service], translate=translate_timer)
        await server.serve_until_signal()


async def serve_agent_role(options: ServerOptions, tls: ClientTLS | None) -> None:
    """Serve as a daemon that runs the jobs it is given, until a signal; then its job leaves in good order."""
    async with embedded_timer() as timer_endpoint, Daemon(timer_endpoint, tls, ENVIRONMENT) as daemon:
        server = Server(options, services=[daemon.registration])
        # Its job leaves first, so that one can still ask how far it is.
        await server.serve_until_signal(before_drain=daemon.leave)


@asynccontextmanager
async def embedded_rendezvous() -> AsyncIterator[str]:
    """A rendezvous service inside this process, for as long as the context lasts; yields its endpoint."""
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(rendezvous_services(MemoryJournal()))
        server = Server(ServerOptions(), services=services, translate=translate_rendezvous)
        await server.start()
        stack.push_async_callback(server.stop)
        yield server.address


@asynccontextmanager
async def embedded_timer() -> AsyncIterator[str]:
    """A timer service inside this process, for as long as the context lasts; yields its endpoint."""
    server = Server(ServerOptions(), services=[timer_registration()], translate=translate_timer)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()
