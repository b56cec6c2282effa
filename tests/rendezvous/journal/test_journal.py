"""Every journal keeps the entries that it acknowledged: the same suite for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rallypoint.rendezvous.journal.journal import (
    MARK,
    Checkpoint,
    Dropped,
    Entry,
    Journal,
    MemoryJournal,
    Recovered,
)
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rendezvous.journal.entries import change, checkpoint, forgotten, record
from rendezvous.journal.etcd_shelf import etcd_shelf
from support.etcd_server import NEEDS_ETCD

Reopen = Callable[[], Awaitable[Recovered]]


class Shelf:
    """One journal, opened again and again; `lasts`: its contents outlive it."""

    def __init__(self, make: Callable[[], Journal], *, lasts: bool) -> None:
        self._make = make
        self.lasts = lasts
        self.journal = make()

    async def reopen(self) -> Recovered:
        """Close the journal, as its process would, and open it as the next one does."""
        await self.journal.close()
        self.journal = self._make()
        return await self.journal.open()


@pytest.fixture(params=["memory", "sqlite", pytest.param("etcd", marks=NEEDS_ETCD)])
async def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shelf]:
    """An open journal of every kind."""
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            shelf = Shelf(MemoryJournal, lasts=False)
        elif request.param == "sqlite":
            shelf = Shelf(lambda: SqliteJournal(tmp_path / "var" / "rendezvous.db"), lasts=True)
        else:
            url = request.getfixturevalue("etcd").url
            shelf = Shelf((await stack.enter_async_context(etcd_shelf(url))).journal, lasts=True)
        await shelf.journal.open()
        yield shelf
        await shelf.journal.close()


async def test_a_new_journal_is_empty(shelf: Shelf) -> None:
    """Nothing is made up."""
    recovered = await shelf.reopen()
    assert recovered == Recovered([], [], [])


async def test_records_come_back_per_run_in_the_order_of_their_revisions(shelf: Shelf) -> None:
    """Also past ten, and with any names of runs."""
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
    """Keys of several rounds and runs are apart; deleted keys are gone; values are any bytes, also none."""
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


async def test_an_append_that_is_pending_at_the_close_is_kept(shelf: Shelf) -> None:
    """Closing is no crash."""
    appends = [asyncio.ensure_future(shelf.journal.append([record(revision)])) for revision in range(1, 6)]
    await asyncio.sleep(0)
    recovered = await shelf.reopen()
    await asyncio.gather(*appends)
    assert len(recovered.records) == (5 if shelf.lasts else 0)


async def test_a_caller_that_goes_away_does_not_disturb_others(shelf: Shelf) -> None:
    """Its entries may or may not be kept; those of the others are."""
    appends = [asyncio.ensure_future(shelf.journal.append([change(str(n), b"x")])) for n in range(5)]
    await asyncio.sleep(0)
    appends[0].cancel()
    await asyncio.gather(*appends[1:])
    recovered = await shelf.reopen()
    kept = {entry.key for entry in recovered.store_entries}
    assert kept >= ({"1", "2", "3", "4"} if shelf.lasts else set())


async def test_a_recovery_begins_with_the_latest_checkpoint_of_each_run(shelf: Shelf) -> None:
    """It comes with all records from `keep_from` on: those after it, and those that are kept for people."""
    await shelf.journal.append([record(revision) for revision in range(1, 11)])
    await shelf.journal.append([checkpoint(10, 8), record(11), checkpoint(11, 9)])
    await shelf.journal.append([record(1, "b"), checkpoint(1, 2, "b"), record(12), record(1, "c")])
    recovered = await shelf.reopen()
    found = [(each.run_id, each.revision) for each in recovered.records]
    if shelf.lasts:
        assert set(recovered.checkpoints) == {checkpoint(11, 9), checkpoint(1, 2, "b")}
        assert sorted(found) == [("c", 1), ("run", 9), ("run", 10), ("run", 11), ("run", 12)]
    else:
        assert recovered == Recovered([], [], [])


async def test_records_that_a_checkpoint_dropped_stay_dropped(shelf: Shelf) -> None:
    """Also if a later one would keep it."""
    await shelf.journal.append([record(1), record(2), record(3), checkpoint(3, 3)])
    await shelf.journal.append([record(4), checkpoint(4, 1)])
    recovered = await shelf.reopen()
    assert list(recovered.checkpoints) == ([checkpoint(4, 3)] if shelf.lasts else [])
    assert list(recovered.records) == ([record(3), record(4)] if shelf.lasts else [])


async def test_only_the_checkpoint_of_a_forgotten_run_is_kept(shelf: Shelf) -> None:
    """It comes back as a checkpoint without records; keys of the same name in other runs stay."""
    await shelf.journal.append([record(1), record(2), change("k", b"x"), change("k", b"y", 2)])
    await shelf.journal.append([record(1, "b"), change("k", b"z", run_id="b")])
    await shelf.journal.append([checkpoint(2, 1), forgotten(2)])
    recovered = await shelf.reopen()
    if shelf.lasts:
        assert list(recovered.checkpoints) == [Checkpoint("run", 2, forgotten(2).content, 3)]
        assert list(recovered.records) == [record(1, "b")]
        assert list(recovered.store_entries) == [change("k", b"z", run_id="b")]


@pytest.mark.parametrize("together", [True, False])
async def test_a_forgotten_run_that_comes_again_goes_on_from_its_revision(
    shelf: Shelf, together: bool
) -> None:
    """With new records and a new store, without any entries from before."""
    before: list[Entry] = [
        record(1),
        change("old", b"x"),
        change("k", b"old"),
        change("gone", b"x"),
        forgotten(1),
    ]
    after: list[Entry] = [record(2), change("k", b"new"), change("gone", None), change("other", b"y")]
    for call in [[*before, *after]] if together else [before, after]:
        await shelf.journal.append(call)
    recovered = await shelf.reopen()
    if shelf.lasts:
        assert list(recovered.records) == [record(2)]
        assert set(recovered.store_entries) == {change("k", b"new"), change("other", b"y")}
    await shelf.journal.append([record(3) if shelf.lasts else record(1), forgotten(3)])
    await shelf.journal.append([change("k", b"third", 1)])
    recovered = await shelf.reopen()
    assert list(recovered.store_entries) == ([change("k", b"third")] if shelf.lasts else [])


async def test_nothing_of_a_dropped_run_is_kept(shelf: Shelf) -> None:
    """For any number of runs; only the mark comes back. A fenced state of that name, set since, is not part of it."""
    for number in range(40):
        run_id = f"run {number}"
        await shelf.journal.append([record(1, run_id), change("k", b"x", run_id=run_id)])
        await shelf.journal.append([forgotten(1, run_id), Dropped(run_id), forgotten(number, MARK)])
    await shelf.journal.append([change("state", b"x", -1, "run 7")])
    for _ in range(2):
        recovered = await swept(shelf)
        if shelf.lasts:
            assert list(recovered.checkpoints) == [Checkpoint(MARK, 39, forgotten(39).content, 40)]
            assert list(recovered.store_entries) == [change("state", b"x", -1, "run 7")]
        assert list(recovered.records) == []


async def swept(shelf: Shelf) -> Recovered:
    """Return the contents after a process that had the time to delete obsolete entries."""
    await shelf.reopen()
    while (working := getattr(shelf.journal, "_committing", None)) is not None:
        await working
    return await shelf.reopen()


@pytest.mark.parametrize("together", [True, False])
async def test_a_dropped_run_that_comes_again_begins_after_the_mark(shelf: Shelf, together: bool) -> None:
    """Without its old entries, whether the journal has deleted them already or not; any number of times."""
    last = 0
    for life in range(3):
        begin: list[Entry] = [] if life == 0 else [checkpoint(last, last + 1)]
        lived: list[Entry] = [record(last + 1), change(f"k{life}", b"x")]
        calls: list[list[Entry]] = [
            [*begin, *lived],
            [forgotten(last + 1), Dropped("run"), forgotten(last + 5, MARK)],
        ]
        for call in [[*calls[0], *calls[1]]] if together else calls:
            await shelf.journal.append(call)
        last += 5
    await shelf.journal.append([checkpoint(last, last + 1), record(last + 1), change("k", b"new")])
    recovered = await swept(shelf)
    if shelf.lasts:
        assert [each for each in recovered.checkpoints if each.run_id != MARK] == [checkpoint(last, last + 1)]
        assert list(recovered.records) == [record(last + 1)]
        assert list(recovered.store_entries) == [change("k", b"new")]


async def test_store_entries_that_come_late_are_seen(shelf: Shelf) -> None:
    """Those of a commit in flight when their run was dropped: their writer deletes them."""
    await shelf.journal.append([record(1), forgotten(1), Dropped("run"), change("same commit", b"x")])
    await shelf.journal.append([forgotten(1, "b"), Dropped("b")])
    await shelf.journal.append([change("later", b"x", run_id="b")])
    recovered = await swept(shelf)
    late = {change("same commit", b"x"), change("later", b"x", run_id="b")}
    assert set(recovered.store_entries) == (late if shelf.lasts else set())
    await shelf.journal.append([change("same commit", None), change("later", None, run_id="b")])
    await shelf.journal.append([Dropped("run")] if shelf.lasts else [])
    recovered = await shelf.reopen()
    if shelf.lasts and recovered.checkpoints:  # it has seen entries of that run
        await shelf.journal.append([Dropped("run")])
    assert await swept(shelf) == Recovered([], [], [])
