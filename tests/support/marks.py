"""Marks of single cases of a test."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: object, id: str | None = None) -> Any:
    """A case that runs only in `make test-slow`."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)
