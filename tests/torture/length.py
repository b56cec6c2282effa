"""The length of the torture tests: seconds by `make test-slow`, a minute by `make torture`."""

from __future__ import annotations

import os
from typing import TypeVar

_T = TypeVar("_T")

FULL_LENGTH = os.environ.get("RALLYPOINT_TORTURE") == "full"
"""True if the tests run at full length, and the crowds have their full size."""


def ordinarily(short: _T, *, in_full: _T) -> _T:
    """Return a test's value for `make test-slow`, or at full length."""
    return in_full if FULL_LENGTH else short
