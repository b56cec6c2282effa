"""The tables of the SQLite journal: its schema, and entries as rows of it."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterable, Sequence
from typing import TypeAlias
from zlib import crc32

from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.journal.journal import Checkpoint, Dropped, Entry, Forgotten, Record, Span

SCHEMA_VERSION = 2

# SQLite checks the structure of its pages, not their contents; the checksums cover those.
#
# Rows that are no longer kept need not be deleted at once: records before their checkpoint's `keep_from`, and store
# entries of an earlier era than their run's, are ignored by every reader (see `RowSweep`).
SCHEMA = """
CREATE TABLE record (
    run_id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    content BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (run_id, revision)
) WITHOUT ROWID;
CREATE TABLE checkpoint (
    run_id TEXT NOT NULL PRIMARY KEY,
    revision INTEGER NOT NULL,
    keep_from INTEGER NOT NULL,
    era INTEGER NOT NULL,
    content BLOB NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE store (
    run_id TEXT NOT NULL,
    era INTEGER NOT NULL,
    round INTEGER NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (run_id, era, round, key)
);
CREATE TABLE commits (number INTEGER NOT NULL);
INSERT INTO commits VALUES (0);
"""

Row: TypeAlias = tuple[object, ...]

# Python releases its global lock several times for every statement it runs, and each time may wait 5 ms until a busy
# event loop returns it. So as many rows as possible go into one statement, in powers of two: few enough variants for
# SQLite to prepare each statement once.
_MOST_ROWS_AT_ONCE = 1024


def checksum(*row: object) -> int:
    """Return a checksum of a row's columns, the last of them bytes."""
    *names, content = row
    assert isinstance(content, bytes)
    return crc32(content, crc32(repr(names).encode()))


class Rows:
    """Converts a group of entries to rows of each table; their order no longer matters."""

    def __init__(self, spans: dict[str, Span]) -> None:
        """`spans`: the kept records of each run; updated with every entry."""
        self._spans = spans
        self._records: list[Row] = []
        self._checkpoints: dict[str, Row] = {}
        self._values: dict[tuple[str, int, int, str], bytes | None] = {}
        self.runs: set[str] = set()
        self.dropped: list[str] = []  # runs that have rows which are no longer kept
        self.size = 0  # bytes to write

    @property
    def deletes(self) -> bool:
        """True if rows are deleted, now or by the sweep."""
        return bool(self.dropped) or None in self._values.values()

    def add(self, entry: Entry) -> None:
        """Add an entry; raise OutOfSequenceError if it does not continue the kept records of its run."""
        self.runs.add(entry.run_id)
        if isinstance(entry, StoreChange):
            self._add_change(entry)
            return
        span = self._spans.setdefault(entry.run_id, Span())
        if isinstance(entry, Record):
            span.add(entry)
            row = (entry.run_id, entry.revision, entry.content)
            self._records.append((*row, checksum(*row)))
            self.size += len(entry.content)
        elif isinstance(entry, (Checkpoint, Forgotten)):
            if isinstance(entry, Checkpoint):
                span.cover(entry)
            else:
                span.forget(entry)
            state = (entry.run_id, entry.revision, span.first, span.era, entry.content)
            self._checkpoints[entry.run_id] = (*state, checksum(*state))
            self.dropped.append(entry.run_id)
            self.size += len(entry.content)
        elif isinstance(entry, Dropped):
            # The sweep deletes its rows, the row of its checkpoint last: that row marks the others as left-overs.
            span.drop(entry)
            self.dropped.append(entry.run_id)

    def _add_change(self, change: StoreChange) -> None:
        # A fenced state needs no run: a span for its name would stay in memory after the state is gone.
        span = self._spans.get(change.run_id)
        self._values[change.run_id, span.era if span else 0, change.round, change.key] = change.value
        self.size += len(change.value or b"")
        if span is not None and span.dropped and change.value is None:
            self.dropped.append(change.run_id)  # the row of its checkpoint may have waited for this deletion

    def write(self, connection: sqlite3.Connection) -> None:
        """Write all rows in the open transaction."""
        _write(connection, "INSERT INTO record VALUES", self._records)
        _write(connection, "REPLACE INTO checkpoint VALUES", list(self._checkpoints.values()))
        values: list[Row] = []
        deleted: list[Row] = []
        for key, value in self._values.items():
            if value is None:
                deleted.append(key)
            else:
                values.append((*key, value, checksum(*key, value)))
        _write(connection, "REPLACE INTO store VALUES", values)
        # Row by row: SQLite looks up keys of several columns in the index only one at a time; else it scans the table.
        connection.executemany(
            "DELETE FROM store WHERE run_id = ? AND era = ? AND round = ? AND key = ?", deleted
        )


def _write(connection: sqlite3.Connection, head: str, rows: Sequence[Row]) -> None:
    if not rows:
        return
    columns = len(rows[0])
    room = min(_MOST_ROWS_AT_ONCE, connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER) // columns)
    at = 0
    while left := len(rows) - at:
        count = 1 << min(left, room).bit_length() - 1
        flat = [column for row in rows[at : at + count] for column in row]
        connection.execute(_statement(head, count, columns), flat)
        at += count


@functools.cache
def _statement(head: str, rows: int, columns: int) -> str:
    row = f"({', '.join('?' * columns)})"
    return f"{head} {', '.join([row] * rows)}"


# ---- Rows that the SQLite journal no longer keeps are deleted step by step, so that no commit waits for all of it.


# One step runs within one commit and delays it by a millisecond or two. Limits of a step: runs looked at, rows deleted,
# and bytes deleted (exceeded by at most the last row).
RUNS_PER_STEP = 16
ROWS_PER_STEP = 256
BYTES_PER_STEP = 1 << 20

# How many of the first rows can be deleted within the limit of bytes, and their bytes.
_MEASURE = """
SELECT count(*), total(size) FROM (
    SELECT size, sum(size) OVER (ROWS UNBOUNDED PRECEDING) - size AS before FROM (
        SELECT length({content}) AS size FROM {table} WHERE run_id = ? AND {column} < ? ORDER BY {key} LIMIT ?
    )
) WHERE before < ?
"""
_DELETE = """
DELETE FROM {table} WHERE ({key}) IN (
    SELECT {key} FROM {table} WHERE run_id = ? AND {column} < ? ORDER BY {key} LIMIT ?
)
"""
_RECORD = {"table": "record", "key": "run_id, revision", "column": "revision", "content": "content"}
_STORE = {"table": "store", "key": "run_id, era, round, key", "column": "era", "content": "value"}
_MEASURE_RECORDS, _DELETE_RECORDS = _MEASURE.format(**_RECORD), _DELETE.format(**_RECORD)
_MEASURE_STORE, _DELETE_STORE = _MEASURE.format(**_STORE), _DELETE.format(**_STORE)
# Not if it has store entries of the present era: only this row distinguishes them from left-overs.
_DELETE_DROPPED = """
DELETE FROM checkpoint WHERE run_id = ? AND NOT EXISTS (SELECT 1 FROM store WHERE run_id = ?)
"""


class RowSweep:
    """Deletes records before the first kept one, and store entries of earlier eras."""

    def __init__(self, spans: dict[str, Span]) -> None:
        """`spans`: the kept records of each run; a dropped run is removed from it together with its last row."""
        self._spans = spans
        self._runs: dict[str, None] = {}  # an ordered set: runs that may have left-overs

    def __bool__(self) -> bool:
        """True if there may be something left to delete."""
        return bool(self._runs)

    def add(self, run_ids: Iterable[str]) -> None:
        """Add runs that have rows which are no longer kept."""
        self._runs.update(dict.fromkeys(run_ids))

    def step(self, connection: sqlite3.Connection) -> None:
        """Delete some rows, in the open transaction."""
        rows, size = ROWS_PER_STEP, BYTES_PER_STEP
        for run_id in list(self._runs)[:RUNS_PER_STEP]:
            span = self._spans[run_id]
            for measure, delete, bound in (
                (_MEASURE_RECORDS, _DELETE_RECORDS, span.first),
                (_MEASURE_STORE, _DELETE_STORE, span.era),
            ):
                left = (run_id, bound)
                count, taken = connection.execute(measure, (*left, rows, size)).fetchone()
                if count:
                    connection.execute(delete, (*left, count))
                rows, size = rows - count, size - int(taken)
                if rows <= 0 or size <= 0:
                    return
            # The limits were not reached, so there are no more rows to delete.
            del self._runs[run_id]
            if span.dropped and connection.execute(_DELETE_DROPPED, (run_id, run_id)).rowcount:
                del self._spans[run_id]


# ---- SQLite reuses the pages of deleted rows. If there are many, the file shrinks, step by step as well.

# A file keeps this many free pages (4 MiB), and a sixteenth of it, for new rows; else it would shrink and grow again
# with every compaction. Once it shrinks, it goes on to half of that, so that each time is worth a checkpoint of the
# log.
_SPARE_PAGES = 1024
_SPARE_PART = 16
# Limits of a step, which delays one commit by a millisecond or two: pages moved, and entries searched, since SQLite
# searches its list of free pages for each page that it moves.
PAGES_PER_STEP = 32
_SEARCHED_PER_STEP = 2 << 20

_FREE_PAGES = """
SELECT freelist_count, page_count FROM pragma_freelist_count, pragma_page_count, pragma_auto_vacuum
    WHERE auto_vacuum = 2 -- INCREMENTAL
"""


class FreePages:
    """Gives free pages of the file back to the file system.

    They are moved to the end of the file, and the next checkpoint of the log cuts them off. Only a file that was made
    with `auto_vacuum = INCREMENTAL` can shrink; one of an earlier version keeps its free pages.
    """

    def __init__(self) -> None:
        """There are none; `count` counts them."""
        self._left = 0

    def __bool__(self) -> bool:
        """True if there are pages to give back."""
        return self._left > 0

    def begin(self, connection: sqlite3.Connection) -> int:
        """Begin a transaction, and give some pages back in it; return their number."""
        pages = min(self._left, PAGES_PER_STEP, 1 + _SEARCHED_PER_STEP // max(1, self._left))
        give_back = f"PRAGMA incremental_vacuum({pages});" if pages else ""  # of 0 would be all
        # The pragma returns a row for each page: a script reads them without Python's lock.
        connection.executescript(f"BEGIN IMMEDIATE; {give_back}")
        return pages

    def count(self, connection: sqlite3.Connection) -> None:
        """Count them, after rows were deleted or pages given back."""
        free, pages = connection.execute(_FREE_PAGES).fetchone() or (0, 0)
        spare = (_SPARE_PAGES + pages // _SPARE_PART) // (2 if self._left else 1)
        self._left = max(0, free - spare)
