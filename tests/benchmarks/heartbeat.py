"""`heartbeat`: the server's cost of one heartbeat of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.clients.heartbeat import HeartbeatOrder, HeartbeatResult
from benchmarks.figures import Figure
from benchmarks.processes import raise_open_files
from benchmarks.session import Session
from benchmarks.trials import FLOOR, Start, floor, in_turns, measured, ours

SIZES = (1000,)

_EACH = 20  # heartbeats of a node, in each of the two modes
# The fleet of the last figures, and its interval in seconds; paced heartbeats have the fleet's rate.
_FLEET, _INTERVAL = 10_000, 5.0
_RATE = _FLEET / _INTERVAL
_TIMEOUT = 120.0  # seconds


def heartbeat(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md. Heartbeats do not use the journal, so one kind is enough."""
    for nodes in session.sizes_or(SIZES):
        raise_open_files(nodes + 256)
        variants = {
            FLOOR: _heartbeat(session, nodes, floor("read-on")),
            "ours": _heartbeat(session, nodes, ours("memory")),
        }
        results = in_turns(session, f"heartbeat n={nodes}", variants, _show)
        if len(results) < len(variants):
            continue
        cost, least = results["ours"], results[FLOOR]
        yield Figure("heartbeat.burst", nodes, cost.burst * 1e6, "µs", least.burst * 1e6, note="back to back")
        note = f"{_RATE:g} a second"
        yield Figure("heartbeat.paced", nodes, cost.paced * 1e6, "µs", least.paced * 1e6, note=note)
        note = f"{_FLEET:,} nodes every {_INTERVAL:g} s"
        for way, each, floor_each in (("burst", cost.burst, least.burst), ("paced", cost.paced, least.paced)):
            share, floor_share = each * _RATE * 100, floor_each * _RATE * 100
            yield Figure(f"heartbeat.{way}.fleet", _FLEET, share, "% of a core", floor_share, note=note)


def _show(result: HeartbeatResult) -> str:
    return f"{result.burst * 1e6:.1f} µs back to back, {result.paced * 1e6:.1f} µs paced"


def _heartbeat(session: Session, nodes: int, start: Start) -> Callable[[], HeartbeatResult]:
    def measure() -> HeartbeatResult:
        with start(session.folder) as server:
            order = HeartbeatOrder(server.endpoint, server.pid, nodes, _EACH, nodes / _RATE, _TIMEOUT)
            return measured(session, server, "heartbeat", order, HeartbeatResult)

    return measure
