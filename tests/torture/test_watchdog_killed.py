"""The watchdog is killed and started again while timers run: each expires at its deadline, and once."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from support.waiting import until
from torture.length import ordinarily
from torture.mortal_server import PATIENCE, serving
from torture.mortal_watchdog import GuardedNode, MortalWatchdog, until_listed

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(5 * PATIENCE)]

NODES = ordinarily(10, in_full=50)
TIMERS = 1000  # those of all nodes
KILLS = ordinarily(2, in_full=8)
LIFE = ordinarily(3.0, in_full=5.0)  # seconds of service between two kills
LEAD = 1.0  # seconds from the first timer to the first deadline
# Seconds to kill a worker: long enough for the next service to report it meanwhile.
REAPING = 2.0
# Seconds before a kill in which a timer may have expired and not be reported.
REPORTING = 0.2
# Seconds in which all agents are back once the service listens, including their back-off.
BACK = 2.0


class Outage(NamedTuple):
    """The times of an outage, in seconds of CLOCK_MONOTONIC."""

    killed: float
    listening: float

    def explains(self, due: float) -> bool:
        """Return True if a timer that was due then could not be reported in time."""
        return self.killed - REPORTING < due < self.listening + BACK


async def test_timers_outlive_the_watchdog(tmp_path: Path) -> None:
    """Agents register running timers again, with the time left: none early, none lost, none handled twice."""
    server = MortalWatchdog(tmp_path)
    draw = random.Random(4)
    async with AsyncExitStack() as stack:
        begun = time.monotonic()
        channel = await stack.enter_async_context(serving(server))
        # Time for the kills, and for outages three times as long as this start: some timers are due after the last.
        span = (KILLS + 1) * LIFE + KILLS * 3 * (time.monotonic() - begun)
        nodes = [GuardedNode(f"node-{number}", server.endpoint, REAPING) for number in range(NODES)]
        for node in nodes:
            stack.push_async_callback(node.close)
        due: dict[str, float] = {}
        began = time.monotonic()
        for number in range(TIMERS):
            after = LEAD + draw.uniform(0.0, span)
            due[f"s-{number}"] = began + after
            # Workers of their own: killing one of them ends no other timer.
            nodes[number % NODES].client.acquire(f"{number}@1", f"s-{number}", after, began)
        outages = []
        for _ in range(KILLS):
            await asyncio.sleep(LIFE)
            killed = time.monotonic()
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            outages.append(Outage(killed, time.monotonic()))
        await until(lambda: due.keys() <= _reaped(nodes).keys(), "every timer to run out")
        await until_listed(channel, 0)
        assert set(_reaped(nodes).values()) == {1}, "nobody is reaped twice"
    late = {scope: when - due[scope] for node in nodes for scope, when in node.reaped}
    assert min(late.values()) >= 0, "nobody is reaped before the deadline"
    # Timers of later services, which got running timers from the agents.
    on_time = sorted(
        each
        for scope, each in late.items()
        if due[scope] > outages[0].killed and not any(outage.explains(due[scope]) for outage in outages)
    )
    assert on_time, "no timer was due while a later service watched"
    waited, middle = max(late.values()), on_time[len(on_time) // 2]
    away = max(outage.listening - outage.killed for outage in outages)
    # If a new service restarted countdowns, they would be late by a whole life of the old one.
    assert middle < LIFE / 2
    assert waited < away + PATIENCE
    assert server.complaints() == []
    print(  # noqa: T201
        f"{KILLS} kills, the service {away:.1f} s away at most; {TIMERS} timers, each reaped once; "
        f"{len(on_time)} due while a later one watched: {middle * 1e3:.0f} ms late (median), "
        f"{on_time[-1] * 1e3:.0f} ms at most; due while it was away: {waited * 1e3:.0f} ms at most"
    )


def _reaped(nodes: list[GuardedNode]) -> Counter[str]:
    return Counter(scope for node in nodes for scope, _ in node.reaped)
