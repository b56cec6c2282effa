"""`journal`: facts per second that the SQLite journal makes durable, one at a time and in groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.clients.journal import JournalOrder, JournalResult
from benchmarks.figures import Figure
from benchmarks.processes import client_command, driven
from benchmarks.session import Session
from benchmarks.trials import FLOOR, in_turns

WRITERS = (1, 256)

_FACTS = 100_000  # of all writers together, limited by the number of commits below
_COMMITS = 1_000
_TIMEOUT = 120.0  # seconds


def journal(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    for writers in session.sizes_or(WRITERS):
        variants = {FLOOR: _measure(session, "bare", writers), "ours": _measure(session, "ours", writers)}
        results = in_turns(
            session, f"journal writers={writers}", variants, lambda result: f"{result.rate:,.0f} facts/s"
        )
        if len(results) == len(variants):
            note = "one fact in a commit" if writers == 1 else f"{writers} facts in a commit"
            rate, least = results["ours"].rate, results[FLOOR].rate
            yield Figure("journal.sqlite", writers, rate, "facts/s", least, note=f"{note}; more is better")


def _measure(session: Session, kind: str, writers: int) -> Callable[[], JournalResult]:
    def measure() -> JournalResult:
        facts = max(1, min(_FACTS // writers, _COMMITS))
        order = JournalOrder(str(session.folder), kind, writers, facts, _TIMEOUT)
        return JournalResult(
            **driven(client_command("journal", order), session.folder / "client-journal.log", 2 * _TIMEOUT)
        )

    return measure
