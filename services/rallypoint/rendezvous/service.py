"""The rendezvous service put together: journal, engine, store, and what a server serves of them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from rallypoint.rendezvous.engine import RendezvousEngine
from rallypoint.rendezvous.fenced_state.core import SPACE, StateLimits
from rallypoint.rendezvous.fenced_state.service import DEFAULT_TTL, FencedStateService
from rallypoint.rendezvous.fenced_state.servicer import fenced_registration
from rallypoint.rendezvous.journal.journal import Journal
from rallypoint.rendezvous.journal.memory import MemoryJournal
from rallypoint.rendezvous.limits import RendezvousLimits
from rallypoint.rendezvous.servicer import RendezvousServicer
from rallypoint.rendezvous.store.limits import StoreLimits
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rendezvous.store.servicer import store_registration
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.serving.rate import Rate
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
        # Here and not at the top: a job of one host alone has its journal in memory.
        from rallypoint.rendezvous.journal.sqlite import SqliteJournal  # noqa: PLC0415

        return SqliteJournal(Path(place))
    raise SettingError(f"--journal: {url!r} is no journal; expected memory, or sqlite:PATH")


@asynccontextmanager
async def rendezvous_services(
    journal: Journal,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    draw: Callable[[int], bytes] = secrets.token_bytes,
    limits: RendezvousLimits | None = None,
    store_limits: StoreLimits | None = None,
    state_limits: StateLimits | None = None,
    state_ttl: float = DEFAULT_TTL,
    on_failure: Callable[[BaseException], None] = lambda error: None,
) -> AsyncIterator[list[Registration]]:
    """Recover from a journal and work for as long as the context lasts; yields what a server is to serve.

    Args:
        journal: Not opened yet; closed at the end.
        clock: Monotonic seconds.
        wall_clock: Unix seconds.
        draw: So many random bytes.
        limits: What the service, and each run, may use.
        store_limits: What the store of each run may use.
        state_limits: What fenced states may use.
        state_ttl: How long a fenced state is kept that nobody reads, sets or watches, seconds.
        on_failure: Called if the journal breaks: the process must end, and start again from what is durable.

    Raises:
        JournalError: The journal can't be opened.
    """
    limits = limits or RendezvousLimits()
    recovered = await journal.open()

    def forget_ended_round(run_id: str, next_round: int) -> None:
        store.forget_rounds_before(run_id, next_round)

    def forget_run(run_id: str) -> None:
        store.forget_run(run_id)
        states.forget_run(run_id)

    engine = RendezvousEngine(
        journal,
        clock=clock,
        wall_clock=wall_clock,
        on_round_end=forget_ended_round,
        on_expiry=forget_run,
        limits=limits,
    )
    engine.recover(recovered)
    store = StoreService(
        journal,
        engine.writable_round,
        [entry for entry in recovered.store_entries if entry.round != SPACE],
        limits=store_limits,
        on_journal_failure=on_failure,
        check_lease=engine.check_lease,
        settled=engine.settled,
    )
    states = FencedStateService(
        journal,
        [entry for entry in recovered.store_entries if entry.round == SPACE],
        clock=clock,
        draw=draw,
        check_lease=engine.check_lease,
        settled=engine.settled,
        limits=state_limits,
        ttl=state_ttl,
    )
    servicer = RendezvousServicer(engine)
    rendezvous = Registration(
        SERVICE_NAME,
        partial(pb_grpc.add_RendezvousServiceServicer_to_server, servicer),
        servicer.drain,
        Rate(limits.messages_per_second, limits.message_burst),
    )
    serving = [asyncio.create_task(each) for each in (engine.serve(), states.serve())]
    for task in serving:
        task.add_done_callback(partial(_report_failure, on_failure))
    try:
        yield [rendezvous, store_registration(store), fenced_registration(states)]
    finally:
        for task in serving:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # a failure was reported when it happened
                await task
        await journal.close()


def _report_failure(on_failure: Callable[[BaseException], None], serving: asyncio.Task[None]) -> None:
    if not serving.cancelled() and (error := serving.exception()) is not None:
        on_failure(error)
