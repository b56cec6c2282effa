"""ListEvents and WatchEvents: what happened to a run, and what happens to it."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.rendezvous.base.cooperative import Slot
from rallypoint.rendezvous.core.commands import RunNotFound
from rallypoint.rendezvous.engine import RendezvousEngine
from rallypoint.rendezvous.event_filter import wanted
from rallypoint.rendezvous.event_pages import Reader, page_cursor, page_token
from rallypoint.rendezvous.history import History
from rallypoint.rendezvous.home import Home
from rallypoint.rendezvous.reader import RunsReader
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.serving.flow import Subscriber
from rallypoint.serving.requests import count, name

_MOST_EVENTS = 10_000
_DEFAULT_EVENTS = 1_000
# Events that one ListEvents looks at: some 0.1 s of CPU if all match, a few milliseconds at a time.
_MOST_LOOKED_AT = 10_000
# gRPC's clients take messages of 4 MiB; a failure with its traceback has some 20 KiB.
_PAGE_BYTES = 3 * 1024 * 1024
# A batch is what a slow watcher makes the server hold, besides the transport's own buffers.
_BATCH_EVENTS = 1_000
_BATCH_BYTES = 256 * 1024
# The first message of a watcher comes at once, so it does not look far.
_FIRST_LOOKED_AT = 100
# A watcher whose filter passes nothing for so many events is told how far it has come: what it resumes from must
# still be kept.
_MOST_UNTOLD = 1_000


class EventServicer:
    """Answers for the events of runs, wherever these are."""

    def __init__(self, home: Home, check_not_draining: Callable[[], None]) -> None:
        """Answer for the runs of `home`; `check_not_draining` raises once the server is going away."""
        self._home = home
        self._check_not_draining = check_not_draining

    async def list(self, request: pb.ListEventsRequest) -> pb.ListEventsResponse:
        """A page of events; see the contract.

        Raises:
            ServiceError: INVALID_ARGUMENT, naming the field.
            RunNotFound: There is no such run.
            EventsCompacted, RevisionAhead: The page token leads where nothing is, any more or yet.
            NotOwner: The run can't be read here.
        """
        name("run_id", request.run_id)
        count("page_size", request.page_size, 0, _MOST_EVENTS)
        runs = (await self._home.reader(request.run_id)).runs
        history = _history(runs, request.run_id)
        reader = Reader(
            history,
            runs.settings(request.run_id),
            wanted(request.filter),
            history.latest + 1 if request.newest_first else history.oldest - 1,
            request.newest_first,
        )
        if request.page_token:
            reader.cursor = page_cursor(request)
            reader.check(request.run_id)
        response = pb.ListEventsResponse()
        await reader.fill(
            response.events,
            most_events=request.page_size or _DEFAULT_EVENTS,
            most_bytes=_PAGE_BYTES,
            most_looked_at=_MOST_LOOKED_AT,
        )
        response.oldest_revision = history.oldest
        if not reader.at_end:
            response.next_page_token = page_token(request, reader.cursor)
        return response

    async def watch(
        self,
        request: pb.WatchEventsRequest,
        watcher: Subscriber,
    ) -> None:
        """Tell what happened after a revision, and then what happens; returns when the run is closed.

        Args:
            request: The request.
            watcher: Who asked.

        Raises:
            ServiceError: INVALID_ARGUMENT, naming the field.
            RunNotFound: There is no such run.
            RevisionAhead: The revision was never given out.
            EventsCompacted: What comes next is no longer kept.
            LimitReached: As many watch the run as may.
            Draining: The server is going away.
            NotOwner: The run belongs to another replica.
        """
        name("run_id", request.run_id)
        count("revision", request.revision, 0, 2**63 - 1)
        engine = self._home.shard(request.run_id).engine
        history = _history(engine, request.run_id)
        reader = Reader(
            history,
            engine.settings(request.run_id),
            wanted(request.filter),
            request.revision or history.oldest - 1,
        )
        revisions = engine.follow(request.run_id, request.revision)
        try:
            await self._tell(engine, request.run_id, reader, revisions, watcher)
        finally:
            engine.unfollow(request.run_id, revisions)

    async def _tell(
        self,
        engine: RendezvousEngine,
        run_id: str,
        reader: Reader,
        revisions: Slot[int],
        watcher: Subscriber,
    ) -> None:
        first, told = True, 0
        while (latest := await revisions.take()) is not None:
            while first or reader.cursor < latest:
                self._check_not_draining()
                engine.check_streams(run_id)
                reader.check(run_id)
                response = pb.WatchEventsResponse()
                await reader.fill(
                    response.events,
                    most_events=_BATCH_EVENTS,
                    most_bytes=_BATCH_BYTES,
                    most_looked_at=_FIRST_LOOKED_AT if first else _MOST_LOOKED_AT,
                )
                response.revision = reader.cursor
                if first or response.events or reader.cursor - told >= _MOST_UNTOLD:
                    await watcher.tell(response)
                    told = reader.cursor
                first = False


def _history(runs: RunsReader, run_id: str) -> History:
    history = runs.history(run_id)
    if not history.latest:  # a run that is being made, and may still not come to be
        raise RunNotFound(run_id)
    return history
