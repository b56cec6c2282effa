"""`store`: calls per second, and a key for which many clients wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.c10d import c10d_calls
from benchmarks.clients.store import StoreOrder, StoreResult
from benchmarks.figures import Figure
from benchmarks.processes import raise_open_files
from benchmarks.session import Session
from benchmarks.trials import FLOOR, JOURNALS, Start, floor, in_turns, measured, ours

CALLERS = (64,)
WAITING = (1000,)

_EACH = 200  # calls of each kind, of each caller
_TIMEOUT = 120.0  # seconds


def store(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    for callers in session.sizes_or(CALLERS):
        yield from _rates(session, callers)
    for waiting in session.sizes_or(WAITING):
        yield from _waited(session, waiting)


def _rates(session: Session, callers: int) -> Iterator[Figure]:
    raise_open_files(3 * callers + 256)
    variants = {FLOOR: _measure(session, floor("answer"), callers=callers)}
    for name in JOURNALS:
        variants[name] = _measure(session, ours(name), callers=callers)

    def show(result: StoreResult) -> str:
        return f"set {result.set:,.0f}, get {result.get:,.0f}, add {result.add:,.0f} a second"

    results = in_turns(session, f"store callers={callers}", variants, show)
    for kind in ("set", "get", "add"):
        peer = c10d_calls(session, kind, callers, _EACH)
        theirs = None if peer is None else _EACH * callers / peer.last
        for name in JOURNALS:
            if {name, FLOOR} <= results.keys():
                value, least = getattr(results[name], kind), getattr(results[FLOOR], kind)
                yield Figure(
                    f"store.{name}.{kind}", callers, value, "calls/s", least, theirs, "more is better"
                )


def _waited(session: Session, waiting: int) -> Iterator[Figure]:
    raise_open_files(waiting + 256)
    variants = {FLOOR: _measure(session, floor("release"), waiting=waiting)}
    for name in JOURNALS:
        variants[name] = _measure(session, ours(name), waiting=waiting)

    def show(result: StoreResult) -> str:
        return f"first {result.first * 1e3:.1f} ms, last {result.last * 1e3:.1f} ms"

    results = in_turns(session, f"store waiting={waiting}", variants, show)
    peer = c10d_calls(session, "wait", waiting)
    for name in JOURNALS:
        for kind in ("first", "last"):
            if {name, FLOOR} <= results.keys():
                value, least = getattr(results[name], kind), getattr(results[FLOOR], kind)
                theirs = None if peer is None else getattr(peer, kind) * 1e3
                yield Figure(f"store.{name}.waited.{kind}", waiting, value * 1e3, "ms", least * 1e3, theirs)


def _measure(session: Session, start: Start, callers: int = 0, waiting: int = 0) -> Callable[[], StoreResult]:
    def measure() -> StoreResult:
        with start(session.folder) as server:
            order = StoreOrder(
                endpoint=server.endpoint,
                server=server.pid,
                callers=callers,
                each=_EACH,
                waiting=waiting,
                timeout=_TIMEOUT,
            )
            return measured(session, server, "store", order, StoreResult)

    return measure
