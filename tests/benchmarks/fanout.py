"""`fanout`: one change of an active round, sent to all of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.clients.fanout import FanoutOrder, FanoutResult
from benchmarks.figures import Figure
from benchmarks.processes import raise_open_files
from benchmarks.session import Session
from benchmarks.trials import FLOOR, JOURNALS, Start, floor, in_turns, measured, ours

SIZES = (1000,)

_CHANGES = 5  # in a trial; the result is their median
_TIMEOUT = 60.0  # seconds


def fanout(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    for nodes in session.sizes_or(SIZES):
        raise_open_files(nodes + 256)
        # The floor's message has the size of ours, so ours is measured first.
        size = int(_fanout(session, nodes, ours("memory"), confirm=True)().message)
        variants = {FLOOR: _fanout(session, nodes, floor("tell-all", size), confirm=False)}
        for name in JOURNALS:
            variants[name] = _fanout(session, nodes, ours(name), confirm=True)
        results = in_turns(session, f"fanout n={nodes}", variants, _show)
        for name in JOURNALS:
            if {name, FLOOR} <= results.keys():
                told, least = results[name], results[FLOOR]
                note = f"{size} bytes to each"
                yield Figure(
                    f"fanout.{name}.first", nodes, told.first * 1e3, "ms", least.first * 1e3, note=note
                )
                yield Figure(f"fanout.{name}.last", nodes, told.last * 1e3, "ms", least.last * 1e3, note=note)


def _show(result: FanoutResult) -> str:
    return f"first {result.first * 1e3:.1f} ms, last {result.last * 1e3:.1f} ms"


def _fanout(session: Session, nodes: int, start: Start, *, confirm: bool) -> Callable[[], FanoutResult]:
    def measure() -> FanoutResult:
        with start(session.folder) as server:
            order = FanoutOrder(server.endpoint, nodes, _CHANGES, confirm, _TIMEOUT)
            return measured(session, server, "fanout", order, FanoutResult)

    return measure
