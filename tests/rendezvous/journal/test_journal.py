"""Every journal keeps what it said it kept: the same suite over all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rallypoint.rendezvous.journal.journal import Journal, Recovered
from rallypoint.rendezvous.journal.memory import MemoryJournal
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rendezvous.journal.entries import change, record

Reopen = Callable[[], Awaitable[Recovered]]


class Shelf:
    """One journal, opened again and again; `lasts`: what is in it outlives it."""

    def __init__(self, make: Callable[[], Journal], *, lasts: bool) -> None:
        self._make = make
        self.lasts = lasts
        self.journal = make()

    async def reopen(self) -> Recovered:
        """Close the journal, as its process would, and open it as the next one does."""
        await self.journal.close()
        self.journal = self._make()
        return await self.journal.open()


@pytest.fixture(params=["memory", "sqlite"])
async def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shelf]:
    """An open journal of every kind."""
    if request.param == "memory":
        shelf = Shelf(MemoryJournal, lasts=False)
    else:
        shelf = Shelf(lambda: SqliteJournal(tmp_path / "var" / "rendezvous.db"), lasts=True)
    await shelf.journal.open()
    yield shelf
    await shelf.journal.close()


async def test_a_new_journal_is_empty(shelf: Shelf) -> None:
    """Nothing is made up."""
    recovered = await shelf.reopen()
    assert (list(recovered.records), list(recovered.store_entries)) == ([], [])


async def test_records_come_back_per_run_in_the_order_of_their_revisions(shelf: Shelf) -> None:
    """Also past ten, and whatever the names of the runs."""
    for revision in range(1, 13):
        await shelf.journal.append([record(revision, "b"), record(revision, "a"), record(revision, "ä' --")])
    recovered = await shelf.reopen()
    of_run: dict[str, list[int]] = {}
    for each in recovered.records:
        assert each == record(each.revision, each.run_id)
        of_run.setdefault(each.run_id, []).append(each.revision)
    expected = list(range(1, 13))
    assert of_run == ({"a": expected, "b": expected, "ä' --": expected} if shelf.lasts else {})


async def test_the_store_has_the_latest_value_of_every_key(shelf: Shelf) -> None:
    """Keys of several rounds and runs are apart; what was deleted is gone; values are any bytes, also none."""
    await shelf.journal.append([change("k", b"old"), change("gone", b"x"), change("k", b"other round", 2)])
    await shelf.journal.append([change("k", b"\x00new\xff"), change("gone", None), change("empty", b"")])
    await shelf.journal.append([change("k", b"other run", run_id="b"), change("k", b"the run's own", 0)])
    recovered = await shelf.reopen()
    expected = {
        change("k", b"\x00new\xff"),
        change("empty", b""),
        change("k", b"other round", 2),
        change("k", b"other run", run_id="b"),
        change("k", b"the run's own", 0),
    }
    assert set(recovered.store_entries) == (expected if shelf.lasts else set())


async def test_changes_of_one_call_apply_in_their_order(shelf: Shelf) -> None:
    """Set, deleted and set again is set."""
    await shelf.journal.append([change("a", b"1"), change("a", None), change("a", b"2"), change("b", b"1")])
    await shelf.journal.append([change("b", b"2"), change("b", None)])
    recovered = await shelf.reopen()
    assert list(recovered.store_entries) == ([change("a", b"2")] if shelf.lasts else [])


async def test_appends_made_together_are_all_kept(shelf: Shelf) -> None:
    """And in the order in which they were made."""
    appends = [
        shelf.journal.append([record(revision), change("k", b"%d" % revision)]) for revision in range(1, 51)
    ]
    await asyncio.gather(*appends)
    recovered = await shelf.reopen()
    assert [each.revision for each in recovered.records] == (list(range(1, 51)) if shelf.lasts else [])
    assert list(recovered.store_entries) == ([change("k", b"50")] if shelf.lasts else [])


async def test_what_is_being_appended_when_it_is_closed_is_kept(shelf: Shelf) -> None:
    """Closing is no crash."""
    appends = [asyncio.ensure_future(shelf.journal.append([record(revision)])) for revision in range(1, 6)]
    await asyncio.sleep(0)
    recovered = await shelf.reopen()
    await asyncio.gather(*appends)
    assert len(recovered.records) == (5 if shelf.lasts else 0)


async def test_a_caller_that_goes_away_disturbs_nobody(shelf: Shelf) -> None:
    """Its entries may or may not be kept; those of the others are."""
    appends = [asyncio.ensure_future(shelf.journal.append([change(str(n), b"x")])) for n in range(5)]
    await asyncio.sleep(0)
    appends[0].cancel()
    await asyncio.gather(*appends[1:])
    recovered = await shelf.reopen()
    kept = {entry.key for entry in recovered.store_entries}
    assert kept >= ({"1", "2", "3", "4"} if shelf.lasts else set())
