"""Messages from a worker to its agent's timer socket. docs/timer-socket.md is the contract for other languages."""

from __future__ import annotations

import struct
from typing import NamedTuple

VERSION = 1
MAX_SCOPE_BYTES = 256
MAX_TOKEN = 2**64 - 1

_ACQUIRE = 1
_RELEASE = 2
_CLEAR = 3

# Kind, version and six zero bytes, which leave room and align what follows.
_HEAD = struct.Struct("<BB6x")
_TOKEN = struct.Struct("<BB6xQ")
_TIMER = struct.Struct("<BB6xQQQ")

MAX_MESSAGE_BYTES = _TIMER.size + MAX_SCOPE_BYTES

_NANOSECONDS = 1_000_000_000


class Acquire(NamedTuple):
    """A timer starts, or starts anew: one per connection and token. Seconds.

    `since` is by CLOCK_MONOTONIC, which all processes of a host share; 0: when the message is read.
    """

    token: int
    since: float
    after: float
    scope: str


class Release(NamedTuple):
    """A timer ends."""

    token: int


class Clear(NamedTuple):
    """All timers of the connection end."""


class Unknown(NamedTuple):
    """A message of a newer client, to be ignored."""

    kind: int


class MalformedMessage(Exception):
    """Not a message of this protocol; the connection is of no use any more."""


def acquire(token: int, since: int, after: float, scope: bytes) -> bytes:
    """The message for Acquire; `since` in nanoseconds. Nothing is checked here, where it costs the worker."""
    return _TIMER.pack(_ACQUIRE, VERSION, token, since, int(after * _NANOSECONDS)) + scope


def release(token: int) -> bytes:
    """The message for Release."""
    return _TOKEN.pack(_RELEASE, VERSION, token)


def decode(message: bytes) -> Acquire | Release | Clear | Unknown:
    """What a message says.

    Raises:
        MalformedMessage: it says nothing, with what was expected.
    """
    size = len(message)
    if size < _HEAD.size:
        raise MalformedMessage(f"a message has at least {_HEAD.size} bytes, not {size}")
    kind, version = message[0], message[1]
    if version != VERSION:
        raise MalformedMessage(f"version {version} of the protocol is not spoken here, only {VERSION}")
    if kind == _ACQUIRE:
        return _decode_acquire(message, size)
    if kind == _RELEASE:
        if size != _TOKEN.size:
            raise MalformedMessage(f"a release has {_TOKEN.size} bytes, not {size}")
        return Release(_TOKEN.unpack(message)[2])
    return Clear() if kind == _CLEAR else Unknown(kind)


def _decode_acquire(message: bytes, size: int) -> Acquire:
    if not _TIMER.size < size <= MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"an acquire has {_TIMER.size + 1} to {MAX_MESSAGE_BYTES} bytes, not {size}")
    _, _, token, since, after = _TIMER.unpack_from(message)
    if not after:
        raise MalformedMessage("an acquire has a duration of at least one nanosecond, not 0")
    try:
        scope = message[_TIMER.size :].decode()
    except UnicodeDecodeError:
        raise MalformedMessage("the scope of an acquire is UTF-8; this one is not") from None
    return Acquire(token, since / _NANOSECONDS, after / _NANOSECONDS, scope)
