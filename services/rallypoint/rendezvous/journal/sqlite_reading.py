"""Read the contents of a SQLite journal without changing a byte of it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.journal.journal import (
    Checkpoint,
    JournalError,
    OutOfSequenceError,
    Record,
    Recovered,
    Span,
)
from rallypoint.rendezvous.journal.sqlite_rows import SCHEMA, SCHEMA_VERSION, checksum
from rallypoint.rpc.runtime_folder import open_private

_HEADER = b"SQLite format 3\x00"
# Errors of the disk and of permissions, not of the file; low byte of the extended codes.
_OUTSIDE = {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}
# By schema version. Version 1 had neither checkpoints nor eras.
_RECORDS = {
    1: "SELECT checksum, run_id, revision, record FROM record ORDER BY run_id, revision",
    2: "SELECT checksum, run_id, revision, content FROM record ORDER BY run_id, revision",
}
_CHECKPOINTS = {2: "SELECT checksum, run_id, revision, keep_from, era, content FROM checkpoint"}
_STORE = {
    1: "SELECT checksum, run_id, round, key, value FROM store",
    2: "SELECT checksum, run_id, era, round, key, value FROM store",
}


@dataclass(slots=True)
class FileContents:
    """The contents of a journal's file.

    Attributes:
        version: Version of its schema.
        recovered: All that is kept.
        spans: The kept records, by run.
        leftovers: Runs with rows in the file that are no longer kept.
        commits: Number of commits; 0 if they were not counted yet.
    """

    version: int = SCHEMA_VERSION
    recovered: Recovered = field(default_factory=lambda: Recovered([], [], []))
    spans: dict[str, Span] = field(default_factory=dict)
    leftovers: dict[str, None] = field(default_factory=dict)
    commits: int = 0


def damaged(path: Path, what: str) -> JournalError:
    """Return the error for a file that can't be trusted."""
    return JournalError(
        f"the journal {path} is damaged ({' '.join(what.split())}) and was not touched; restore it from a backup, or "
        "move it away to start without its runs"
    )


def read_untouched(path: Path) -> FileContents | None:
    """Check and read a journal without write access; return None if it is empty.

    Raises:
        JournalError: It is damaged, or of another version, or no journal at all.
        OSError, sqlite3.Error: It can't be read.
    """
    if not path.exists() or path.stat().st_size == 0:
        return None
    with path.open("rb") as file:
        if file.read(len(_HEADER)) != _HEADER:
            raise damaged(path, "it is not a SQLite file")
    try:
        with reading(path) as connection:
            version = _check(path, connection)
            return _FileReader(path, connection, version).read() if version else None
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _OUTSIDE:
            raise
        raise damaged(path, str(error)) from error


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection that leaves the file and its folder unchanged, for the holder of the lock file."""
    log = path.with_name(path.name + "-wal")
    # Reading a log needs an index of it. With exclusive locking SQLite keeps the index in memory, without a file in the
    # folder or room on a full disk. A reader without write permission can't lock, and need not: hence `unix-none`. If
    # there is no log, `immutable` keeps SQLite from creating one.
    mode = "vfs=unix-none" if log.exists() and log.stat().st_size > 0 else "immutable=1"
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&{mode}", uri=True)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        yield connection
    finally:
        connection.close()


def _check(path: Path, connection: sqlite3.Connection) -> int:
    """Return the schema version of a file that can be trusted; 0 if nothing was ever committed to it."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version == 0 and tables == 0:
        return 0
    if version not in _RECORDS:
        raise JournalError(
            f"the journal {path} has schema version {version}, this program knows {SCHEMA_VERSION} and older; use the "
            "version of Rallypoint that wrote it, or choose another file with --journal"
        )
    (result,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if result != "ok":
        raise damaged(path, result)
    return int(version)


class _FileReader:
    """Reads the rows of a connection; every row must match its checksum, and every run must be without a gap."""

    def __init__(self, path: Path, connection: sqlite3.Connection, version: int) -> None:
        self._path = path
        self._connection = connection
        self._contents = FileContents(version)

    def read(self) -> FileContents:
        checkpoints = list(self._checkpoints())
        records = list(self._records())
        for checkpoint in checkpoints:
            last = self._contents.spans[checkpoint.run_id].last
            if last < checkpoint.revision:
                raise damaged(
                    self._path,
                    f"run {checkpoint.run_id!r} has no records after {last}, but a checkpoint after record "
                    f"{checkpoint.revision}",
                )
        self._contents.recovered = Recovered(checkpoints, records, list(self._store_entries()))
        if self._contents.version > 1:
            ((self._contents.commits,),) = self._connection.execute("SELECT number FROM commits").fetchall()
        return self._contents

    def _rows(self, query: str | None) -> Iterator[Sequence[Any]]:
        for row in self._connection.execute(query) if query else ():
            stored, *columns = row
            if stored != checksum(*columns):
                raise damaged(self._path, f"an entry of run {columns[0]!r} is not what was written")
            yield columns

    def _checkpoints(self) -> Iterator[Checkpoint]:
        for run_id, revision, keep_from, era, content in self._rows(_CHECKPOINTS.get(self._contents.version)):
            self._contents.spans[run_id] = Span(keep_from, keep_from - 1, era)
            yield Checkpoint(run_id, revision, content, keep_from)

    def _records(self) -> Iterator[Record]:
        for row in self._rows(_RECORDS[self._contents.version]):
            record = Record(*row)
            span = self._contents.spans.setdefault(record.run_id, Span())
            if record.revision < span.first:
                self._contents.leftovers[record.run_id] = None
                continue
            try:
                span.add(record)
            except OutOfSequenceError as error:
                raise damaged(self._path, str(error)) from error
            yield record

    def _store_entries(self) -> Iterator[StoreChange]:
        for run_id, *rest in self._rows(_STORE[self._contents.version]):
            era = rest.pop(0) if self._contents.version > 1 else 0
            span = self._contents.spans.get(run_id)
            if era == (span.era if span else 0):
                yield StoreChange(run_id, *rest)
            else:
                self._contents.leftovers[run_id] = None


# ---- Migration of a SQLite journal of an older version, with a copy of the old file.


_CHUNK = 1 << 20

# A record is kept as it was. The checksum of a store entry covers its key, which changes, so it is computed again.
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
    """Copy a journal to a file beside it, for going back to the version that wrote it.

    The migration itself needs no copy: it is one transaction. An existing copy is replaced; it is from a migration that
    failed, or from a file that was restored since.

    Raises:
        OSError, sqlite3.Error: No room, or no permission.
    """
    copy = path.with_name(f"{path.name}.v{version}")
    part = path.with_name(f"{path.name}.v{version}.part")
    part.unlink(missing_ok=True)
    os.close(open_private(part, os.O_RDWR | os.O_CREAT))
    with reading(path) as source, contextlib.closing(sqlite3.connect(part)) as target:
        source.backup(target)
    sync(part)
    part.replace(copy)
    sync(path.parent)
    return copy


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate a journal of version 1 to the present one, all or nothing (sqlite3.Error: it is unchanged)."""
    connection.create_function("entry_checksum", 5, checksum, deterministic=True)
    connection.executescript(_FROM_1)


def write_again(path: Path) -> None:
    """Force the visible contents of a file, and its folder's entry for it, onto the disk; see `JournalFile`.

    Does nothing if there is no such file. Writes in place, so it takes no room. If the power fails meanwhile, each
    sector has either the bytes it had on the disk or those the file showed. For an acknowledged commit the two are the
    same.

    Raises:
        OSError: The contents may be on the disk or not.
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
    """Sync a file, or the entries of a folder, to the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
