"""Seconds survive the wire to the nanosecond, and what is no duration is named."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.timer.core.values import InvalidField
from rallypoint.timer.durations import to_duration, to_seconds


@given(st.floats(-1e6, 1e6))
def test_there_and_back(seconds: float) -> None:
    """Of either sign; seconds and nanos agree in it."""
    duration = to_duration(seconds)
    assert duration.seconds * duration.nanos >= 0
    assert to_seconds(duration, "after") == pytest.approx(seconds, abs=2e-9)


@pytest.mark.parametrize(("seconds", "nanos"), [(1, -1), (-1, 1), (0, 10**9), (0, -(10**9)), (10**12, 0)])
def test_what_is_no_duration_is_refused(seconds: int, nanos: int) -> None:
    """By the definition of google.protobuf.Duration."""
    with pytest.raises(InvalidField, match="after: is not a valid duration"):
        to_seconds(Duration(seconds=seconds, nanos=nanos), "after")
