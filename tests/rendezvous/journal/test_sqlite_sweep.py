"""Obsolete entries are gone at once for every reader, and are deleted from the file in small steps."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rallypoint.rendezvous.journal.journal import Dropped
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.journal.sqlite_reading import read_untouched
from rallypoint.rendezvous.journal.sqlite_rows import (
    BYTES_PER_STEP,
    PAGES_PER_STEP,
    ROWS_PER_STEP,
    SCHEMA,
    SCHEMA_VERSION,
    FreePages,
    Rows,
)
from rendezvous.journal.entries import change, checkpoint, forgotten, record
from rendezvous.journal.files import append, killed, recover, reopen
from support.replacing import instead_of


async def count(journal: SqliteJournal, table: str) -> int:
    """Return the number of rows in the file."""
    connection = journal._file._connection
    assert connection is not None
    assert table in ("record", "checkpoint", "store")
    query = f"SELECT count(*) FROM {table}"  # noqa: S608 - all of it is ours
    (rows,) = await journal._in_writer(lambda: connection.execute(query).fetchone())
    assert isinstance(rows, int)
    return rows


async def at_rest(journal: SqliteJournal) -> None:
    """Wait until nothing is left to commit or to sweep."""
    while journal._committing is not None:
        await journal._committing
    assert not journal._file.has_leftovers


async def test_no_commit_waits_for_more_than_a_bounded_part(journal: SqliteJournal) -> None:
    """The more there is to delete, the more commits it takes; none of them takes longer."""
    records = 10 * ROWS_PER_STEP
    await journal.append([record(revision) for revision in range(1, records + 1)])
    await journal.append([forgotten(records)])
    assert await count(journal, "record") >= records - 3 * ROWS_PER_STEP
    left = [await count(journal, "record")]
    for _ in range(20):
        await journal.append([change("k", b"x", run_id="b")])
        left.append(await count(journal, "record"))
    steps = [before - after for before, after in pairwise(left)]
    assert left[-1] == 0
    assert max(steps) <= 4 * ROWS_PER_STEP, "some steps between two looks"


async def test_large_values_are_bounded_by_their_bytes(journal: SqliteJournal, path: Path) -> None:
    """A few of them are as much work as many small ones, one that is larger than a step goes alone, none is logged."""
    value = b"x" * (BYTES_PER_STEP + 1)
    await journal.append([record(1)])
    for number in range(24):
        await journal.append([change(f"k{number}", value)])
    await journal.append([forgotten(1)])
    assert await count(journal, "store") >= 20
    await at_rest(journal)
    assert await count(journal, "store") == 0
    log = await journal._in_writer(path.with_name(path.name + "-wal").stat)
    assert log.st_size < 17 << 20


async def test_it_ends_by_itself_when_nothing_else_is_appended(journal: SqliteJournal) -> None:
    """No obsolete entry is left then."""
    await journal.append([record(revision, run) for run in "abc" for revision in range(1, 2 * ROWS_PER_STEP)])
    last = 2 * ROWS_PER_STEP - 1
    await journal.append([checkpoint(last, last, run) for run in "abc"])
    await at_rest(journal)
    assert await count(journal, "record") == 3


async def test_pages_are_used_again(path: Path) -> None:
    """A journal that is compacted as it grows does not grow without end."""
    journal = SqliteJournal(path)
    await journal.open()
    sizes = []
    for start in range(1, 8001, 1000):
        await journal.append([record(revision, padding=500) for revision in range(start, start + 1000)])
        await journal.append([checkpoint(start + 999, start + 1000)])
        await at_rest(journal)
        await journal._in_writer(journal._file.shorten_log)
        sizes.append((await journal._in_writer(path.stat)).st_size)
    await journal.close()
    assert sizes[-1] <= 1.5 * sizes[0]


def test_a_server_killed_meanwhile_leaves_the_rest_to_the_next(path: Path) -> None:
    """It does not read them as kept entries, also beside new ones of the same names, and sweeps on."""
    script = """
        async def main():
            journal = SqliteJournal(path)
            await journal.open()
            journal._file._sweep.step = lambda connection: None
            await journal.append([record(revision) for revision in range(1, 1001)])
            await journal.append([change(f"k{n}", b"old", n % 3) for n in range(1000)])
            await journal.append([forgotten(1000), record(1001), change("k0", b"new", 0), checkpoint(1001, 1001)])
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    killed(script, path)
    for _ in range(2):
        recovered = recover(path)
        assert list(recovered.checkpoints) == [checkpoint(1001, 1001)]
        assert list(recovered.records) == [record(1001)]
        assert list(recovered.store_entries) == [change("k0", b"new", 0)]

    async def sweep() -> list[int]:
        journal = SqliteJournal(path)
        await journal.open()
        await at_rest(journal)
        left = [await count(journal, table) for table in ("record", "store")]
        await journal.close()
        return left

    assert asyncio.run(sweep()) == [1, 1]


