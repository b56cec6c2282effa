"""Replace a function for a test by one that may call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

_New = TypeVar("_New", bound=Callable[..., Any])


def instead_of(patch: pytest.MonkeyPatch, owner: object, name: str) -> Callable[[_New], _New]:
    """Replace a function or method by the decorated one, which gets the original as its first argument."""
    original = getattr(owner, name)

    def replace(new: _New) -> _New:
        patch.setattr(owner, name, lambda *positional, **named: new(original, *positional, **named))
        return new

    return replace
