"""How long the torture lasts: seconds by `make test-slow`, a minute by `make torture`."""

from __future__ import annotations

import os
from typing import TypeVar

_T = TypeVar("_T")

FULL_LENGTH = os.environ.get("RALLYPOINT_TORTURE") == "full"
"""Whether the torture is as long, and the crowds are as large, as they are meant to be."""


def ordinarily(short: _T, *, in_full: _T) -> _T:
    """A figure of a test: what it is by `make test-slow`, and what it is in full."""
    return in_full if FULL_LENGTH else short
