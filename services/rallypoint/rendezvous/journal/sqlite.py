"""The embedded journal: one SQLite file, one writer thread, group commit."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from rallypoint.rendezvous.journal.journal import Entry, JournalError, Recovered
from rallypoint.rendezvous.journal.sqlite_reading import (
    FileContents,
    keep_copy,
    migrate,
    read_untouched,
    sync,
    write_again,
)
from rallypoint.rendezvous.journal.sqlite_rows import SCHEMA, SCHEMA_VERSION, FreePages, Rows, RowSweep
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.runtime_folder import open_private

# ---- One process at a time: a lock that goes with the process, and a number that outlives it.


class LockFile:
    """A file that is locked while it is held, and that stores a number.

    The number is written without a sync: it survives the process, but after a loss of power it may be an older one.
    """

    def __init__(self, path: Path) -> None:
        """`path`: the file; created if it is missing, and never removed.

        Unlinking it would let a third process lock a file that no longer has a name.

        Raises:
            BlockingIOError: Another process holds it.
            OSError: It can't be created.
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._file)
            raise

    def read(self) -> int:
        """Return the number; 0 if there is none, or if its checksum is wrong."""
        content = os.pread(self._file, 64, 0)
        number = content[:20]
        return int(number) if number.isdigit() and content == _content(int(number)) else 0

    def write(self, number: int) -> None:
        """Replace the number; raise OSError if that fails."""
        os.pwrite(self._file, _content(number), 0)

    def release(self) -> None:
        """Unlock the file for the next process."""
        os.close(self._file)


def _content(number: int) -> bytes:
    digits = b"%020d" % number
    return b"%b %08x\n" % (digits, crc32(digits))


# ---- The file of the SQLite journal: opened, written and closed on one thread, by one connection.


_log = get_logger(__name__)

# The write-ahead log is copied into the file (a checkpoint) when it holds about this much. A larger value makes that
# rarer, and the log and the next recovery longer. The size is an estimate, since SQLite counts the pages of a log but
# does not report them: the rows of a run are neighbours, and new ones change the page they are put on and, when it
# overflows, the adjacent ones.
_LOG_BYTES = 16 << 20
_PAGE_BYTES = 4 << 10
_PAGES_PER_RUN = 3
_PAGES_PER_MOVE = 2
_ROW_BYTES = 256
# A log made long by a very large commit is truncated to this size.
_LOG_LIMIT = 32 << 20


