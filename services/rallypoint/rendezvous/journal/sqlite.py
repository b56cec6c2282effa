"""The embedded journal: one SQLite file, one connection, one writer thread, group commit."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from google.protobuf.message import DecodeError

from rallypoint.rendezvous.journal.journal import Entry, JournalError, Recovered
from rallypoint.rendezvous.store.ports import StoreChange
from rallypoint.rendezvous.v1.journal_pb2 import JournalRecord

SCHEMA_VERSION = 1
_HEADER = b"SQLite format 3\x00"
# SQLite checks how its pages hang together, not what is in them; the checksums do that.
_SCHEMA = """
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
"""

_T = TypeVar("_T")


class SqliteJournal:
    """Keeps entries in a SQLite file.

    Write-ahead log with synchronous=FULL: a commit is on the disk before `append` returns. (NORMAL could lose
    acknowledged commits with the power, and for a round number that means giving it out twice.) One connection
    only, since SQLite before 3.51.3 can corrupt a WAL that two connections reset; a lock file keeps other
    processes away.
    """

    def __init__(self, path: Path) -> None:
        """`path`: the file; it and its folder are made where they are missing."""
        self._path = path
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock: int | None = None
        self._connection: sqlite3.Connection | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: list[tuple[Sequence[Entry], asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None
        self._broken: JournalError | None = None

    async def open(self) -> Recovered:
        """Take the lock, check the file, read it; see `Journal.open`."""
        return await self._in_writer(self._open)

    async def append(self, entries: Sequence[Entry]) -> None:
        """Commit entries, together with whatever else is being appended; see `Journal.append`."""
        if self._broken is not None:
            raise self._broken
        durable = asyncio.get_running_loop().create_future()
        self._pending.append((entries, durable))
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit_pending())
        await durable

    async def close(self) -> None:
        """Commit what is pending, close the file, give the lock up."""
        if self._committing is not None:
            await self._committing
        await self._in_writer(self._close)
        self._writer.shutdown()

    async def _commit_pending(self) -> None:
        """Commit until nothing is pending: what arrives during one commit makes up the next."""
        try:
            while self._pending:
                group, self._pending = self._pending, []
                try:
                    if self._broken is None:
                        await self._in_writer(functools.partial(self._commit, group))
                except JournalError as error:
                    self._broken = error
                for _, durable in group:
                    if durable.done():
                        continue
                    if self._broken is None:
                        durable.set_result(None)
                    else:
                        durable.set_exception(self._broken)
        finally:
            self._committing = None

    async def _in_writer(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, call)

    def _open(self) -> Recovered:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            kept = self._read_untouched()
            self._connection = self._connect(fresh=kept is None)
            return kept or Recovered([], [])
        except (OSError, sqlite3.Error, ValueError) as error:
            self._close()
            reason = getattr(error, "strerror", None) or error
            raise JournalError(
                f"can't open the journal {self._path}: {reason}; mend that, or choose another file with --journal"
            ) from error
        except JournalError:
            self._close()
            raise

    def _take_lock(self) -> None:
        self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalError(
                f"the journal {self._path} is in use by another process; stop that one, or choose another file "
                "with --journal"
            ) from error

    def _read_untouched(self) -> Recovered | None:
        """Check and read the file without the right to change it; None where nothing was ever kept."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            return None
        with self._path.open("rb") as file:
            if file.read(len(_HEADER)) != _HEADER:
                raise self._damaged("it is not a SQLite file")
        try:
            with self._reading() as connection:
                if not self._check(connection):
                    return None
                return self._read(connection)
        except (sqlite3.DatabaseError, DecodeError) as error:
            raise self._damaged(str(error)) from error

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that leaves the file and its folder as they are."""
        wal, index = (self._path.with_name(self._path.name + end) for end in ("-wal", "-shm"))
        unfinished = wal.exists() and wal.stat().st_size > 0
        # A reader of a WAL needs its index, and makes one where there is none. Where no WAL was left behind,
        # `immutable` keeps it from making both.
        indexed = index.exists()
        mode = "mode=ro" if unfinished else "mode=ro&immutable=1"
        connection = sqlite3.connect(f"{self._path.absolute().as_uri()}?{mode}", uri=True)
        try:
            yield connection
        finally:
            connection.close()
            if unfinished and not indexed:
                index.unlink(missing_ok=True)

    def _check(self, connection: sqlite3.Connection) -> bool:
        """Refuse a file that can't be trusted; False where it was made and nothing was ever committed to it."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == 0 and tables == 0:
            return False
        if version != SCHEMA_VERSION:
            raise JournalError(
                f"the journal {self._path} has schema version {version}, this program knows {SCHEMA_VERSION}; "
                "use the version of Rallypoint that wrote it, or choose another file with --journal"
            )
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise self._damaged(verdict)
        return True

    def _damaged(self, what: str) -> JournalError:
        return JournalError(
            f"the journal {self._path} is damaged ({' '.join(what.split())}) and was not touched; restore it from "
            "a backup, or move it away to start without its runs"
        )

    def _connect(self, fresh: bool) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=True)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        if fresh:
            connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        return connection

    def _read(self, connection: sqlite3.Connection) -> Recovered:
        rows = connection.execute(
            "SELECT checksum, run_id, revision, record FROM record ORDER BY run_id, revision"
        )
        records = [JournalRecord.FromString(row[-1]) for row in rows if self._intact(row)]
        rows = connection.execute("SELECT checksum, run_id, round, key, value FROM store")
        return Recovered(records, [StoreChange(*row[1:]) for row in rows if self._intact(row)])

    def _intact(self, row: Sequence[object]) -> bool:
        checksum, run_id, *rest = row
        if checksum != _checksum(run_id, *rest):
            raise self._damaged(f"an entry of run {run_id!r} is not what was written")
        return True

    def _commit(self, group: Sequence[tuple[Sequence[Entry], object]]) -> None:
        assert self._connection is not None
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for entries, _ in group:
                for entry in entries:
                    self._write(entry)
            self._connection.execute("COMMIT")
        except Exception as error:
            raise JournalError(
                f"can't write the journal {self._path}: {error}; what of the last commit reached the disk is "
                "unknown, so the service must start again and read it"
            ) from error

    def _write(self, entry: Entry) -> None:
        assert self._connection is not None
        if isinstance(entry, JournalRecord):
            row = (entry.run_id, entry.revision, entry.SerializeToString())
            self._connection.execute("INSERT INTO record VALUES (?, ?, ?, ?)", (*row, _checksum(*row)))
        elif entry.value is not None:
            change = (entry.run_id, entry.round, entry.key, entry.value)
            self._connection.execute(
                "INSERT OR REPLACE INTO store VALUES (?, ?, ?, ?, ?)", (*change, _checksum(*change))
            )
        else:
            self._connection.execute(
                "DELETE FROM store WHERE run_id = ? AND round = ? AND key = ?",
                (entry.run_id, entry.round, entry.key),
            )

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            # The lock file stays: to unlink it would let a third process lock a file that is no longer there.
            os.close(self._lock)
            self._lock = None


def _checksum(*row: object) -> int:
    """A checksum of an entry's columns, the last of them bytes."""
    *names, content = row
    assert isinstance(content, bytes)
    return crc32(content, crc32(repr(names).encode()))
