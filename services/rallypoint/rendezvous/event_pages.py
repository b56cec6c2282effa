"""A run's events a message at a time: how much goes into one, and the tokens that lead from page to page."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from itertools import islice

from rallypoint.rendezvous.base.errors import EventsCompacted
from rallypoint.rendezvous.core.commands import RevisionAhead
from rallypoint.rendezvous.core.state import RunSettings
from rallypoint.rendezvous.event_filter import Wanted
from rallypoint.rendezvous.events import event_of
from rallypoint.rendezvous.history import History
from rallypoint.rendezvous.journal.journal import Record
from rallypoint.rendezvous.v1 import journal_pb2
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.errors import invalid

# What is looked at before others get a turn of the event loop: one or two milliseconds of work.
_STEP_RECORDS = 100
_STEP_BYTES = 64 * 1024
# Around an event in its message: a tag and a length.
_FRAME_BYTES = 8

_TOKEN = re.compile(r"([0-9]{1,19})-([0-9a-f]{16})")


@dataclass(slots=True)
class Reader:
    """Reads on in a run's events, in either direction; `cursor` is the last revision that was looked at."""

    history: History
    settings: RunSettings
    wanted: Wanted
    cursor: int
    backwards: bool = False

    @property
    def at_end(self) -> bool:
        """Whether nothing is left to look at, for now."""
        if self.backwards:
            return self.cursor <= self.history.oldest
        return self.cursor >= self.history.latest

    @property
    def compacted(self) -> bool:
        """Whether what comes next is no longer kept."""
        return self._next < self.history.oldest

    @property
    def _next(self) -> int:
        return self.cursor - 1 if self.backwards else self.cursor + 1

    def check(self, run_id: str) -> None:
        """Check that one can read on from the cursor.

        Raises:
            EventsCompacted: What comes next is no longer kept.
            RevisionAhead: The cursor is past everything that there is.
        """
        if self.compacted:
            raise EventsCompacted(run_id, self._next, self.history.oldest)
        latest = self.history.latest
        if self.cursor > (latest + 1 if self.backwards else latest):
            raise RevisionAhead(run_id, self.cursor, latest)

    async def fill(
        self, events: MutableSequence[pb.Event], *, most_events: int, most_bytes: int, most_looked_at: int
    ) -> None:
        """Append the events that come next and are wanted, until a bound is reached or there are no more.

        Makes some way unless it is at the end; one event always fits. Others get their turn in between.
        """
        room, looked_at = most_bytes, 0
        while not self.at_end and not self.compacted and looked_at < most_looked_at:
            taken = 0
            for content in self._step():
                record = journal_pb2.JournalRecord.FromString(content.content)
                if self.wanted.matches(record):
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
            await asyncio.sleep(0)

    def _step(self) -> Sequence[Record]:
        # Asked for anew each time: events are added, and dropped, while others have their turn.
        if self.backwards:
            return list(islice(self.history.before(self.cursor), _STEP_RECORDS))
        return self.history.after(self.cursor, _STEP_RECORDS)


def page_token(request: pb.ListEventsRequest, cursor: int) -> str:
    """The token with which a request goes on after `cursor`."""
    return f"{cursor}-{_digest(request, cursor)}"


def page_cursor(request: pb.ListEventsRequest) -> int:
    """The cursor that a request's token stands for.

    Raises:
        ServiceError: INVALID_ARGUMENT: it is no token, or that of another request.
    """
    match = _TOKEN.fullmatch(request.page_token)
    if match is None or match[2] != _digest(request, int(match[1])):
        raise invalid(
            "page_token",
            "must be the next_page_token of a page with the same run_id, filter and newest_first, or empty",
        )
    return int(match[1])


def _digest(request: pb.ListEventsRequest, cursor: int) -> str:
    """Binds a cursor to its request: with another filter, or the other way round, it would leave events out."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (
        request.run_id.encode(),
        request.filter.SerializeToString(deterministic=True),
        b"newest first" if request.newest_first else b"oldest first",
        str(cursor).encode(),
    ):
        digest.update(len(part).to_bytes(8) + part)
    return digest.hexdigest()
