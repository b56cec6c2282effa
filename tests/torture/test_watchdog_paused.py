"""While the watchdog is paused, timers expire with unread releases: no worker that released in time is killed."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.waiting import until
from torture.length import ordinarily
from torture.mortal_server import PATIENCE, serving
from torture.mortal_watchdog import GuardedNode, MortalWatchdog, until_listed

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(3 * PATIENCE)]

NODES = 25
TIMERS = 1000
HANG_EVERY = 20  # one timer in so many is never released
# Seconds from the first timer to the first deadline: the service receives all of them, and is paused.
LEAD = 5.0
# Seconds from the first deadline to the last.
SPREAD = ordinarily(2.0, in_full=20.0)
MARGIN = 1.0  # seconds before its deadline at which a timer is released


@dataclass
class Timer:
    """One timer; times in seconds of CLOCK_MONOTONIC."""

    node: GuardedNode
    scope: str
    due: float
    hangs: bool
    released: float = 0.0


async def test_a_pause_of_the_watchdog_spares_workers_that_released_in_time(tmp_path: Path) -> None:
    """Releases wait unread in its sockets when it wakes; it reads them first. Hung workers are reported."""
    server = MortalWatchdog(tmp_path)
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(serving(server))
        nodes = [GuardedNode(f"node-{number}", server.endpoint) for number in range(NODES)]
        for node in nodes:
            stack.push_async_callback(node.close)
        timers = _acquire(nodes)
        await until_listed(channel, TIMERS)
        paused = time.monotonic()
        assert paused < timers[0].due - MARGIN, "the pause begins before the first is released"
        server.pause()
        await _release(timers)
        await asyncio.sleep(timers[-1].due + MARGIN - time.monotonic())
        server.go_on()
        woken = time.monotonic()
        hung = {timer.scope for timer in timers if timer.hangs}
        await until(lambda: hung <= _reaped(nodes), "all who hang", timers[-1].due - paused + PATIENCE)
        told = time.monotonic()
        safe = {timer.scope for timer in timers if timer.released and timer.released < timer.due}
        assert len(safe) > TIMERS / 2
        assert safe.isdisjoint(server.accused()), "the service took none of them for hanging"
        assert safe.isdisjoint(_reaped(nodes))
        assert sum(len(node.reaped) for node in nodes) == len(_reaped(nodes)), "nobody is reaped twice"
    assert server.complaints() == []
    print(  # noqa: T201
        f"{woken - paused:.1f} s of pause, {TIMERS} timers due meanwhile: {len(safe)} released in time, 0 accused; "
        f"{len(hung)} hung, all told {told - woken:.1f} s after it went on"
    )


def _acquire(nodes: list[GuardedNode]) -> list[Timer]:
    """Acquire all timers, in the order of their deadlines; the last one hangs."""
    began = time.monotonic()
    timers = []
    for number in range(TIMERS):
        after = LEAD + SPREAD * number / TIMERS
        timer = Timer(nodes[number % NODES], f"s-{number}", began + after, (number + 1) % HANG_EVERY == 0)
        timer.node.client.acquire("0@1", timer.scope, after, began)
        timers.append(timer)
    return timers


async def _release(timers: list[Timer]) -> None:
    for timer in timers:
        if not timer.hangs:
            await asyncio.sleep(timer.due - MARGIN - time.monotonic())
            timer.node.client.release("0@1", timer.scope)
            timer.released = time.monotonic()


def _reaped(nodes: list[GuardedNode]) -> set[str]:
    return {scope for node in nodes for scope, _ in node.reaped}
