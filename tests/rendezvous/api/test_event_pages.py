"""Pages of events omit nothing and repeat nothing while events are added, and none is too large or too slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rallypoint.rendezvous.api.event_pages import EventReader
from rallypoint.rendezvous.api.events import EventFilter
from rallypoint.rendezvous.base.errors import EventsCompacted
from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.commands import SERVICE, RevisionAhead
from rallypoint.rendezvous.core.state import ReportedFailure, RunSettings
from rallypoint.rendezvous.journal.codec import encode_record
from rallypoint.rendezvous.journal.journal import Record
from rallypoint.rendezvous.runs.history import History
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

EVERYTHING = EventFilter()
NO_BOUND = 10**9


def record(revision: int, fact: facts.Fact | None = None) -> Record:
    """Return a record of a run."""
    fact = fact or facts.NodeConfirmed(1, f"n{revision}", 29500)
    return Record("run", revision, encode_record("run", revision, fact, 1.7e9, SERVICE))


def history(first: int, last: int, most_events: int = 50_000) -> History:
    """Return a run's history with these revisions."""
    kept = History(most_events, NO_BOUND)
    for revision in range(first, last + 1):
        kept.add(record(revision))
    return kept


def reader(
    of: History, cursor: int, backwards: bool = False, wanted: EventFilter = EVERYTHING
) -> EventReader:
    """Return a reader that has read up to `cursor`."""
    return EventReader(of, RunSettings(), wanted, cursor, backwards)


async def page(
    of: EventReader, most_events: int = NO_BOUND, most_bytes: int = NO_BOUND, most_looked_at: int = NO_BOUND
) -> list[pb.Event]:
    """Return the next page."""
    events: list[pb.Event] = []
    await of.fill(events, most_events=most_events, most_bytes=most_bytes, most_looked_at=most_looked_at)
    return events


def revisions(events: list[pb.Event]) -> list[int]:
    """Return their revisions."""
    return [event.revision for event in events]


