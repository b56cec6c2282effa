"""A process with nothing but fenced states in it, to be killed: state_server.py JOURNAL ENDPOINT."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from pathlib import Path

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.state_servicer import fenced_registration
from rallypoint.rendezvous.base.cooperative import finish
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.state.core import SPACE
from rallypoint.rendezvous.state.service import FencedStateService
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.serving.server import Server
from rendezvous.locators import home_of
from rendezvous.store.store_fakes import Rounds


async def serve(journal_path: str, endpoint: str) -> None:
    journal = SqliteJournal(Path(journal_path))
    recovered = await journal.open()
    entries = [entry for entry in recovered.store_entries if entry.round == SPACE]
    states = FencedStateService(journal, Rounds(), clock=time.monotonic, draw=secrets.token_bytes)
    finish(states.restoring(entries))
    serving = asyncio.create_task(states.serve())
    server = Server(
        ServerOptions(host=endpoint), services=[fenced_registration(home_of(states))], translate=translate
    )
    await server.start()
    await server.serve_until_signal()
    serving.cancel()
    await asyncio.wait([serving])
    await journal.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
