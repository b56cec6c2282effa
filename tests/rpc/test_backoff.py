"""The back-off between attempts."""

from __future__ import annotations

from rallypoint.rpc.backoff import Backoff


def test_the_bound_doubles_up_to_the_longest() -> None:
    """The largest value is drawn, so that the bound is seen."""
    backoff = Backoff(lambda: 1.0, first=0.5, longest=3.0)
    assert [backoff.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_each_is_drawn_from_all_of_its_bound() -> None:
    """Full jitter: clients that lost the same server come back at different times."""
    draws = iter([0.0, 0.5, 0.25])
    backoff = Backoff(lambda: next(draws), first=1.0, longest=8.0)
    assert [backoff.next() for _ in range(3)] == [0.0, 1.0, 1.0]


def test_it_begins_with_the_shortest_after_a_success() -> None:
    """A connection that worked for a while and fails again is retried soon."""
    backoff = Backoff(lambda: 1.0, first=0.5, longest=3.0)
    for _ in range(4):
        backoff.next()
    backoff.reset()
    assert backoff.next() == 0.5


def test_no_delay_is_beyond_the_longest() -> None:
    """The first may be set to more."""
    backoff = Backoff(lambda: 1.0, first=5.0, longest=3.0)
    assert [backoff.next(), backoff.next()] == [3.0, 3.0]
