"""Ranges of keys."""

from __future__ import annotations

import pytest

from rallypoint.etcd.values import prefix_end


@pytest.mark.parametrize(
    ("prefix", "end"),
    [
        (b"a", b"b"),
        (b"/runs/", b"/runs0"),
        (b"a\xff", b"b"),
        (b"a\xff\xff", b"b"),
        (b"", b"\0"),
        (b"\xff", b"\0"),
    ],
)
def test_the_end_of_a_prefix_is_behind_all_keys_that_have_it(prefix: bytes, end: bytes) -> None:
    """It is before all others; a zero byte is etcd's value for no end."""
    assert prefix_end(prefix) == end
    if end != b"\0":
        assert prefix < prefix + b"\xff" * 9 < end
        assert not end.startswith(prefix)
