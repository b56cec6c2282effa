"""A token stands for one state only, even if its number is used again."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.state.core import NONCE_BYTES, TOKEN_BYTES, next_token, number_of


def test_numbers_grow_and_nonces_differ() -> None:
    first = next_token(None, b"a" * NONCE_BYTES)
    second = next_token(first, b"b" * NONCE_BYTES)
    assert (number_of(first), number_of(second)) == (1, 2)
    assert len(first) == len(second) == TOKEN_BYTES
    # The state was dropped, or an old backup restored: the number comes again, the token doesn't.
    assert next_token(None, b"c" * NONCE_BYTES) != first
    assert next_token(first, b"d" * NONCE_BYTES) != second


def test_a_short_nonce_is_no_nonce() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        next_token(None, b"short")
