"""A damaged or foreign SQLite journal is refused, untouched, in one line that has the remedy."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path

import pytest

from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.journal.sqlite_rows import SCHEMA_VERSION
from rendezvous.journal.entries import change, checkpoint, record
from rendezvous.journal.files import append, child, contents, fill, recover, refused
from support.waiting import PATIENCE


def test_a_file_that_is_no_journal_is_refused(path: Path) -> None:
    """It may be the data of another program."""
    path.write_bytes(b"my thesis\n" * 1000)
    assert "is damaged (it is not a SQLite file) and was not touched" in refused(path)


@pytest.mark.parametrize("size", [1, 100, 5000, 4096, 2 * 4096])
def test_a_truncated_file_is_refused(path: Path, size: int) -> None:
    """Cut within its header, within a page, or between two pages."""
    fill(path)
    os.truncate(path, size)
    assert "is damaged (" in refused(path)


@pytest.mark.slow
def test_a_file_with_flipped_bytes_is_refused_or_makes_no_difference(path: Path) -> None:
    """Flip any byte: either it is noticed and nothing is changed, or the byte has no meaning."""
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
    assert noticed > 100


def test_flipped_bytes_in_the_middle_of_a_value_are_refused(path: Path) -> None:
    """SQLite itself does not notice that: its pages are still consistent."""
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
    child(script, path).communicate(timeout=PATIENCE)
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
    """Nothing was kept yet, so nothing is lost, and no file must be removed by hand."""
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


@pytest.mark.parametrize(
    ("deletion", "what"),
    [
        ("DELETE FROM record WHERE revision = 50", "record 51 of run 'run' comes where record 50 is due"),
        ("DELETE FROM record WHERE revision < 8", "record 8 of run 'run' comes where record 7 is due"),
        ("DELETE FROM record WHERE revision > 60", "no records after 60, but a checkpoint after record 100"),
        ("DELETE FROM record", "no records after 6, but a checkpoint after record 100"),
        ("DELETE FROM checkpoint", "record 7 of run 'run' comes where record 1 is due"),
        ("UPDATE checkpoint SET keep_from = 101", "an entry of run 'run' is not what was written"),
    ],
)
def test_a_gap_in_a_run_is_refused(path: Path, deletion: str, what: str) -> None:
    """Neither SQLite nor the checksum of a row can notice that: the present rows are intact."""
    records = [record(revision) for revision in range(1, 101)]
    asyncio.run(append(path, [*records, checkpoint(100, 7)], [change("k", b"x")]))
    connection = sqlite3.connect(path)
    connection.execute(deletion)
    connection.commit()
    connection.close()
    assert what in refused(path)
