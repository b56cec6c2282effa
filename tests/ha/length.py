"""How long the tests of availability last: seconds by `make test-slow`, minutes by `make test-ha`."""

from __future__ import annotations

import os
from typing import TypeVar

_T = TypeVar("_T")

FULL_LENGTH = os.environ.get("RALLYPOINT_HA") == "full"
"""Whether all repeats are played, and times are judged besides being printed."""


def ordinarily(short: _T, *, in_full: _T) -> _T:
    """A figure of a test: what it is by `make test-slow`, and what it is in full."""
    return in_full if FULL_LENGTH else short