class JournalFile:
    """A SQLite file in write-ahead mode with synchronous=FULL: committed entries are on the disk.

    (NORMAL could lose acknowledged commits when the power fails, and a round number would then be given out twice.) One
    connection only, since SQLite before 3.51.3 can corrupt a log that two connections reset. A lock file keeps other
    servers out, and exclusive locking keeps out all other programs, whose reading could also keep the log from ever
    starting over.

    SQLite treats a damaged log as one that ends at the damage, and a removed log as an empty one: acknowledged commits
    would be lost without any error. So commits are counted, in the file and, once they are on the disk, in the lock
    file. After a loss of power the latter may lag behind, but it is never ahead.

    Why everything read at the start is on the disk. The log left by an earlier process may hold commits that are only
    in the kernel's memory: the process was killed before it synced them, or a sync failed. After a failed sync Linux
    marks the pages as written, so another sync succeeds and writes nothing. Therefore the log is rewritten with the
    bytes it has, and synced, before any byte of it is trusted (`write_again`). The file needs none of this: anything a
    checkpoint wrote into it stays in the log until the file was synced, and each process that finds a log writes all of
    it into the file again.
    """

    def __init__(self, path: Path) -> None:
        """`path`: the file, private to this user; it and its folder are created if they are missing."""
        self._path = path
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock: LockFile | None = None
        self._connection: sqlite3.Connection | None = None
        self._contents = FileContents()
        self._sweep = RowSweep(self._contents.spans)
        self._free_pages = FreePages()
        self._logged = 0

    @property
    def has_leftovers(self) -> bool:
        """True if there may be rows to delete or pages to give back: each commit, even an empty one, does some."""
        return bool(self._sweep or self._free_pages)

    @property
    def log_is_long(self) -> bool:
        """True if `shorten_log` is due."""
        return self._logged >= _LOG_BYTES

    def open(self) -> Recovered:
        """Take the lock, check the file, read it, bring it up to date; raises as `Journal.open`."""
        try:
            _make_folder(self._path.parent)
            self._take_lock()
            existed = self._path.exists()
            log = self._path.with_name(self._path.name + "-wal")
            write_again(log)
            found = read_untouched(self._path)
            if existed and (found is None or found.version == SCHEMA_VERSION):
                self._check_nothing_lost(0 if found is None else found.commits)
            self._contents = found or self._contents
            self._connection = self._connect(None if found is None else found.version)
            # Otherwise servers killed before they shorten the log would make it, and each start, longer and longer.
            self._logged = log.stat().st_size if log.exists() else 0
            self._sweep = RowSweep(self._contents.spans)
            self._sweep.add(self._contents.leftovers)
            recovered, self._contents.recovered = self._contents.recovered, Recovered([], [], [])
            return recovered
        except (OSError, sqlite3.Error, ValueError) as error:
            self.close()
            raise JournalError(
                f"can't open the journal {self._path}: {_reason(error)}; fix that, or choose another file with "
                "--journal"
            ) from error
        except JournalError:
            self.close()
            raise

    def _take_lock(self) -> None:
        try:
            self._lock = LockFile(self._lock_path)
        except BlockingIOError as error:
            raise JournalError(
                f"the journal {self._path} is in use by another process; stop that one, or choose another file "
                "with --journal"
            ) from error

    def _check_nothing_lost(self, commits: int) -> None:
        assert self._lock is not None
        if commits < (acknowledged := self._lock.read()):
            raise JournalError(
                f"the journal {self._path} has lost commits that were acknowledged: it holds {commits}, but "
                f"{self._lock_path.name} counts {acknowledged}; its log {self._path.name}-wal is damaged or was "
                "removed; nothing was changed; restore the log, or, to continue without it, for example from a "
                f"backup, remove {self._lock_path.name}"
            )

    def _connect(self, version: int | None) -> sqlite3.Connection:
        if version is not None and version < SCHEMA_VERSION:
            copy = keep_copy(self._path, version)
            _log.info("journal.migrating", path=str(self._path), version=version, copy=str(copy))
        # Not before it was checked: a file of another program stays as it is. SQLite gives a new log the mode of the
        # file; the log of an earlier process has a mode of its own.
        os.close(open_private(self._path, os.O_RDWR | os.O_CREAT))
        with suppress(FileNotFoundError):
            os.close(open_private(self._path.with_name(self._path.name + "-wal"), os.O_RDWR))
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=True)
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            if version is None:
                # It has an effect only before the first table, and before write-ahead mode, which writes the header.
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA journal_size_limit = {_LOG_LIMIT}")
            # Debian's SQLite overwrites deleted rows with zeros, through the log: 256 MiB to delete as much.
            connection.execute("PRAGMA secure_delete = OFF")
            # By itself, SQLite would checkpoint the log before it reports a commit, and would hide a failure of that.
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            if version is None:
                connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            elif version < SCHEMA_VERSION:
                migrate(connection)
            self._free_pages.count(connection)
        except BaseException:
            connection.close()
            raise
        assert self._lock is not None
        self._lock.write(self._contents.commits)
        return connection

    def commit(self, calls: Sequence[Sequence[Entry]]) -> None:
        """Commit all entries as one transaction. After a JournalError it is unknown if they are on the disk."""
        assert self._connection is not None
        assert self._lock is not None
        connection = self._connection
        try:
            rows = Rows(self._contents.spans)
            for entries in calls:
                for entry in entries:
                    rows.add(entry)
            shrinking, deleting = bool(self._free_pages), bool(self._sweep) or rows.deletes
            before = connection.total_changes
            given_back = self._free_pages.begin(connection)
            rows.write(connection)
            self._sweep.add(rows.dropped)
            self._sweep.step(connection)
            self._contents.commits += 1
            connection.execute("UPDATE commits SET number = ?", (self._contents.commits,))
            if shrinking or deleting:
                self._free_pages.count(connection)
            connection.execute("COMMIT")
            self._lock.write(self._contents.commits)
            pages = 1 + _PAGES_PER_RUN * len(rows.runs) + _PAGES_PER_MOVE * given_back
            self._logged += pages * _PAGE_BYTES + rows.size + _ROW_BYTES * (connection.total_changes - before)
            if shrinking and not self._free_pages:
                self._logged = _LOG_BYTES  # the file becomes shorter when the log is copied into it
        except Exception as error:
            raise self._unwritable(error) from error

    def shorten_log(self) -> None:
        """Start the log over: copy it into the file. A JournalError leaves all acknowledged commits in the log."""
        assert self._connection is not None
        try:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._logged = 0
        except sqlite3.Error as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: Exception) -> JournalError:
        return JournalError(
            f"can't write the journal {self._path}: {_reason(error)}; it is unknown how much of the last commit "
            "reached the disk, so the service must start again and read it"
        )

    def close(self) -> None:
        """Close the file and release the lock."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _make_folder(folder: Path) -> None:
    """Make a folder durably: a folder's entries are on the disk only once it was synced itself."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync(each.parent)


