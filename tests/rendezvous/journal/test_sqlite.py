"""The SQLite journal shares commits, acknowledges no append before its own, and after a failure takes no more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.rendezvous.journal.journal import Entry, JournalError, Recovered
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rendezvous.journal.entries import change, checkpoint, forgotten, record
from rendezvous.journal.files import reopen


class Commits:
    """The statements of a journal's connection."""

    def __init__(self, journal: SqliteJournal) -> None:
        self._journal = journal
        self.statements: list[str] = []

    async def __aenter__(self) -> Commits:
        await self._trace(self.statements.append)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._trace(None)

    async def _trace(self, callback: Callable[[str], object] | None) -> None:
        connection = self._journal._file._connection
        assert connection is not None
        await self._journal._in_writer(lambda: connection.set_trace_callback(callback))

    @property
    def count(self) -> int:
        return self.statements.count("COMMIT")


async def test_appends_made_together_share_one_commit(journal: SqliteJournal) -> None:
    """A hundred callers, one write to the disk."""
    async with Commits(journal) as commits:
        await asyncio.gather(*(journal.append([record(revision)]) for revision in range(1, 101)))
    assert commits.count == 1


async def test_appends_during_a_commit_make_up_the_next(journal: SqliteJournal) -> None:
    """A slow disk makes larger groups, not a longer queue of commits; each append returns after its own commit."""
    async with Commits(journal) as commits:
        disk = threading.Event()
        slow = asyncio.ensure_future(journal._in_writer(disk.wait))
        first = asyncio.ensure_future(journal.append([record(1)]))
        await asyncio.sleep(0)
        later = [asyncio.ensure_future(journal.append([record(revision)])) for revision in range(2, 52)]
        await asyncio.sleep(0)
        assert not any(each.done() for each in [first, *later])
        assert commits.count == 0
        disk.set()
        await asyncio.gather(slow, first, *later)
    assert commits.count == 2


async def test_a_commit_is_on_the_disk_when_it_is_acknowledged(journal: SqliteJournal) -> None:
    """Write-ahead log with synchronous=FULL (2): one fsync per commit, also against loss of power."""

    def pragmas() -> tuple[object, object]:
        connection = journal._file._connection
        assert connection is not None
        return tuple(
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")
        )

    assert await journal._in_writer(pragmas) == ("wal", 2)


async def test_the_entries_of_one_call_are_kept_together_or_not_at_all(path: Path) -> None:
    """A call that fails half-way leaves none of its entries behind, nor those of its group."""
    journal = SqliteJournal(path)
    await journal.open()
    await journal.append([record(1)])
    with pytest.raises(JournalError):
        await journal.append([record(2), change("k", b"x"), record(1)])  # a revision can't come twice
    await journal.close()
    recovered = await reopen(path)
    assert [each.revision for each in recovered.records] == [1]
    assert list(recovered.store_entries) == []


async def test_after_a_failed_commit_every_append_fails(journal: SqliteJournal) -> None:
    """Appends before, during and after it all get the error; none of them succeeds."""
    await journal.append([record(1)])
    disk = threading.Event()
    slow = asyncio.ensure_future(journal._in_writer(disk.wait))
    failing = asyncio.ensure_future(journal.append([record(1)]))
    await asyncio.sleep(0)
    behind = asyncio.ensure_future(journal.append([record(2)]))
    await asyncio.sleep(0)
    disk.set()
    await slow
    for each in (failing, behind, journal.append([record(3)])):
        with pytest.raises(JournalError, match="must start again"):
            await each


async def test_no_append_waits_for_ever_after_any_error_of_a_commit(journal: SqliteJournal) -> None:
    """Also after an error that is not SQLite's: a number that it has no room for."""
    with pytest.raises(JournalError, match="too large"):
        await journal.append([change("k", b"x", 2**70)])
    with pytest.raises(JournalError):
        await journal.append([record(1)])


@pytest.mark.parametrize("entry", [record(3), record(1), checkpoint(1, 3), checkpoint(2, 1), forgotten(0)])
async def test_an_entry_that_would_leave_a_gap_is_never_written(path: Path, entry: Entry) -> None:
    """The next start would find it too late; the caller has the bug, and gets the error now."""
    journal = SqliteJournal(path)
    await journal.open()
    await journal.append([record(1)])
    with pytest.raises(JournalError, match=r"can't write the journal .*run 'run'"):
        await journal.append([entry])
    await journal.close()
    assert await reopen(path) == Recovered([], [record(1)], [])


async def test_a_journal_that_is_closed_takes_no_more(path: Path) -> None:
    """A late append fails at once and does not wait."""
    journal = SqliteJournal(path)
    await journal.open()
    await journal.close()
    with pytest.raises(JournalError, match="is closed"):
        await journal.append([record(1)])
