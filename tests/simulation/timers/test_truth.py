"""A scope's time counts while its host runs; pauses that a watch clock can't detect count as well."""

from __future__ import annotations

import pytest

from simulation.timers.truth import APART, NOTICEABLE, Span, Stillness


def test_a_pause_of_the_host_does_not_count() -> None:
    """The time of a scope over a pause is the time for which its host ran, also during the pause."""
    host = Stillness()
    span = Span("worker", 1, "scope", 5.0, 10.0, host)
    host.begin(12.0)
    assert span.held(14.0) == pytest.approx(2.0)
    host.end(14.0)
    assert span.held(15.0) == pytest.approx(3.0)
    span.ended = 14.5
    assert span.held(20.0) == pytest.approx(2.5)
    assert host.total == pytest.approx(2.0)


def test_a_pause_that_no_watch_clock_can_detect_counts() -> None:
    """A pause that is too short, or too soon after another, counts."""
    host = Stillness()
    host.begin(1.0)
    host.end(1.0 + NOTICEABLE / 2)
    assert host.ran(0.0, 10.0) == pytest.approx(10.0)
    host.begin(20.0)
    host.end(21.0)
    host.begin(21.0 + APART / 2)
    host.end(23.0 + APART / 2)
    assert host.ran(0.0, 30.0) == pytest.approx(29.0)