def _reason(error: Exception) -> str:
    if isinstance(error, sqlite3.Error):
        name = getattr(error, "sqlite_errorname", None)
        return f"{error} ({name})" if name else str(error)
    return getattr(error, "strerror", None) or str(error)


_T = TypeVar("_T")


class SqliteJournal:
    """Stores entries in a SQLite file; `JournalFile` makes them durable.

    All access to the file runs on one extra thread. Entries that arrive during one commit make up the next, so a slow
    disk makes larger groups, not a longer queue of commits.
    """

    def __init__(self, path: Path) -> None:
        """`path`: the file; it and its folder are created if they are missing."""
        self._file = JournalFile(path)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: list[tuple[Sequence[Entry], asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None
        self._closing = False
        self._path = path
        self._broken: JournalError | None = None

    async def open(self) -> Recovered:
        """Take the lock, check the file, read it; see `Journal.open`."""
        recovered = await self._in_writer(self._file.open)
        self._start()
        return recovered

    async def append(self, entries: Sequence[Entry]) -> None:
        """Commit entries, together with those of concurrent calls; see `Journal.append`."""
        if self._broken is not None:
            raise self._broken
        durable = asyncio.get_running_loop().create_future()
        self._pending.append((entries, durable))
        self._start()
        await durable

    async def close(self) -> None:
        """Commit pending entries, close the file, release the lock."""
        self._closing = True
        while self._committing is not None:
            await self._committing
        self._broken = self._broken or JournalError(f"the journal {self._path} is closed")
        await self._in_writer(self._file.close)
        self._writer.shutdown()

    def _start(self) -> None:
        if self._committing is None and self._has_work():
            self._committing = asyncio.create_task(self._work())

    def _has_work(self) -> bool:
        if self._pending:
            return True
        # Left-overs can wait for the next start, but must not wait for the next append, which may never come.
        return self._file.has_leftovers and not self._closing and self._broken is None

    async def _work(self) -> None:
        """Commit until nothing is pending and nothing is left to sweep."""
        try:
            while self._has_work():
                group, self._pending = self._pending, []
                await self._attempt(partial(self._file.commit, [entries for entries, _ in group]))
                for _, durable in group:
                    if durable.done():
                        continue
                    if self._broken is None:
                        durable.set_result(None)
                    else:
                        durable.set_exception(self._broken)
                if self._file.log_is_long:
                    await self._attempt(self._file.shorten_log)
        finally:
            self._committing = None

    async def _attempt(self, write: Callable[[], None]) -> None:
        try:
            if self._broken is None:
                await self._in_writer(write)
        except JournalError as error:
            self._broken = error

    async def _in_writer(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, call)
