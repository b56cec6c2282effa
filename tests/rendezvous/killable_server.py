"""Store and fenced states in a separate process over an SQLite journal, to be SIGKILLed and started again.

`killable_server.py JOURNAL ENDPOINT`
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.state_servicer import fenced_registration
from rallypoint.rendezvous.api.store_servicer import store_registration
from rallypoint.rendezvous.base.cooperative import finish
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.state.core import SPACE
from rallypoint.rendezvous.state.service import FencedStateService
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.serving.server import Server
from rendezvous.locators import locator_of
from rendezvous.store.store_fakes import Rounds

_TESTS = Path(__file__).parents[1]


class KillableServer:
    """The process; the test counts the requests that it has served."""

    def __init__(self, folder: Path) -> None:
        """Set up, with journal and socket in a folder."""
        self.path = f"{folder}/service.sock"
        self._arguments = (__file__, f"{folder}/journal.sqlite", f"unix:{self.path}")
        self._process: asyncio.subprocess.Process | None = None
        self._done = 0
        self._progress = asyncio.Condition()

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._arguments,
            env=os.environ | {"PYTHONPATH": str(_TESTS)},
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def end(self) -> None:
        """SIGKILL it."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def count(self) -> None:
        """Count one more served request."""
        async with self._progress:
            self._done += 1
            self._progress.notify_all()

    async def die_after(self, *counts: int) -> None:
        """Kill and restart it when each of the counts is reached."""
        for count in counts:
            async with self._progress:
                await self._progress.wait_for(lambda count=count: self._done >= count)  # type: ignore[misc]
            await self.end()
            await self.start()


@asynccontextmanager
async def killable_server_in(folder: Path) -> AsyncIterator[KillableServer]:
    """A started process."""
    victim = KillableServer(folder)
    await victim.start()
    try:
        yield victim
    finally:
        await victim.end()


async def serve(journal_path: str, endpoint: str) -> None:
    journal = SqliteJournal(Path(journal_path))
    entries = (await journal.open()).store_entries
    store = StoreService(journal, Rounds())
    finish(store.restoring([entry for entry in entries if entry.round != SPACE]))
    store.begin()
    states = FencedStateService(journal, Rounds(), clock=time.monotonic, draw=secrets.token_bytes)
    finish(states.restoring([entry for entry in entries if entry.round == SPACE]))
    serving = asyncio.create_task(states.serve())
    services = [store_registration(locator_of(store)), fenced_registration(locator_of(states))]
    server = Server(ServerOptions(host=endpoint), services=services, translate=translate)
    await server.start()
    await server.serve_until_signal()
    serving.cancel()
    await asyncio.wait([serving])
    await journal.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
