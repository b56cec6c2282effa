"""The length of the availability tests: seconds in `make test-slow`, minutes in `make test-ha`."""

from __future__ import annotations

import os
from typing import TypeVar

_T = TypeVar("_T")

FULL_LENGTH = os.environ.get("RALLYPOINT_HA") == "full"
"""True if all repeats run, and measured times are checked besides being printed."""


def ordinarily(short: _T, *, in_full: _T) -> _T:
    """Return a figure of a test: `short` in `make test-slow`, `in_full` at full length."""
    return in_full if FULL_LENGTH else short
