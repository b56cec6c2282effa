"""Client process of `journal`: facts written durably, by the SQLite journal, and by bare SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from benchmarks.clients.command import carry_out
from rallypoint.rendezvous.core.commands import SERVICE
from rallypoint.rendezvous.core.facts import NodeJoined
from rallypoint.rendezvous.journal.codec import encode_record
from rallypoint.rendezvous.journal.journal import Record
from rallypoint.rendezvous.journal.sqlite import SqliteJournal

_RUNS = 8
# The journal's own settings: durable commits, and no waiting for locks of other processes.
_PRAGMAS = ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL")
_TABLE = """
CREATE TABLE record (
    run_id TEXT NOT NULL, revision INTEGER NOT NULL, content BLOB NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (run_id, revision)
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class JournalOrder:
    """A request to the client process.

    Attributes:
        folder: for the database file; on a real disk.
        kind: a key of `KINDS`.
        writers: number of writers; each writes a fact, waits until it is durable, and writes the next.
        facts: number of facts of each writer, on average.
        timeout: seconds until it counts as failed.
    """

    folder: str
    kind: str
    writers: int
    facts: int
    timeout: float


@dataclass(frozen=True, slots=True)
class JournalResult:
    """Facts that became durable per second."""

    rate: float


def _records(order: JournalOrder) -> list[Record]:
    """Return the records of all writers, in order: facts of a few runs, each of a joined node."""

    def record(number: int) -> Record:
        run_id, revision = f"run-{number % _RUNS}", number // _RUNS + 1
        node_id = f"node-{revision}"
        joined = NodeJoined(node_id, revision, f"{node_id}.cluster.internal", 8, "trainer")
        return Record(run_id, revision, encode_record(run_id, revision, joined, 1.7e9, SERVICE))

    return [record(number) for number in range(order.writers * order.facts)]


async def ours(path: Path, records: Sequence[Record], writers: int) -> float:
    """Return the seconds of our journal, which itself groups concurrent writes into one commit."""
    journal = SqliteJournal(path)
    await journal.open()
    left = iter(records)

    async def write() -> None:
        for record in left:
            await journal.append([record])

    began = time.perf_counter()
    async with asyncio.TaskGroup() as writing:
        for _ in range(writers):
            writing.create_task(write())
    taken = time.perf_counter() - began
    await journal.close()
    return taken


async def bare(path: Path, records: Sequence[Record], writers: int) -> float:
    """Return the seconds of SQLite, with one fact of each writer in every commit."""
    rows = [(each.run_id, each.revision, each.content, crc32(each.content)) for each in records]
    groups = [rows[first : first + writers] for first in range(0, len(rows), writers)]
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        connection.execute(_TABLE)
        began = time.perf_counter()
        for group in groups:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO record VALUES (?, ?, ?, ?)", group)
            connection.execute("COMMIT")
        return time.perf_counter() - began


KINDS: dict[str, Callable[[Path, Sequence[Record], int], Awaitable[float]]] = {"ours": ours, "bare": bare}


async def journal(order: JournalOrder) -> JournalResult:
    """Carry out the order."""
    records = _records(order)
    with tempfile.TemporaryDirectory(dir=order.folder, prefix="journal-") as folder:
        async with asyncio.timeout(order.timeout):
            seconds = await KINDS[order.kind](Path(folder, "journal.db"), records, order.writers)
    return JournalResult(order.writers * order.facts / seconds)


if __name__ == "__main__":
    carry_out(JournalOrder, journal)
