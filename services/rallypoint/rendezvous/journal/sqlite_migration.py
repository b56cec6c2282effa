"""A SQLite journal of an older version is brought up to date, and a copy of it is kept."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from rallypoint.rendezvous.journal.sqlite_reading import reading
from rallypoint.rendezvous.journal.sqlite_rows import SCHEMA, SCHEMA_VERSION, checksum

_CHUNK = 1 << 20

# A record is kept as it was. What is in the key of a store entry is in its checksum, so that is made anew.
_FROM_1 = f"""
BEGIN IMMEDIATE;
ALTER TABLE record RENAME TO old_record;
ALTER TABLE store RENAME TO old_store;
{SCHEMA}
INSERT INTO record SELECT run_id, revision, record, checksum FROM old_record;
INSERT INTO store
    SELECT run_id, 0, round, key, value, entry_checksum(run_id, 0, round, key, value) FROM old_store;
DROP TABLE old_record;
DROP TABLE old_store;
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""  # noqa: S608 - all of it is ours


def keep_copy(path: Path, version: int) -> Path:
    """Copy a journal to beside itself, for whoever must go back to the version that wrote it.

    The migration itself needs no copy: it is one transaction. A copy of that name is replaced; it was made by a
    migration that did not come about, or of what was gone back to since.

    Raises:
        OSError, sqlite3.Error: There is no room, or no right.
    """
    copy = path.with_name(f"{path.name}.v{version}")
    part = path.with_name(f"{path.name}.v{version}.part")
    part.unlink(missing_ok=True)
    with reading(path) as source, contextlib.closing(sqlite3.connect(part)) as target:
        source.backup(target)
    sync(part)
    part.replace(copy)
    sync(path.parent)
    return copy


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a journal of version 1 up to date, all or nothing.

    Raises:
        sqlite3.Error: It is as it was.
    """
    connection.create_function("entry_checksum", 5, checksum, deterministic=True)
    connection.executescript(_FROM_1)


def write_again(path: Path) -> None:
    """Put on the disk what a file shows, if there is one, and that its folder lists it; see `JournalFile`.

    In place, so that it takes no room. If the power goes meanwhile, each sector has the bytes that it had on the disk
    or those that the file showed. Those of an acknowledged commit are the same in both.

    Raises:
        OSError: It may be on the disk or not.
    """
    if not path.exists():
        return
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        at = 0
        while content := os.pread(file, _CHUNK, at):
            at += os.pwrite(file, content, at)
        os.fsync(file)
    finally:
        os.close(file)
    sync(path.parent)


def sync(path: Path) -> None:
    """See to it that a file, or what a folder lists, is on the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
