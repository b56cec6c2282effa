"""Services inside the process of an agent, for jobs that name none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from rallypoint.rendezvous.api.errors import translate as translate_rendezvous
from rallypoint.rendezvous.api.service import rendezvous_services
from rallypoint.rendezvous.journal.journal import MemoryJournal
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.serving.server import Server
from rallypoint.timer.server.service import timer_registration
from rallypoint.timer.server.service import translate as translate_timer


@asynccontextmanager
async def embedded_rendezvous() -> AsyncIterator[str]:
    """A rendezvous service inside this process, for as long as the context lasts; yields its endpoint."""
    async with rendezvous_server(ServerOptions()) as server:
        yield server.address


@asynccontextmanager
async def rendezvous_server(options: ServerOptions) -> AsyncIterator[Server]:
    """A server of a rendezvous service that forgets its runs at the end; started, and stopped with the context.

    Raises:
        ServiceStartError: It can't listen as it should.
    """
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(rendezvous_services(MemoryJournal()))
        server = Server(options, services=services, translate=translate_rendezvous)
        await server.start()
        stack.push_async_callback(server.stop)
        yield server


@asynccontextmanager
async def embedded_timer() -> AsyncIterator[str]:
    """A timer service inside this process, for as long as the context lasts; yields its endpoint."""
    server = Server(ServerOptions(), services=[timer_registration()], translate=translate_timer)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()
