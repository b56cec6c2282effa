"""`watchdog`: how late the timer service reports expired timers among many others, and its CPU cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.clients.watchdog import WatchdogOrder, WatchdogResult
from benchmarks.figures import Figure
from benchmarks.processes import timer_floor_server, timer_server
from benchmarks.session import Session
from benchmarks.trials import FLOOR, Start, in_turns, measured

SIZES = (64,)

# 64 agents have a thousand workers and a hundred thousand timers. With other numbers, each agent has as many.
_WORKERS, _TIMERS = 16, 98
_PAIRS, _EXPIRIES = 2000 / 64, 1500 / 64
# An agent whose workers' timers change scans their tables every 50 ms.
_LOOK = 0.05
_SECONDS = 10.0
_TIMEOUT = 60.0


def watchdog(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    for agents in session.sizes_or(SIZES):
        variants = {
            FLOOR: _watchdog(
                session, agents, partial(timer_floor_server, behaviour="count-down"), count=False
            ),
            "ours": _watchdog(session, agents, timer_server, count=True),
        }
        results = in_turns(session, f"watchdog n={agents}", variants, _show)
        if len(results) < len(variants):
            continue
        ours, floor = results["ours"], results[FLOOR]
        timers = agents * _WORKERS * _TIMERS
        note = f"{timers:,} timers, {ours.pairs:,.0f} pairs a second"
        yield Figure("watchdog.late.p50", agents, ours.p50 * 1e3, "ms", floor.p50 * 1e3, note=note)
        yield Figure("watchdog.late.p99", agents, ours.p99 * 1e3, "ms", floor.p99 * 1e3, note=note)
        yield Figure("watchdog.late.max", agents, ours.latest * 1e3, "ms", floor.latest * 1e3, note=note)
        yield Figure("watchdog.cpu", agents, ours.share * 100, "% of a core", floor.share * 100, note=note)


def _show(result: WatchdogResult) -> str:
    return (
        f"{result.p50 * 1e3:.1f} ms late, p99 {result.p99 * 1e3:.1f} ms, {result.share:.1%} of a core, "
        f"{result.pairs:,.0f} pairs a second"
    )


def _watchdog(session: Session, agents: int, start: Start, *, count: bool) -> Callable[[], WatchdogResult]:
    def measure() -> WatchdogResult:
        with start(session.folder) as server:
            order = WatchdogOrder(
                endpoint=server.endpoint,
                server=server.pid,
                agents=agents,
                workers=_WORKERS,
                timers=_TIMERS,
                pairs=_PAIRS * agents,
                expiries=round(_EXPIRIES * agents),
                look=_LOOK,
                seconds=_SECONDS,
                count=count,
                timeout=_TIMEOUT,
            )
            return measured(session, server, "watchdog", order, WatchdogResult)

    return measure
