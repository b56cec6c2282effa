"""A process with nothing but a store in it, to be killed: store_server.py JOURNAL ENDPOINT."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.store_servicer import store_registration
from rallypoint.rendezvous.base.cooperative import finish
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.serving.server import Server
from rendezvous.locators import home_of
from rendezvous.store.store_fakes import Rounds


async def serve(journal_path: str, endpoint: str) -> None:
    journal = SqliteJournal(Path(journal_path))
    recovered = await journal.open()
    store = StoreService(journal, Rounds())
    finish(store.restoring(recovered.store_entries))
    store.begin()
    server = Server(
        ServerOptions(host=endpoint), services=[store_registration(home_of(store))], translate=translate
    )
    await server.start()
    await server.serve_until_signal()
    await journal.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
