"""Long work in many small parts, so that whoever carries it out can pause between two of them. Pure."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

_T = TypeVar("_T")

Work: TypeAlias = Generator[None, None, _T]
"""Yields after every part of it, which takes microseconds as a rule, and returns what comes of it."""


def finish(work: Work[_T]) -> _T:
    """Carry it out without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _T = end.value
            return result
