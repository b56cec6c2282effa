"""Convert seconds to google.protobuf.Duration and back."""

from __future__ import annotations

import math

from google.protobuf.duration_pb2 import Duration

from rallypoint.timer.core.values import InvalidField

# The range of a Duration by its own definition: about 10,000 years.
_MAX_SECONDS = 315_576_000_000
_BILLION = 1_000_000_000


def to_duration(seconds: float) -> Duration:
    """Return a Duration of `seconds`, truncated to the nanosecond."""
    whole = math.trunc(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * _BILLION))


def to_seconds(duration: Duration, field: str) -> float:
    """Return the seconds of a Duration.

    Raises:
        InvalidField: The Duration is invalid; the error names `field`.
    """
    seconds, nanos = duration.seconds, duration.nanos
    if not (-_MAX_SECONDS <= seconds <= _MAX_SECONDS and -_BILLION < nanos < _BILLION) or seconds * nanos < 0:
        raise InvalidField(
            field, "is not a valid duration: seconds or nanos are out of range, or differ in sign"
        )
    return seconds + nanos / _BILLION