async def test_closing_does_not_wait_for_it(path: Path) -> None:
    """A service that is stopped stops at once; the next one goes on."""
    records = 100 * ROWS_PER_STEP
    await append(path, [record(revision) for revision in range(1, records + 1)], [forgotten(records)])
    connection = sqlite3.connect(path)
    (left,) = connection.execute("SELECT count(*) FROM record").fetchone()
    connection.close()
    assert left > records / 2
    assert list((await reopen(path)).records) == []


async def test_nothing_is_kept_in_memory_of_a_state_that_had_no_run(path: Path) -> None:
    """For any number of names that a client uses for states, before and after a restart of the service."""
    names = [f"run {number}" for number in range(100)]
    states = [change("state", b"x", -1, name) for name in names]
    for calls in [states], [[replace(state, value=None) for state in states]]:
        await append(path, *calls)
        found = read_untouched(path)
        assert found is not None
        spans = found.spans
        rows = Rows(spans)
        for entry in calls[0]:
            rows.add(entry)
        assert not spans


async def test_a_dropped_run_goes_with_the_last_of_its_late_store_entries(journal: SqliteJournal) -> None:
    """Until then its checkpoint has to stay, since it marks older entries as obsolete."""
    await journal.append([record(1), forgotten(1), Dropped("run"), change("state", b"x", -1)])
    await at_rest(journal)
    assert await count(journal, "checkpoint") == 1
    await journal.append([change("state", None, -1)])
    await at_rest(journal)
    assert await count(journal, "checkpoint") == 0


MIB = 1 << 20
VALUES = [change(f"k{number}", b"%d" % number * 2000) for number in range(2000)]  # some 13 MiB


async def shrunk(path: Path) -> tuple[int, int]:
    """Fill a file, delete nine of ten values, check the rest; return its size before and after."""
    journal = SqliteJournal(path)
    await journal.open()
    await journal.append(VALUES)
    await journal._in_writer(journal._file.shorten_log)
    full = (await journal._in_writer(path.stat)).st_size
    await journal.append([replace(value, value=None) for value in VALUES[200:]])
    await at_rest(journal)
    size = (await journal._in_writer(path.stat)).st_size
    await journal.close()
    assert set((await reopen(path)).store_entries) == set(VALUES[:200])
    return full, size


async def test_the_file_shrinks_when_much_was_deleted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, in bounded steps, to the kept bytes plus a tenth, and 4 MiB; it grows again, and loses nothing."""
    steps: list[int] = []

    @instead_of(monkeypatch, FreePages, "begin")
    def counted(begin: Any, pages: FreePages, connection: sqlite3.Connection) -> int:
        steps.append(begin(pages, connection))
        return steps[-1]

    kept = sum(len(value.value or b"") for value in VALUES[:200])
    for _ in range(2):
        full, size = await shrunk(path)
        assert full > 13 * MIB
        assert size < 1.1 * kept + 4 * MIB
    assert max(steps) == PAGES_PER_STEP


async def test_free_pages_of_an_earlier_process_are_given_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process may have ended too early."""
    with monkeypatch.context() as patch:
        patch.setattr(FreePages, "count", lambda *_: None)
        full, left = await shrunk(path)
    assert full == left
    journal = SqliteJournal(path)
    await journal.open()
    await at_rest(journal)
    assert (await journal._in_writer(path.stat)).st_size < 6 * MIB
    await journal.close()


async def test_a_file_from_before_works_and_keeps_its_size(path: Path) -> None:
    """SQLite can't change that without writing all of it again."""
    connection = sqlite3.connect(path)
    connection.executescript(f"{SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};")
    connection.close()
    for _ in range(2):
        full, size = await shrunk(path)
        assert full == size > 13 * MIB
