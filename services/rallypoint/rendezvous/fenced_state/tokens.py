"""Fencing tokens: what stands for one state of one run, and never for another. Pure.

A token is a number, which grows by one with each state that replaces another, and a nonce drawn for this state
alone. The number orders the states of a run. The nonce is what fences: whatever happens to the numbers (the
state is dropped and set again, a journal in memory dies with its process, an old backup is restored), a token
that was given out once is not given out again.
"""

from __future__ import annotations

NONCE_BYTES = 16
_NUMBER_BYTES = 8
TOKEN_BYTES = _NUMBER_BYTES + NONCE_BYTES


def next_token(before: bytes | None, nonce: bytes) -> bytes:
    """Return the token of a state that replaces the one of the token `before`; None: it is the first.

    Args:
        before: A token of this module.
        nonce: `NONCE_BYTES` random bytes, drawn for this token.
    """
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
    number = 0 if before is None else number_of(before)
    return (number + 1).to_bytes(_NUMBER_BYTES) + nonce


def number_of(token: bytes) -> int:
    """Return the number in a token of this module."""
    return int.from_bytes(token[:_NUMBER_BYTES])
