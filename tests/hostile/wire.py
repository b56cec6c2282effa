"""Messages as bytes, damaged on the way."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hostile.values import NOT_UTF8

_NO_TEXT = b"\xff\xfe\xc3\x28\xed\xa0\x80".ljust(len(NOT_UTF8), b"\x80")


def damaged(data: bytes, draw: Random) -> bytes:
    """Return the bytes with one kind of damage."""
    return draw.choice(_DAMAGES)(data, draw)


def _truncated(data: bytes, draw: Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _flipped(data: bytes, draw: Random) -> bytes:
    made = bytearray(data or b"\x00")
    for _ in range(draw.randint(1, 4)):
        made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
    return bytes(made)


def _random(_data: bytes, draw: Random) -> bytes:
    return draw.randbytes(draw.choice((1, 7, 100, 5_000)))


def _empty(_data: bytes, _draw: Random) -> bytes:
    return b""


def _twice(data: bytes, _draw: Random) -> bytes:
    # Legal: later values replace earlier ones, and repeated fields get both.
    return data + data


def _with_unknown_fields(data: bytes, draw: Random) -> bytes:
    # Number 2,000 as a varint, as bytes, and as eight bytes. Legal: a receiver skips fields that it doesn't know.
    return data + draw.choice((b"\x80\x7d\x01", b"\x82\x7d\x03abc", b"\x81\x7d" + bytes(8)))


def _with_group(data: bytes, draw: Random) -> bytes:
    # Groups within groups, closed or not.
    depth = draw.choice((1, 50, 200))
    return data + b"\x0b" * depth + b"\x0c" * draw.choice((0, depth))


def _with_long_length(data: bytes, _draw: Random) -> bytes:
    # A field whose length claims 2 GiB less one byte.
    return data + b"\x0a\xff\xff\xff\xff\x07"


def _with_long_varint(data: bytes, _draw: Random) -> bytes:
    return data + b"\x18" + b"\xff" * 11 + b"\x01"


_DAMAGES: tuple[Callable[[bytes, Random], bytes], ...] = (
    _truncated,
    _flipped,
    _random,
    _empty,
    _twice,
    _with_unknown_fields,
    _with_group,
    _with_long_length,
    _with_long_varint,
)


def without_utf8(data: bytes) -> bytes:
    """Return the bytes, with invalid text at the marks in a message."""
    return data.replace(NOT_UTF8.encode(), _NO_TEXT)
