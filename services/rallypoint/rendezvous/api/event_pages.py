"""A run's events in messages: how many go into one, and the tokens that lead from page to page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rallypoint.rendezvous.api.events import EventFilter, event_of, parse_filter
from rallypoint.rendezvous.base.cooperative import LatestValue
from rallypoint.rendezvous.base.errors import EventsCompacted
from rallypoint.rendezvous.core.commands import RevisionAhead, RunNotFound
from rallypoint.rendezvous.core.state import RunSettings
from rallypoint.rendezvous.journal.codec import DecodedRecord
from rallypoint.rendezvous.journal.journal import Record
from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.runs.history import History
from rallypoint.rendezvous.shard.locator import RunLocator
from rallypoint.rendezvous.shard.reader import RunsReader
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.serving.flow import Subscriber, Turns
from rallypoint.serving.requests import count, name, page_position, page_size, page_token

# Records examined before the event loop runs other tasks: one or two milliseconds of work.
_STEP_RECORDS = 100
_STEP_BYTES = 64 * 1024
# A shorter step ends without a pause: watchers read one or two new events at a time, and `Turns` spreads them.
_SMALL_STEP = 10
# Around an event in its message: a tag and a length.
_FRAME_BYTES = 8


@dataclass(slots=True)
class EventReader:
    """Reads a run's events step by step, in either direction; `cursor` is the last revision examined."""

    history: History
    settings: RunSettings
    filter: EventFilter
    cursor: int
    backwards: bool = False
    # Shared by all readers of a server, which take turns: if each of hundreds had a step in each iteration of the event
    # loop, heartbeats would wait for all of them.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def at_end(self) -> bool:
        """True if there is no further event, for now."""
        if self.backwards:
            return self.cursor <= self.history.oldest
        return self.cursor >= self.history.latest

    @property
    def compacted(self) -> bool:
        """True if the next event is no longer kept."""
        return self._next < self.history.oldest

    @property
    def _next(self) -> int:
        return self.cursor - 1 if self.backwards else self.cursor + 1

    def check(self, run_id: str) -> None:
        """Check that the reader can go on from the cursor.

        Raises:
            EventsCompacted: The next event is no longer kept.
            RevisionAhead: The cursor is past the latest event.
        """
        if self.compacted:
            raise EventsCompacted(run_id, self._next, self.history.oldest)
        latest = self.history.latest
        if self.cursor > (latest + 1 if self.backwards else latest):
            raise RevisionAhead(run_id, self.cursor, latest)

    async def fill(
        self, events: MutableSequence[pb.Event], *, most_events: int, most_bytes: int, most_looked_at: int
    ) -> None:
        """Append the next events that match the filter, until a bound is reached or there are no more.

        Makes some progress unless it is at the end; one event always fits. Other tasks run between steps.
        """
        room, looked_at = most_bytes, 0
        while not self.at_end and not self.compacted and looked_at < most_looked_at:
            async with self.turn:
                begun, taken = looked_at, 0
                for content in self._step():
                    record = DecodedRecord(content.content)
                    if self.filter.matches(record):
                        event = event_of(record, self.settings)
                        room -= event.ByteSize() + _FRAME_BYTES
                        if room < 0 and events:
                            return
                        events.append(event)
                    self.cursor = record.revision
                    if len(events) == most_events:
                        return
                    taken += len(content.content)
                    looked_at += 1
                    if taken >= _STEP_BYTES:
                        break
                if looked_at - begun >= _SMALL_STEP or taken >= _STEP_BYTES:
                    await asyncio.sleep(0)

    def _step(self) -> Sequence[Record]:
        # Read again in each step: events are added, and dropped, while other tasks run.
        if self.backwards:
            return list(islice(self.history.before(self.cursor), _STEP_RECORDS))
        return self.history.after(self.cursor, _STEP_RECORDS)


# ---- ListEvents and WatchEvents: the past events of a run, and new ones.


