"""Seconds survive the wire to the nanosecond, and an invalid duration is refused by name."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rpc.durations import checked_seconds, to_duration, to_seconds
from rallypoint.rpc.errors import ServiceError, invalid


@given(st.floats(-1e6, 1e6))
def test_there_and_back(seconds: float) -> None:
    """It may have either sign; seconds and nanos have the same."""
    duration = to_duration(seconds)
    assert duration.seconds * duration.nanos >= 0
    assert to_seconds(duration) == pytest.approx(seconds, abs=1e-9)
    assert to_duration(checked_seconds(duration, "after", invalid)) == duration


@pytest.mark.parametrize(("seconds", "nanos"), [(1, -1), (-1, 1), (0, 10**9), (0, -(10**9)), (10**12, 0)])
def test_an_invalid_duration_is_refused(seconds: int, nanos: int) -> None:
    """The definition is that of google.protobuf.Duration."""
    with pytest.raises(ServiceError, match="after: is not a valid duration"):
        checked_seconds(Duration(seconds=seconds, nanos=nanos), "after", invalid)
