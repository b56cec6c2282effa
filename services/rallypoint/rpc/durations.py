"""Convert seconds to google.protobuf.Duration and Timestamp, and back; and `is_repeated` of any message.

Conversion rounds to the nanosecond. It is exact both ways below 2**53 nanoseconds (104 days); the time of day of a
Timestamp is exact to a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

# The range of a Duration by its own definition: about 10,000 years.
_MAX_SECONDS = 315_576_000_000
_BILLION = 1_000_000_000


def is_repeated(field: Any) -> bool:
    """Return True for the descriptor of a repeated field. Protobuf below 6.31 has a label only, 7 has none."""
    known: bool | None = getattr(field, "is_repeated", None)
    return bool(field.label == field.LABEL_REPEATED) if known is None else known


def set_seconds(field: Duration | Timestamp, seconds: float) -> None:
    """Set a field of a message: to a duration, or to a time in unix seconds."""
    field.FromNanoseconds(round(seconds * 1e9))


def to_duration(seconds: float) -> Duration:
    """Return `seconds` as a Duration."""
    duration = Duration()
    set_seconds(duration, seconds)
    return duration


def to_seconds(message: Duration | Timestamp) -> float:
    """Return the seconds of a Duration, which need not be valid, or the unix seconds of a Timestamp.

    Raises:
        ValueError: The Timestamp is invalid.
    """
    return message.ToNanoseconds() / 1e9


def checked_seconds(duration: Duration, field: str, refuse: Callable[[str, str], Exception]) -> float:
    """Return the seconds of a Duration of a peer.

    Raises:
        Exception: The Duration is invalid: `refuse`, called with `field` and the mistake, returns the exception.
    """
    seconds, nanos = duration.seconds, duration.nanos
    if not (-_MAX_SECONDS <= seconds <= _MAX_SECONDS and -_BILLION < nanos < _BILLION) or seconds * nanos < 0:
        raise refuse(field, "is not a valid duration: seconds or nanos are out of range, or differ in sign")
    return (seconds * _BILLION + nanos) / 1e9
