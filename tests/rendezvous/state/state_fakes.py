"""Fenced states over a journal and a clock that a test controls, served or not."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.state_servicer import fenced_registration
from rallypoint.rendezvous.base.cooperative import finish
from rallypoint.rendezvous.base.limits import StateLimits
from rallypoint.rendezvous.state.core import SetState
from rallypoint.rendezvous.state.service import FencedStateService
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.serving.server import Server
from rendezvous.locators import locator_of
from rendezvous.store.store_fakes import RUN, Rounds, TestJournal, channel_to
from support.clock import Clock

__all__ = ["RUN", "Clock", "TestJournal", "asked", "channel_to", "open_states", "served", "serving"]

_draw = random.Random(2026)


def asked(state: bytes, token: bytes | None = None, run_id: str = RUN, **rest: Any) -> SetState:
    """A request to set a state."""
    return SetState(run_id=run_id, state=state, token=token, **rest)


def open_states(
    journal: TestJournal,
    *,
    clock: Callable[[], float] | None = None,
    check_lease: Callable[[str, str, int, bytes], None] = lambda *_: None,
    limits: StateLimits | None = None,
    ttl: float = 3600.0,
) -> FencedStateService:
    """A service over the journal's entries, as after a restart."""
    states = FencedStateService(
        journal,
        Rounds(check=check_lease),
        clock=clock or Clock(),
        draw=_draw.randbytes,
        limits=limits,
        ttl=ttl,
    )
    finish(states.restoring(journal.entries()))
    return states


@asynccontextmanager
async def served(states: FencedStateService) -> AsyncIterator[FencedStateService]:
    """The service at work, cancelled without a drain at the end."""
    serving = asyncio.create_task(states.serve())
    try:
        yield states
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):  # the latter is how a test's journal fails
            await serving


@asynccontextmanager
async def serving(states: FencedStateService, path: str) -> AsyncIterator[Server]:
    """The service on a server at a Unix socket, stopped without a drain at the end."""
    services = [fenced_registration(locator_of(states))]
    # A test may write as fast as the machine can.
    options = ServerOptions(host=f"unix:{path}", request_byte_rate=1 << 40)
    server = Server(options, services=services, translate=translate)
    async with served(states):
        await server.start()
        try:
            yield server
        finally:
            await server.stop()
