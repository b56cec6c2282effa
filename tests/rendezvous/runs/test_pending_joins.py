"""A lone newcomer is answered almost at once; in a burst, answers wait for quiet, but for a limited time only."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from rallypoint.rendezvous.runs.run import PendingJoins

QUIET = 0.02


class _Selector(selectors.SelectSelector):
    """Never waits: advances the time instead."""

    def __init__(self, pass_time: Callable[[float], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "somebody waits for what never comes"
        self._pass_time(timeout)
        return super().select(0)


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time the test controls."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(_Selector(self._pass))

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now


@contextmanager
def clock_loop() -> Iterator[ClockLoop]:
    loop = ClockLoop()
    try:
        yield loop
    finally:
        loop.close()


def woken(
    arrivals: PendingJoins, loop: ClockLoop, comings: Sequence[float], term: float = 15.0, until: float = 60.0
) -> list[float]:
    """Add newcomers at these times; return when each was woken."""
    began, at = loop.now, dict[int, float]()

    def wake(number: int) -> Callable[[], None]:
        def woke() -> None:
            assert number not in at, "woken twice"
            at[number] = loop.now - began

        return woke

    async def come() -> None:
        for number, coming in enumerate(comings):
            await asyncio.sleep(max(0.0, began + coming - loop.now))
            arrivals.add(wake(number), term)
        await asyncio.sleep(until)

    loop.run_until_complete(come())
    assert len(at) == len(comings), "somebody was forgotten"
    return [at[number] for number in range(len(comings))]


def test_a_lone_newcomer_waits_for_a_moment_only() -> None:
    """It waits as long as it takes to see if others come."""
    with clock_loop() as loop:
        assert woken(PendingJoins(), loop, [0.0]) == [pytest.approx(QUIET)]


def test_a_storm_is_answered_when_it_is_over() -> None:
    """All are answered at once, a moment after the last."""
    with clock_loop() as loop:
        comings = [number * 0.01 for number in range(50)]
        assert woken(PendingJoins(), loop, comings) == [pytest.approx(0.49 + QUIET)] * 50


def test_no_node_waits_longer_than_a_third_of_its_term() -> None:
    """This holds while others keep coming: it needs its lease in time for a heartbeat. Later ones wait on."""
    with clock_loop() as loop:
        comings = [number * 0.01 for number in range(300)]
        times = woken(PendingJoins(), loop, comings, term=1.5)
        waited = [at - coming for at, coming in zip(times, comings, strict=True)]
        assert max(waited) <= 0.5 + QUIET
        assert waited[:200] == pytest.approx([0.5] * 200, abs=QUIET)


def test_no_node_waits_so_long_that_it_gives_up() -> None:
    """This holds for any lease time."""
    with clock_loop() as loop:
        comings = [number * 0.01 for number in range(1_000)]
        times = woken(PendingJoins(), loop, comings, term=86_400.0)
        assert max(at - coming for at, coming in zip(times, comings, strict=True)) <= 5.0 + QUIET


def test_after_a_storm_it_is_as_before() -> None:
    """The next one waits for a moment only."""
    with clock_loop() as loop:
        arrivals = PendingJoins()
        woken(arrivals, loop, [0.0, 0.01, 0.02])
        assert woken(arrivals, loop, [0.0]) == [pytest.approx(QUIET)]
