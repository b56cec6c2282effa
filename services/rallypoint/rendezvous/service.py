"""The rendezvous service put together: journal, engine, store, and what a server serves of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from rallypoint.rendezvous.engine import RendezvousEngine
from rallypoint.rendezvous.journal.journal import Journal
from rallypoint.rendezvous.journal.memory import MemoryJournal
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.servicer import RendezvousServicer
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rendezvous.store.servicer import store_registration
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.serving.server import Registration
from rallypoint.serving.settings import SettingError

SERVICE_NAME = "rallypoint.rendezvous.v1.RendezvousService"


def open_journal(url: str) -> Journal:
    """The journal that a `--journal` value names: `memory`, or `sqlite:PATH`.

    Raises:
        SettingError: It names none.
    """
    kind, _, place = url.partition(":")
    if url == "memory":
        return MemoryJournal()
    if kind == "sqlite" and place:
        return SqliteJournal(Path(place))
    raise SettingError(f"--journal: {url!r} is no journal; expected memory, or sqlite:PATH")


@asynccontextmanager
async def rendezvous_services(
    journal: Journal,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    on_failure: Callable[[BaseException], None] = lambda error: None,
) -> AsyncIterator[list[Registration]]:
    """Recover from a journal and work for as long as the context lasts; yields what a server is to serve.

    Args:
        journal: Not opened yet; closed at the end.
        clock: Monotonic seconds.
        wall_clock: Unix seconds.
        on_failure: Called if the journal breaks: the process must end, and start again from what is durable.

    Raises:
        JournalError: The journal can't be opened.
    """
    recovered = await journal.open()

    def forget_ended_round(run_id: str, next_round: int) -> None:
        store.forget_rounds_before(run_id, next_round)

    engine = RendezvousEngine(journal, clock=clock, wall_clock=wall_clock, on_round_end=forget_ended_round)
    engine.recover(recovered.records)
    store = StoreService(
        journal, engine.writable_round, recovered.store_entries, on_journal_failure=on_failure
    )
    serving = asyncio.create_task(engine.serve())
    serving.add_done_callback(partial(_report_failure, on_failure))
    servicer = RendezvousServicer(engine)
    try:
        yield [
            Registration(
                SERVICE_NAME,
                partial(pb_grpc.add_RendezvousServiceServicer_to_server, servicer),
                servicer.drain,
            ),
            store_registration(store),
        ]
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError, Exception):  # a failure was reported when it happened
            await serving
        await journal.close()


def _report_failure(on_failure: Callable[[BaseException], None], serving: asyncio.Task[None]) -> None:
    if not serving.cancelled() and (error := serving.exception()) is not None:
        on_failure(error)
