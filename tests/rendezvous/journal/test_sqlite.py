"""The SQLite journal loses nothing it acknowledged, shares commits, and refuses what it can't trust, untouched."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rallypoint.rendezvous.journal.journal import JournalError, Recovered
from rallypoint.rendezvous.journal.sqlite import SCHEMA_VERSION, SqliteJournal
from rendezvous.journal.entries import change, record

TESTS = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the journal is, in a folder of its own."""
    folder = tmp_path / "var"
    folder.mkdir()
    return folder / "rendezvous.db"


@pytest.fixture
async def journal(path: Path) -> AsyncIterator[SqliteJournal]:
    """A journal, opened."""
    opened = SqliteJournal(path)
    await opened.open()
    yield opened
    await opened.close()


async def reopen(path: Path) -> Recovered:
    """What the next process finds."""
    journal = SqliteJournal(path)
    try:
        return await journal.open()
    finally:
        await journal.close()


def recover(path: Path) -> Recovered:
    """The same, where no event loop runs."""
    return asyncio.run(reopen(path))


def fill(path: Path) -> None:
    """Make a journal that spans several pages, and close it."""

    async def append() -> None:
        journal = SqliteJournal(path)
        await journal.open()
        await journal.append([record(revision, padding=100) for revision in range(1, 101)])
        await journal.append([change(f"key{number}", b"%d" % number * 20) for number in range(100)])
        await journal.close()

    asyncio.run(append())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the lock."""
    return {each.name: each.read_bytes() for each in folder.iterdir() if not each.name.endswith(".lock")}


def refused(path: Path) -> str:
    """The message with which a journal is refused; its folder must stay as it was, to the last byte."""
    before = contents(path.parent)
    with pytest.raises(JournalError) as refusal:
        recover(path)
    assert contents(path.parent) == before
    message = str(refusal.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that runs a script with everything of these tests at hand."""
    head = f"""
        import asyncio, os, resource, signal, sys
        sys.path.insert(0, {str(TESTS)!r})
        from pathlib import Path
        from rallypoint.rendezvous.journal.journal import JournalError
        from rallypoint.rendezvous.journal.sqlite import SqliteJournal
        from rendezvous.journal.entries import change, record
        path = Path(sys.argv[1])
    """
    program = textwrap.dedent(head) + textwrap.dedent(script)
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# ---- commits


class Commits:
    """What a journal's connection does, statement by statement."""

    def __init__(self, journal: SqliteJournal) -> None:
        self._journal = journal
        self.statements: list[str] = []

    async def __aenter__(self) -> Commits:
        await self._trace(self.statements.append)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._trace(None)

    async def _trace(self, callback: Callable[[str], object] | None) -> None:
        connection = self._journal._connection
        assert connection is not None
        await self._journal._in_writer(lambda: connection.set_trace_callback(callback))

    @property
    def count(self) -> int:
        return self.statements.count("COMMIT")


async def test_appends_made_together_share_one_commit(journal: SqliteJournal) -> None:
    """A hundred callers, one trip to the disk."""
    async with Commits(journal) as commits:
        await asyncio.gather(*(journal.append([record(revision)]) for revision in range(1, 101)))
    assert commits.count == 1


async def test_what_arrives_during_a_commit_makes_up_the_next(journal: SqliteJournal) -> None:
    """A slow disk makes larger groups, not a longer queue of commits; nobody is told before its own commit."""
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
        connection = journal._connection
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


# ---- failures


async def test_after_a_failed_commit_nothing_is_believed_any_more(journal: SqliteJournal) -> None:
    """Who waits, who comes during it and who comes later all get the error; none is told of success."""
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


async def test_whatever_goes_wrong_in_a_commit_nobody_waits_for_ever(journal: SqliteJournal) -> None:
    """Also an error that is none of SQLite's: a number that it has no room for."""
    with pytest.raises(JournalError, match="too large"):
        await journal.append([change("k", b"x", 2**70)])
    with pytest.raises(JournalError):
        await journal.append([record(1)])


