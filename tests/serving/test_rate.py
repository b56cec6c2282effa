"""A client gets at most its rate in any period of time, and always its rate; a refusal states the time to wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.serving.flow import Bucket, Buckets, Rate


def test_a_burst_passes_and_no_more() -> None:
    """After any pause, as many as the burst pass; the refusal of the next has the time until there is room again."""
    bucket = Bucket(Rate(10, 3), 0.0)
    assert [bucket.take(1000.0) for _ in range(4)] == [0.0, 0.0, 0.0, pytest.approx(0.1)]


def test_a_client_that_waits_the_stated_time_is_admitted() -> None:
    """A refusal costs nothing: the wait does not grow with the number of attempts."""
    bucket = Bucket(Rate(4, 1), 0.0)
    bucket.take(0.0)
    waits = [bucket.take(0.0) for _ in range(100)]
    assert waits == [pytest.approx(0.25)] * 100
    assert bucket.take(0.25) == 0.0


def test_a_client_within_the_rate_is_never_refused() -> None:
    """It may call for any length of time."""
    bucket = Bucket(Rate(8, 1), 0.0)
    assert not any(bucket.take(number / 8) for number in range(10_000))


@given(st.floats(0.1, 1000), st.integers(1, 50), st.lists(st.floats(0, 2), min_size=1, max_size=200))
def test_no_stretch_of_time_has_more_than_the_rate(
    per_second: float, burst: int, pauses: list[float]
) -> None:
    """In any period, at most the burst plus the rate times its length passes."""
    bucket, now, passed = Bucket(Rate(per_second, burst), 0.0), 0.0, []
    for pause in pauses:
        now += pause
        if bucket.take(now) == 0.0:
            passed.append(now)
    for first, begin in enumerate(passed):
        for last, end in enumerate(passed[first:], first):
            assert last - first + 1 <= burst + (end - begin) * per_second + 1e-6


@pytest.mark.parametrize(("per_second", "burst"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0)])
def test_a_rate_that_admits_no_call_is_refused(per_second: float, burst: int) -> None:
    """The error is raised at the construction, not at the use."""
    with pytest.raises(ValueError, match="no such rate"):
        Rate(per_second, burst)


def test_each_party_has_a_bucket_of_its_own() -> None:
    """A flooding client takes nothing from another."""
    buckets = Buckets(Rate(1, 2), most=10)
    assert [buckets.take("flood", 0.0) > 0 for _ in range(5)] == [False, False, True, True, True]
    assert buckets.take("other", 0.0) == 0.0


def test_memory_is_bounded_and_frequent_clients_are_kept() -> None:
    """Beyond the maximum, the clients that were idle for longest are dropped."""
    buckets = Buckets(Rate(1, 1), most=100)
    buckets.take("flood", 0.0)
    for number in range(10_000):
        buckets.take(f"passer-by {number}", 0.0)
        assert buckets.take("flood", 0.0) > 0
    assert len(buckets) == 100