@asynccontextmanager
async def turns() -> AsyncIterator[list[int]]:
    """Count the turns that other tasks get; yields a list with one entry, the count."""
    taken = [0]

    async def count() -> None:
        while True:
            taken[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    yield taken
    counting.cancel()


# ---- reading


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("size", [1, 7, 100, 101, 250, 1000])
async def test_pages_put_together_are_the_history(size: int, backwards: bool) -> None:
    """In order, each event once, and the last page is marked as the last."""
    kept = history(51, 300)
    at = reader(kept, 301 if backwards else 50, backwards)
    seen: list[int] = []
    while not at.at_end:
        events = await page(at, most_events=size)
        assert 1 <= len(events) <= size
        seen += revisions(events)
    expected = list(range(51, 301))
    assert seen == (expected[::-1] if backwards else expected)


async def test_events_that_come_between_pages_shift_none() -> None:
    """Newest first, they are not read; oldest first, they are the last."""
    kept = history(1, 10)
    down, up = reader(kept, 11, backwards=True), reader(kept, 0)
    assert revisions(await page(down, most_events=4)) == [10, 9, 8, 7]
    assert revisions(await page(up, most_events=4)) == [1, 2, 3, 4]
    kept.add(record(11))
    assert revisions(await page(down)) == [6, 5, 4, 3, 2, 1]
    assert revisions(await page(up)) == [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("backwards", [False, True])
async def test_events_that_come_within_a_page_shift_nothing(backwards: bool) -> None:
    """Other tasks write while it is being filled."""
    kept = history(1, 500)
    at = reader(kept, 501 if backwards else 0, backwards)
    filling = asyncio.create_task(page(at))
    await asyncio.sleep(0)  # the first step
    for revision in range(501, 504):
        kept.add(record(revision))
    seen = revisions(await filling)
    assert seen == (list(range(500, 0, -1)) if backwards else list(range(1, 504)))


@pytest.mark.parametrize("backwards", [False, True])
async def test_a_page_ends_where_it_would_grow_too_large(backwards: bool) -> None:
    """Failures carry tracebacks; events that did not fit come on the next page."""
    kept = History(NO_BOUND, NO_BOUND)
    failure = ReportedFailure(1, 0, 0, "t", "n1", "h", 1, 1, 1.7e9, "it broke", "x" * 16_000, "")
    for revision in range(1, 41):
        kept.add(record(revision, facts.WorkerFailed(failure)))
    at = reader(kept, 41 if backwards else 0, backwards)
    seen: list[int] = []
    while not at.at_end:
        events = await page(at, most_bytes=100_000)
        assert pb.ListEventsResponse(events=events).ByteSize() <= 100_000
        assert len(events) == 6 or at.at_end
        seen += revisions(events)
    assert sorted(seen) == list(range(1, 41))


async def test_one_event_always_fits() -> None:
    """Otherwise a reader would never advance."""
    at = reader(history(1, 2), 0)
    assert revisions(await page(at, most_bytes=1)) == [1]
    assert revisions(await page(at, most_bytes=1)) == [2]


async def test_a_page_that_finds_nothing_ends_after_bounded_work() -> None:
    """It comes back short, and the next page goes on from there."""
    at = reader(history(1, 1_000), 0, wanted=EventFilter(node_ids=frozenset({"n950"})))
    assert await page(at, most_looked_at=500) == []
    assert (at.cursor, at.at_end) == (500, False)
    assert revisions(await page(at, most_looked_at=500)) == [950]
    assert at.at_end


@pytest.mark.parametrize("backwards", [False, True])
async def test_others_get_their_turn_while_a_page_is_filled(backwards: bool) -> None:
    """At least one turn for every hundred events, found or not."""
    kept = history(1, 5_000)
    async with turns() as taken:
        at = reader(kept, 5_001 if backwards else 0, backwards, EventFilter(rounds=frozenset({9})))
        assert await page(at) == []
        assert taken[0] >= 50


async def test_large_records_give_others_more_turns() -> None:
    """A round of a thousand nodes is as much work as hundreds of small records."""
    kept = History(NO_BOUND, NO_BOUND)
    for revision in range(1, 21):
        kept.add(record(revision, facts.RunCreated(RunSettings())))
        kept._records[-1] = Record("run", revision, kept._records[-1].content + _padding(70_000))
    async with turns() as taken:
        assert len(await page(reader(kept, 0))) == 20
        assert taken[0] >= 20


def _padding(size: int) -> bytes:
    """A field of a newer version, which makes a record large."""
    return b"\xfa\x7f" + bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14]) + b"x" * size


async def test_a_page_overtaken_by_compaction_comes_back_as_it_is() -> None:
    """Its events are returned; the next read reports that later events are missing."""
    kept = history(1, 300, most_events=300)
    at = reader(kept, 0)
    filling = asyncio.create_task(page(at))
    await asyncio.sleep(0)
    for revision in range(301, 551):
        kept.add(record(revision))
    seen = revisions(await filling)
    assert seen == list(range(1, len(seen) + 1))
    assert 100 <= len(seen) <= 250
    assert not at.at_end
    with pytest.raises(EventsCompacted):
        at.check("run")


@pytest.mark.parametrize(
    ("cursor", "backwards", "error"),
    [
        (49, False, EventsCompacted),
        (50, False, None),
        (300, False, None),
        (301, False, RevisionAhead),
        (51, True, EventsCompacted),
        (52, True, None),
        (301, True, None),
        (302, True, RevisionAhead),
    ],
)
def test_a_cursor_must_lead_to_kept_events(
    cursor: int, backwards: bool, error: type[Exception] | None
) -> None:
    """No event is omitted without an error."""
    at = reader(history(51, 300), cursor, backwards)
    if error is None:
        at.check("run")
        return
    with pytest.raises(error) as raised:
        at.check("run")
    if isinstance(raised.value, EventsCompacted):
        assert (raised.value.revision, raised.value.oldest_revision) == (50, 51)
