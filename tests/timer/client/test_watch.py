"""The agent's own pauses don't count as time that its workers took."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rallypoint.rpc.clock import LagSettings
from rallypoint.timer.client.pacing import Watch
from support.clock import Clock
from support.waiting import until

LAG = LagSettings(tolerance=0.1, pulse=0.25, settle=1.0)


class Pauses:
    """The pauses that a watch reported."""

    def __init__(self) -> None:
        self.pauses: list[tuple[float, float]] = []

    def __call__(self, slept: float, forgiven: float) -> None:
        """Record a pause."""
        self.pauses.append((slept, forgiven))


@pytest.fixture
def told() -> Pauses:
    """The pauses that the test's watch reports."""
    return Pauses()


@pytest.fixture
async def watch(clock: Clock, told: Pauses) -> AsyncIterator[Watch]:
    """A watch by the test's clock. Its pulse runs, but reads the time that the test set."""
    watch = Watch(clock, LAG, told)
    watch.start()
    yield watch
    watch.stop()


async def test_time_that_is_watched_counts(watch: Watch, clock: Clock, told: Pauses) -> None:
    """It counts in full, as long as the watch is not late."""
    before = watch.now()
    for _ in range(10):
        clock.now += 0.3
        watch.now()
        watch.stop()
        watch.start()
    assert watch.now() - before == pytest.approx(3.0)
    assert told.pauses == []


async def test_a_pause_does_not_count(watch: Watch, clock: Clock, told: Pauses) -> None:
    """The first reading after it leaves the pause out, and it is reported once."""
    before = watch.now()
    clock.now += 20
    assert before - LAG.settle <= watch.now() <= before + LAG.pulse
    assert told.pauses[0] == pytest.approx((19.75, 20.75))
    clock.now += LAG.tolerance  # the next look is due at once
    watch.now()
    assert len(told.pauses) == 1


async def test_the_pulse_notices_a_pause_by_itself(watch: Watch, clock: Clock, told: Pauses) -> None:
    """It is noticed without a reading."""
    clock.now += 20
    await until(lambda: bool(told.pauses))


async def test_a_timer_from_before_a_pause_ages_only_by_watched_time(watch: Watch, clock: Clock) -> None:
    """The result is the same before the pause and after it."""
    began = clock.now - 5
    known_before = watch.at(began)
    clock.now += 20
    assert watch.at(began) == known_before
    clock.now += 20
    assert watch.at(began) == known_before
    assert watch.now() - watch.at(began) <= 5 + 2 * LAG.pulse


async def test_a_timer_that_began_in_a_pause_counts_from_its_end(watch: Watch, clock: Clock) -> None:
    """Only the agent was paused: a worker that began then is no older than the agent has watched it."""
    clock.now += 20
    shown = watch.now()
    assert watch.at(clock.now - 10) == shown
    clock.now += LAG.tolerance
    assert watch.now() - watch.at(clock.now - 0.05) == pytest.approx(0.05)


async def test_between_two_pauses_time_counts(watch: Watch, clock: Clock) -> None:
    """A timer that began there ages only by the time that was watched."""
    clock.now += 20
    watch.now()
    began = clock.now
    clock.now += 0.2
    watch.now()
    clock.now += 30
    watch.now()
    assert watch.now() - watch.at(began) <= 0.5


async def test_nothing_is_noticed_before_it_starts_and_after_it_stops(clock: Clock, told: Pauses) -> None:
    """A stopped watch has no pauses."""
    watch = Watch(clock, LAG, told)
    clock.now += 100
    watch.now()
    watch.start()
    watch.stop()
    clock.now += 100
    watch.now()
    await asyncio.sleep(0)
    assert told.pauses == []
