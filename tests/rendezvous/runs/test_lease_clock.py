"""The clock of leases: it leaves out pauses, and nothing else that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rallypoint.rendezvous.runs.run import LeaseClock
from rallypoint.rpc.clock import LagSettings

# The timer runs in real time, every millisecond; the test sets the clock.
LAG = LagSettings(tolerance=0.1, pulse=0.001, settle=1.0)


class World:
    """A clock that the test sets, and the lease clock that reads it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.looks = 0
        self._read_again = asyncio.Event()
        self.forgiven: list[float] = []
        self.clock = LeaseClock(self._read, LAG, lambda seconds, now: self.forgiven.append(seconds))

    def _read(self) -> float:
        self.looks += 1
        self._read_again.set()
        return self.now

    async def looked_at(self) -> None:
        """Wait until the timer has read the clock again, as it does in a process that is awake."""
        self._read_again.clear()
        await self._read_again.wait()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A lease clock whose timer runs."""
    world = World()
    world.clock.watch(wanted=True)
    yield world
    world.clock.stop()


async def test_a_process_that_is_awake_is_forgiven_nothing(world: World) -> None:
    """This holds without requests for the time: the timer reads the clock."""
    for _ in range(40):
        world.now += 0.05
        await world.looked_at()
    assert world.clock.now() == pytest.approx(102.0)
    assert world.forgiven == []


async def test_the_first_reader_of_the_clock_notices_a_pause(world: World) -> None:
    """The timer may notice it second; it does not count twice."""
    world.now += 20.0
    assert world.clock.now() == pytest.approx(100.0, abs=1.1)
    await world.looked_at()
    assert len(world.forgiven) == 1
    world.now += 0.05
    assert world.clock.now() == pytest.approx(100.05, abs=1.1)


async def test_a_deadline_is_never_nearer_than_the_float_precision(world: World) -> None:
    """Timers are rounded: one would fire before the deadline, again and again, and no time would pass."""
    loop_time = 32768.171
    timeout = world.clock.timeout(world.clock.now() + 3.6e-12)
    assert timeout is not None
    assert loop_time + timeout > loop_time


async def test_unwatched_it_leaves_nothing_out(world: World) -> None:
    """Without a deadline no timer is needed, and no lease can end."""
    world.clock.watch(wanted=False)
    looks = world.looks
    await asyncio.sleep(0.01)
    assert world.looks == looks
    world.now += 20.0
    assert world.clock.now() == 120.0


async def test_stopped_it_stands_still(world: World) -> None:
    """It keeps the time from before the pause in which it was stopped."""
    world.now += 20.0
    world.clock.stop()
    shown = world.clock.now()
    assert shown == pytest.approx(100.0, abs=1.1)
    world.now += 20.0
    assert world.clock.now() == shown
    assert world.clock.timeout(shown + 1) is None
