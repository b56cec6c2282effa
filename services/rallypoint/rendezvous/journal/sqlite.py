"""The embedded journal: one SQLite file, one writer thread, group commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from rallypoint.rendezvous.journal.journal import Entry, JournalError, Recovered
from rallypoint.rendezvous.journal.sqlite_file import JournalFile

_T = TypeVar("_T")


class SqliteJournal:
    """Keeps entries in a SQLite file; see `JournalFile` for what makes them last.

    All that touches the file runs on a thread of its own. What arrives during one commit makes up the next, so a
    slow disk makes larger groups, not a longer queue of commits.
    """

    def __init__(self, path: Path) -> None:
        """`path`: the file; it and its folder are made where they are missing."""
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
        """Commit entries, together with whatever else is being appended; see `Journal.append`."""
        if self._broken is not None:
            raise self._broken
        durable = asyncio.get_running_loop().create_future()
        self._pending.append((entries, durable))
        self._start()
        await durable

    async def close(self) -> None:
        """Commit what is pending, close the file, give the lock up."""
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
        # Left-overs can wait for the next opening, but not for a next append, which may never come.
        return self._file.has_leftovers and not self._closing and self._broken is None

    async def _work(self) -> None:
        """Commit until nothing is pending, and nothing left to sweep."""
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
