"""What the SQLite journal no longer keeps is deleted bit by bit, so that no commit waits for all of it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from rallypoint.rendezvous.journal.spans import Span

# One step goes along with one commit and makes it later, by a millisecond or two. It looks at so many runs at most, and
# deletes so many rows and bytes, give or take the last row.
RUNS_PER_STEP = 16
ROWS_PER_STEP = 256
BYTES_PER_STEP = 1 << 20

# How many of the first rows are to be deleted to stay within the bytes, and their bytes.
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
# Not where it has store entries of the present era: without this row they would not be known for that.
_DELETE_DROPPED = """
DELETE FROM checkpoint WHERE run_id = ? AND NOT EXISTS (SELECT 1 FROM store WHERE run_id = ?)
"""


class Sweep:
    """Deletes records before those that are kept, and store entries of earlier eras.

    The pages they leave are used again, but the file does not shrink: it stays as large as the most that was ever
    in it, which the service's limits bound. To shrink it, pages would have to be moved about while commits wait.
    """

    def __init__(self, spans: dict[str, Span]) -> None:
        """`spans`: what is kept of each run; a run that was dropped is taken out with the last of it."""
        self._spans = spans
        self._runs: dict[str, None] = {}  # an ordered set: those that may have left-overs

    def __bool__(self) -> bool:
        """Whether there may be something left to delete."""
        return bool(self._runs)

    def add(self, run_ids: Iterable[str]) -> None:
        """Note runs of which something is no longer kept."""
        self._runs.update(dict.fromkeys(run_ids))

    def step(self, connection: sqlite3.Connection) -> None:
        """Delete some, in the transaction that is open."""
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
            # There was room for more, and no more came.
            del self._runs[run_id]
            if span.dropped and connection.execute(_DELETE_DROPPED, (run_id, run_id)).rowcount:
                del self._spans[run_id]