MOST_EVENTS = 10_000
_DEFAULT_EVENTS = 1_000
# Events that one ListEvents examines: some 0.1 s of CPU if all match, a few milliseconds at a time.
_MOST_LOOKED_AT = 10_000
# gRPC's clients take messages of 4 MiB; a failure with its traceback has some 20 KiB.
_PAGE_BYTES = 3 * 1024 * 1024
# One batch is the memory that a slow watcher takes in the server, besides the transport's own buffers.
_BATCH_EVENTS = 1_000
_BATCH_BYTES = 256 * 1024
# The first message to a watcher is sent at once, so it examines few events.
_FIRST_LOOKED_AT = 100
# After this many events that its filter does not pass, a watcher gets an empty message with the revision: the revision
# from which it resumes must still be kept.
_MOST_UNREPORTED = 1_000


class EventServicer:
    """The event calls of RendezvousService, for the runs that a locator finds."""

    def __init__(self, locator: RunLocator, check_not_draining: Callable[[], None], sends: Turns) -> None:
        """Serve the runs of `locator`.

        Args:
            check_not_draining: Raises once the server drains.
            sends: Limits how many watchers read and send new events at the same time.
        """
        self._locator = locator
        self._check_not_draining = check_not_draining
        self._sends = sends
        self._turn = asyncio.Lock()

    async def list(self, request: pb.ListEventsRequest) -> pb.ListEventsResponse:
        """Return a page of events; see the contract.

        Raises:
            ServiceError: INVALID_ARGUMENT, naming the field.
            RunNotFound: There is no such run.
            EventsCompacted, RevisionAhead: The events after the page token are no longer kept, or don't exist yet.
            NotOwner: The run can't be read here.
        """
        name("run_id", request.run_id)
        size = page_size(request.page_size, _DEFAULT_EVENTS, MOST_EVENTS)
        runs = (await self._locator.reader(request.run_id)).runs
        history = _history(runs, request.run_id)
        reader = EventReader(
            history,
            runs.settings(request.run_id),
            parse_filter(request.filter),
            history.latest + 1 if request.newest_first else history.oldest - 1,
            request.newest_first,
            turn=self._turn,
        )
        if request.page_token:
            (reader.cursor,) = page_position(request, int)
            reader.check(request.run_id)
        response = pb.ListEventsResponse()
        await reader.fill(
            response.events, most_events=size, most_bytes=_PAGE_BYTES, most_looked_at=_MOST_LOOKED_AT
        )
        response.oldest_revision = history.oldest
        if not reader.at_end:
            response.next_page_token = page_token(request, reader.cursor)
        return response

    async def watch(self, request: pb.WatchEventsRequest, watcher: Subscriber) -> None:
        """Send the events after a revision, and then new ones; returns when the run is closed.

        Raises:
            ServiceError: INVALID_ARGUMENT, naming the field.
            RunNotFound: There is no such run.
            RevisionAhead: The revision was never given out.
            EventsCompacted: The next event is no longer kept.
            LimitReached: The run has as many watchers as its limit allows.
            Draining: The server drains.
            NotOwner: The run belongs to another replica.
        """
        name("run_id", request.run_id)
        count("after_revision", request.after_revision, 0, 2**63 - 1)
        engine = self._locator.shard(request.run_id).engine
        history = _history(engine, request.run_id)
        reader = EventReader(
            history,
            engine.settings(request.run_id),
            parse_filter(request.filter),
            request.after_revision or history.oldest - 1,
            turn=self._turn,
        )
        revisions = engine.follow(request.run_id, request.after_revision)
        try:
            await self._send_events(engine, request.run_id, reader, revisions, watcher)
        finally:
            engine.unfollow(request.run_id, revisions)

    async def _send_events(
        self,
        engine: RendezvousEngine,
        run_id: str,
        reader: EventReader,
        revisions: LatestValue[int],
        watcher: Subscriber,
    ) -> None:
        first, reported = True, 0
        while (latest := await revisions.take()) is not None:
            async with self._sends.turn():
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
                    if first or response.events or reader.cursor - reported >= _MOST_UNREPORTED:
                        await watcher.send(response)
                        reported = reader.cursor
                    first = False


def _history(runs: RunsReader, run_id: str) -> History:
    history = runs.history(run_id)
    if not history.latest:  # the run is being created, and the commit may still fail
        raise RunNotFound(run_id)
    return history
