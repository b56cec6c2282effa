"""Work that must not be paused runs to its end."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.base.cooperative import Work, finish


def _count(to: int) -> Work[int]:
    done = 0
    for _ in range(to):
        done += 1
        yield
    if to > 5:
        raise ValueError("too far")
    return done


def test_all_of_it_is_done() -> None:
    """Its result is returned, also if there is nothing to do."""
    assert [finish(_count(to)) for to in (0, 1, 5)] == [0, 1, 5]


def test_its_error_is_raised() -> None:
    """Unchanged."""
    with pytest.raises(ValueError, match="too far"):
        finish(_count(6))
