"""A SQLite journal of version 1 is brought up to date: all of it, or not at all."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from zlib import crc32

import pytest

from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.journal.sqlite_rows import SCHEMA_VERSION
from rendezvous.journal.entries import change, checkpoint, record
from rendezvous.journal.files import append, child, contents, recover, refused, reopen
from support.waiting import PATIENCE

# The schema of that version.
SCHEMA_1 = """
CREATE TABLE record (
    run_id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    record BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (run_id, revision)
) WITHOUT ROWID;
CREATE TABLE store (
    run_id TEXT NOT NULL,
    round INTEGER NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (run_id, round, key)
);
PRAGMA user_version = 1;
"""
RECORDS = [record(revision, run_id) for run_id in ("a", "ä'") for revision in range(1, 60)]
VALUES = [change(f"key{n}", b"\x00value%d" % n * n, n % 3, "a") for n in range(60)]


def checksum_1(*row: object) -> int:
    """The checksum of that version."""
    *names, content = row
    assert isinstance(content, bytes)
    return crc32(content, crc32(repr(names).encode()))


@pytest.fixture
def old(path: Path) -> Path:
    """A journal of version 1, its last commits still in the log."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(SCHEMA_1)
    for each in RECORDS:
        row = (each.run_id, each.revision, each.content)
        connection.execute("INSERT INTO record VALUES (?, ?, ?, ?)", (*row, checksum_1(*row)))
    for value in VALUES:
        entry = (value.run_id, value.round, value.key, value.value)
        connection.execute("INSERT INTO store VALUES (?, ?, ?, ?, ?)", (*entry, checksum_1(*entry)))
    left = {file: file.read_bytes() for file in path.parent.glob("*") if not file.name.endswith("-shm")}
    connection.close()
    for file, content in left.items():
        file.write_bytes(content)
    assert path.with_name(path.name + "-wal").stat().st_size > 0
    return path


def version_of(path: Path) -> int:
    connection = sqlite3.connect(path)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    assert isinstance(version, int)
    return version


async def test_nothing_is_lost_and_the_runs_go_on(old: Path) -> None:
    """Also the commits that were still in the log; the next process finds the new version, and the same contents."""
    for _ in range(2):
        recovered = await reopen(old)
        assert sorted(recovered.records, key=lambda each: (each.run_id, each.revision)) == RECORDS
        assert set(recovered.store_entries) == set(VALUES)
        assert version_of(old) == SCHEMA_VERSION
    await append(old, [record(60, "a"), checkpoint(60, 59, "a"), change("key1", None, 1, "a")])
    recovered = await reopen(old)
    assert list(recovered.checkpoints) == [checkpoint(60, 59, "a")]
    assert [each.revision for each in recovered.records if each.run_id == "a"] == [59, 60]
    assert len(recovered.store_entries) == len(VALUES) - 1


async def test_a_copy_is_kept_with_which_one_can_go_back(old: Path) -> None:
    """It is complete by itself, of the old version, and as private as the journal."""
    await reopen(old)
    copy = old.with_name(old.name + ".v1")
    assert version_of(copy) == 1
    assert {each.stat().st_mode & 0o777 for each in old.parent.iterdir()} == {0o600}
    assert set(contents(old.parent)) == {old.name, copy.name}
    copy.replace(old)
    assert len((await reopen(old)).records) == len(RECORDS)


@pytest.mark.parametrize("statement", [0, 2, 4, 6, 8, 10, 12, 13])
def test_killed_in_the_middle_it_begins_again(old: Path, statement: int) -> None:
    """Before any statement of it, COMMIT is 13: the file is of one version or the other, and holds everything."""
    script = f"""
        from rallypoint.rendezvous.journal import sqlite as sqlite_file
        def migrate(connection):
            seen = []
            def die(text):
                seen.append(text)
                if len([each for each in seen if not each.startswith("--")]) > {statement}:
                    print("killed", flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
            connection.execute("PRAGMA cache_size = 1")  # so that half of it is on the disk
            connection.set_trace_callback(die)
            original(connection)
        original, sqlite_file.migrate = sqlite_file.migrate, migrate
        asyncio.run(SqliteJournal(path).open())
    """
    process = child(script, old)
    output, _ = process.communicate(timeout=PATIENCE)
    assert output == "killed\n"
    recovered = recover(old)
    assert sorted(recovered.records, key=lambda each: (each.run_id, each.revision)) == RECORDS
    assert set(recovered.store_entries) == set(VALUES)


def test_without_room_for_the_copy_nothing_is_changed(old: Path) -> None:
    """A folder at its path has the same effect as a full disk."""
    old.with_name(old.name + ".v1.part").mkdir()
    before = {each.name: each.read_bytes() for each in old.parent.glob("*db*") if each.is_file()}
    with pytest.raises(JournalError, match=r"can't open the journal .*: Is a directory; fix that"):
        recover(old)
    after = {each.name: each.read_bytes() for each in old.parent.glob("*db*") if each.is_file()}
    assert {**before, f"{old.name}.lock": b""} == after


def test_a_damaged_one_is_refused_as_it_is(old: Path) -> None:
    """It is checked before it is changed."""
    recover(old)
    copy = old.with_name(old.name + ".v1")
    whole = copy.read_bytes()
    old.write_bytes(whole.replace(b"\x00value42", b"\x00value24", 1))
    assert "is not what was written" in refused(old)