def test_a_full_disk_is_an_error_and_loses_nothing_acknowledged(path: Path) -> None:
    """The process that finds no room stays broken, also when there is room again; the next one has all it acked."""
    script = """
        async def main():
            journal = SqliteJournal(path)
            await journal.open()
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            for revision in range(1, 1000):
                try:
                    await journal.append([record(revision, padding=5000)])
                except JournalError as error:
                    print("failed", revision, str(error).count("\\n"), str(path) in str(error))
                    break
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            try:
                await journal.append([change("k", b"x")])
            except JournalError:
                print("still broken")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    process = child(script, path)
    output, _ = process.communicate(timeout=30)
    first, second = output.splitlines()
    _, revision, newlines, named = first.split()
    assert (newlines, named, second) == ("0", "True", "still broken")
    recovered = recover(path)
    acknowledged = list(range(1, int(revision)))
    assert len(acknowledged) >= 5
    assert [each.revision for each in recovered.records][: len(acknowledged)] == acknowledged
    assert list(recovered.store_entries) == []


@pytest.mark.parametrize("acks", [1, 7, 300])
def test_kill_9_loses_nothing_acknowledged(path: Path, acks: int) -> None:
    """Killed in the middle of appends: what was acknowledged is there, whole and in order."""
    script = """
        async def main():
            journal = SqliteJournal(path)
            await journal.open()
            for revision in range(1, 1_000_000, 3):
                await journal.append([record(revision + n) for n in range(3)] + [change("k", b"%d" % revision)])
                print(revision, flush=True)
        asyncio.run(main())
    """
    process = child(script, path)
    assert process.stdout is not None
    for _ in range(acks):
        process.stdout.readline()
    process.kill()
    rest, _ = process.communicate(timeout=30)
    # The last line may be cut; the one before is an acknowledgement that got out.
    lines = rest.split("\n")[:-1]
    last = int(lines[-1]) if lines else (acks - 1) * 3 + 1
    recovered = recover(path)
    revisions = [each.revision for each in recovered.records]
    assert revisions == list(range(1, len(revisions) + 1))
    assert revisions[-1] >= last + 2
    (entry,) = recovered.store_entries
    assert entry.value is not None
    assert int(entry.value) == revisions[-1] - 2, "a record and its store entries are kept together"


# ---- who may open it


def test_a_second_process_is_locked_out(path: Path) -> None:
    """It is told so in one line, and as soon as the first is dead, however it died, the next one gets in."""
    script = """
        async def main():
            journal = SqliteJournal(path)
            await journal.open()
            await journal.append([record(1)])
            print("open", flush=True)
            sys.stdin.readline()
        asyncio.run(main())
    """
    holder = child(script, path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    with pytest.raises(JournalError, match=r"in use by another process.*--journal"):
        recover(path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=30)
    assert len(recover(path).records) == 1


async def test_the_lock_keeps_out_a_second_journal_of_the_same_process(
    journal: SqliteJournal, path: Path
) -> None:
    """And being refused does not take the lock from who has it."""
    for _ in range(2):
        with pytest.raises(JournalError, match="in use"):
            await reopen(path)
    await journal.append([record(1)])


def test_a_place_that_can_not_be_is_refused_in_one_line(tmp_path: Path) -> None:
    """A folder that is a file, a file that is a folder."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "file" / "rendezvous.db", tmp_path / "folder"):
        with pytest.raises(JournalError) as refusal:
            recover(place)
        assert str(refusal.value).startswith(f"can't open the journal {place}: ")
        assert "\n" not in str(refusal.value)


# ---- what it may be


def test_a_file_that_is_no_journal_is_refused(path: Path) -> None:
    """Whatever it is, it belongs to somebody."""
    path.write_bytes(b"my thesis\n" * 1000)
    assert "is damaged (it is not a SQLite file) and was not touched" in refused(path)


@pytest.mark.parametrize("size", [1, 100, 5000, 4096, 2 * 4096])
def test_a_truncated_file_is_refused(path: Path, size: int) -> None:
    """Cut within its header, within a page, or between two pages."""
    fill(path)
    os.truncate(path, size)
    assert "is damaged (" in refused(path)


def test_a_file_with_flipped_bytes_is_refused_or_makes_no_difference(path: Path) -> None:
    """Flip any byte: either it is noticed and nothing is touched, or it was one that means nothing."""
    fill(path)
    intact = recover(path)
    whole = path.read_bytes()
    assert len(whole) > 8 * 4096
    noticed = 0
    for offset in range(0, len(whole), 151):
        broken = bytearray(whole)
        broken[offset] ^= 0x5A
        path.write_bytes(broken)
        try:
            recovered = recover(path)
        except JournalError:
            noticed += 1
            assert path.read_bytes() == broken
        else:
            assert recovered == intact, f"byte {offset} changed what is recovered"
        for leftover in path.parent.glob("*-*"):
            leftover.unlink()
    assert noticed > 150


def test_flipped_bytes_in_the_middle_of_a_value_are_refused(path: Path) -> None:
    """Which SQLite itself does not notice: its pages hang together as before."""
    fill(path)
    whole = path.read_bytes()
    assert b"42" * 20 in whole
    path.write_bytes(whole.replace(b"42" * 20, b"42" * 19 + b"43"))
    assert "an entry of run 'run' is not what was written" in refused(path)


def test_a_damaged_file_with_a_log_left_behind_is_refused(path: Path) -> None:
    """After a kill -9 part of the journal is in the write-ahead log: neither is changed, and no index is left."""
    fill(path)
    script = """
        async def main():
            journal = SqliteJournal(path)
            await journal.open()
            await journal.append([record(101)])
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    child(script, path).communicate(timeout=30)
    path.with_name(path.name + "-shm").unlink()  # as a backup would have it
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"42" * 20, b"42" * 19 + b"43"))
    assert set(contents(path.parent)) == {"rendezvous.db", "rendezvous.db-wal"}
    refused(path)
    path.write_bytes(whole)
    assert [each.revision for each in recover(path).records] == list(range(1, 102))


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, 77])
def test_another_schema_version_is_refused(path: Path, version: int) -> None:
    """A journal of a newer Rallypoint, or the database of another program."""
    fill(path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    message = refused(path)
    assert f"has schema version {version}, this program knows {SCHEMA_VERSION}" in message
    assert "--journal" in message


def test_the_database_of_another_program_is_refused(path: Path) -> None:
    """Even if it has our version number by chance."""
    connection = sqlite3.connect(path)
    connection.executescript(f"CREATE TABLE photo (id); PRAGMA user_version = {SCHEMA_VERSION};")
    connection.close()
    assert "no such table" in refused(path)


@pytest.mark.parametrize("stage", ["lock only", "empty file", "header only"])
def test_a_server_killed_while_it_made_the_journal_starts_again(path: Path, stage: str) -> None:
    """Nothing was kept yet, so nothing is lost, and nobody has to remove anything."""
    if stage == "lock only":
        path.with_name(path.name + ".lock").touch()
    else:
        path.touch()
    if stage == "header only":
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.close()
        assert path.stat().st_size > 0
    recovered = recover(path)
    assert (list(recovered.records), list(recovered.store_entries)) == ([], [])
    fill(path)
    assert len(recover(path).records) == 100
