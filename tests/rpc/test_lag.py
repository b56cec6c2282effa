"""The watch clock leaves out the time for which the watchdog slept, and advances however often that happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rpc.clock import LagSettings, WatchClock

SETTINGS = LagSettings(tolerance=0.1, pulse=0.25, settle=1.0)


def test_ordinary_lateness_forgives_nothing() -> None:
    """Waking within the tolerance leaves every deadline unchanged."""
    clock = WatchClock(0.0, SETTINGS)
    assert clock.observe(10.1, due=10.0) == 0.0
    assert clock.read(10.1) == 10.1


def test_a_busy_machine_is_forgiven_its_lag_and_no_more() -> None:
    """Lag comes again and again: it must not delay expiries by twice its length each time."""
    clock = WatchClock(0.0, SETTINGS)
    assert clock.observe(10.2, due=10.0) == pytest.approx(0.2)


@given(
    began=st.floats(0, 1e6), asleep=st.floats(2 * SETTINGS.pulse, 1e4), until_due=st.floats(0, SETTINGS.pulse)
)
def test_a_pause_is_forgiven_whole(began: float, asleep: float, until_due: float) -> None:
    """Wherever in a pulse the pause begins, the clock wakes no later than it fell asleep; after a long one, earlier."""
    clock = WatchClock(0.0, SETTINGS)
    before = clock.read(began)
    clock.observe(began + asleep, due=began + until_due)
    left = before - clock.read(began + asleep)
    assert left >= -1e-6
    if asleep >= SETTINGS.settle + SETTINGS.pulse:
        assert left >= SETTINGS.settle - SETTINGS.pulse - 1e-6


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(2 * SETTINGS.pulse, 20)), min_size=1, max_size=20))
def test_pauses_that_follow_one_another_are_forgiven_whole(cycles: list[tuple[float, float]]) -> None:
    """This holds for any time between them, except for a few milliseconds if it was almost none."""
    clock = WatchClock(0.0, SETTINGS)
    now = 0.0
    for awake, asleep in cycles:
        falls_asleep = now + awake
        while (due := clock.next_look(now)) < falls_asleep:
            now = due
            assert clock.observe(now, due) == 0.0
        before = clock.read(falls_asleep)
        now = falls_asleep + asleep
        clock.observe(now, due)
        assert clock.read(now) <= before + 0.005 + 1e-6


def test_looks_are_close_together_only_right_after_a_pause() -> None:
    """Half a dozen of them; after these, and before the first pause, there is one per pulse."""
    clock = WatchClock(0.0, SETTINGS)
    assert clock.next_look(0.0) == SETTINGS.pulse
    clock.observe(10.0, due=5.0)
    now, looks = 10.0, 0
    while (due := clock.next_look(now)) - now < SETTINGS.pulse - 1e-9:
        now, looks = due, looks + 1
    assert looks == 6


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 5)), min_size=1, max_size=50))
def test_a_watchdog_that_stumbles_for_ever_still_gets_on(cycles: list[tuple[float, float]]) -> None:
    """Of the time really watched, at least half shows on the clock, less one settle time."""
    clock = WatchClock(0.0, SETTINGS)
    now = watched = 0.0
    for watching, lag in cycles:
        due = now + watching
        now = due + lag
        # As the clock sees it: the part lost by rounding of the sum is included.
        seen = now - due
        watched += watching + (seen if seen <= SETTINGS.tolerance else 0.0)
        clock.observe(now, due)
    assert clock.read(now) >= watched / 2 - SETTINGS.settle - 1e-9
    assert clock.read(now) <= watched + 1e-9


def test_the_forgiven_time_is_returned() -> None:
    """The sum of the results of observe is the time that the clock leaves out."""
    clock = WatchClock(0.0, SETTINGS)
    total = clock.observe(20.0, due=0.5) + clock.observe(50.0, due=40.0)
    assert clock.forgiven == pytest.approx(total)
    assert clock.read(60.0) == pytest.approx(60.0 - total)
