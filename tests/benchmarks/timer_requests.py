"""`timer-requests`: acquires and releases per second that the timer service accepts from its agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.clients.timer_requests import RequestsOrder, RequestsResult
from benchmarks.figures import Figure
from benchmarks.processes import timer_floor_server, timer_server
from benchmarks.session import Session
from benchmarks.trials import FLOOR, Start, in_turns, measured

SIZES = (64,)

# Requests of an agent per scan of its workers' tables, every 50 ms, if 64 agents send 50,000 per second in total.
_BATCH = 40
_SECONDS = 2.0
_TIMEOUT = 60.0


def timer_requests(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    for agents in session.sizes_or(SIZES):
        variants = {
            FLOOR: _requests(session, agents, partial(timer_floor_server, behaviour="decode")),
            "ours": _requests(session, agents, timer_server),
        }
        results = in_turns(session, f"timer-requests n={agents}", variants, _show)
        if len(results) < len(variants):
            continue
        ours, floor = results["ours"], results[FLOOR]
        note = f"{_BATCH} in a message, half of them releases"
        yield Figure("timer-requests.rate", agents, ours.rate, "a second", floor.rate, note=note)
        yield Figure("timer-requests.cpu", agents, ours.cpu * 1e6, "µs", floor.cpu * 1e6, note="each")


def _show(result: RequestsResult) -> str:
    return f"{result.rate:,.0f} requests a second, {result.cpu * 1e6:.2f} µs of CPU each"


def _requests(session: Session, agents: int, start: Start) -> Callable[[], RequestsResult]:
    def measure() -> RequestsResult:
        with start(session.folder) as server:
            order = RequestsOrder(server.endpoint, server.pid, agents, _BATCH, _SECONDS, _TIMEOUT)
            return measured(session, server, "timer_requests", order, RequestsResult)

    return measure
