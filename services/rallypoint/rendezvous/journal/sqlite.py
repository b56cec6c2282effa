"""The embedded journal: one SQLite file, one connection, one writer thread, group commit."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rallypoint.rendezvous.journal.journal import Entry, JournalError, Recovered
from rallypoint.rendezvous.store.ports import StoreChange
from rallypoint.rendezvous.v1.journal_pb2 import JournalRecord

SCHEMA_VERSION = 1
_HEADER = b"SQLite format 3\x00"
_SCHEMA = """
CREATE TABLE record (
    run_id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    record BLOB NOT NULL,
    PRIMARY KEY (run_id, revision)
) WITHOUT ROWID;
CREATE TABLE store (
    run_id TEXT NOT NULL,
    round INTEGER NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
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
                        await self._in_writer(lambda group=group: self._commit(group))  # type: ignore[misc]
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
            fresh = not self._path.exists() or self._path.stat().st_size == 0
            if not fresh:
                self._check()
            self._connection = self._connect(fresh)
            return self._read()
        except (OSError, sqlite3.Error, ValueError) as error:
            self._close()
            raise JournalError(f"can't open the journal {self._path}: {error}") from error
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

    def _check(self) -> None:
        """Look at an existing file without the right to change it."""
        with self._path.open("rb") as file:
            if file.read(len(_HEADER)) != _HEADER:
                raise self._damaged("it is not a SQLite file")
        connection = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                raise JournalError(
                    f"the journal {self._path} has schema version {version}, this program knows {SCHEMA_VERSION}; "
                    "use the version of Rallypoint that wrote it, or choose another file with --journal"
                )
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                raise self._damaged(verdict)
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from error
        finally:
            connection.close()

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

    def _read(self) -> Recovered:
        assert self._connection is not None
        rows = self._connection.execute("SELECT record FROM record ORDER BY run_id, revision")
        records = [JournalRecord.FromString(row[0]) for row in rows]
        rows = self._connection.execute("SELECT run_id, round, key, value FROM store")
        return Recovered(records, [StoreChange(*row) for row in rows])

    def _commit(self, group: Sequence[tuple[Sequence[Entry], object]]) -> None:
        assert self._connection is not None
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for entries, _ in group:
                for entry in entries:
                    self._write(entry)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise JournalError(
                f"can't write the journal {self._path}: {error}; what of the last commit reached the disk is "
                "unknown, so the service must start again and read it"
            ) from error

    def _write(self, entry: Entry) -> None:
        assert self._connection is not None
        if isinstance(entry, JournalRecord):
            self._connection.execute(
                "INSERT INTO record VALUES (?, ?, ?)",
                (entry.run_id, entry.revision, entry.SerializeToString()),
            )
        elif entry.value is not None:
            self._connection.execute(
                "INSERT OR REPLACE INTO store VALUES (?, ?, ?, ?)",
                (entry.run_id, entry.round, entry.key, entry.value),
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
