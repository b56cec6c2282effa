"""Messages from a worker to its agent's timer socket. docs/timer-socket.md is the contract for other languages."""

from __future__ import annotations

import struct
from typing import NamedTuple, Union

VERSION = 1
MAX_SCOPE_BYTES = 256

NO_SIGNAL = 255
"""The signal of an acquire that kills no process: the expiry is only reported."""

_MAX_SIGNAL = 64

_ACQUIRE = 1
_RELEASE = 2
_CLEAR = 3
_PROGRESS = 4
_TABLE = 5
_LOOK = 6

_LEARNS = 1  # of an acquire's flags

# Kind, version and six bytes, which are zero unless the kind uses them, and align the following words.
_HEAD = struct.Struct("<BB6x")
_TOKEN = struct.Struct("<BB6xQ")
# The first two of the six bytes: signal and flags.
_TIMER = struct.Struct("<BBBB4xQQQ")
_STEP = struct.Struct("<BB6xQQ")

MAX_MESSAGE_BYTES = _TIMER.size + MAX_SCOPE_BYTES

_NANOSECONDS = 1_000_000_000


class Acquire(NamedTuple):
    """A timer starts or restarts: one per connection and token. Seconds.

    `since` is by CLOCK_MONOTONIC, which all processes of a host share; 0: when the message is read.
    """

    token: int
    since: float
    # 0: the timeout is learned.
    after: float
    scope: str
    # The signal to send before SIGKILL; 0: the agent's choice; NO_SIGNAL: neither.
    signal: int = 0


class Release(NamedTuple):
    """A timer ends."""

    token: int


class Clear(NamedTuple):
    """All timers of the connection end."""


class Progress(NamedTuple):
    """The process has reached a step. `when`: as Acquire.since."""

    step: int
    when: float


class TableMessage(NamedTuple):
    """The descriptor sent along is that of the process's table; see rallypoint.timer.worker.table."""


class Look(NamedTuple):
    """The table has changed while the agent was not polling it."""


class Unknown(NamedTuple):
    """A message of a newer client, to be ignored."""

    kind: int


Message = Union[Acquire, Release, Clear, Progress, TableMessage, Look, Unknown]


class MalformedMessage(Exception):
    """The message is not one of this protocol; the connection must be closed."""


def acquire(token: int, since: int, after: float, scope: bytes, signal: int = 0) -> bytes:
    """Return the message for Acquire; `since` in nanoseconds. Nothing is checked here, at the worker's cost."""
    # At least 1: a duration of 0 would mean a learned timeout.
    duration = max(int(after * _NANOSECONDS), 1) if after else 0
    flags = 0 if duration else _LEARNS
    return _TIMER.pack(_ACQUIRE, VERSION, signal, flags, token, since, duration) + scope


def release(token: int) -> bytes:
    """Return the message for Release."""
    return _TOKEN.pack(_RELEASE, VERSION, token)


def progress(step: int, when: int) -> bytes:
    """Return the message for Progress; `when` in nanoseconds."""
    return _STEP.pack(_PROGRESS, VERSION, step, when)


TABLE = _HEAD.pack(_TABLE, VERSION)
"""The message for TableMessage; its descriptor is sent along."""

LOOK = _HEAD.pack(_LOOK, VERSION)
"""The message for Look."""


def decode(message: bytes) -> Message:
    """Parse a message.

    Raises:
        MalformedMessage: The message is malformed; the error names the expected format.
    """
    size = len(message)
    if size < _HEAD.size:
        raise MalformedMessage(f"a message has at least {_HEAD.size} bytes, not {size}")
    kind, version = message[0], message[1]
    if version != VERSION:
        raise MalformedMessage(f"protocol version {version} is not supported; expected version {VERSION}")
    if kind == _ACQUIRE:
        return _decode_acquire(message, size)
    if kind == _RELEASE:
        if size != _TOKEN.size:
            raise MalformedMessage(f"a release has {_TOKEN.size} bytes, not {size}")
        return Release(_TOKEN.unpack(message)[2])
    if kind == _PROGRESS:
        if size != _STEP.size:
            raise MalformedMessage(f"a progress has {_STEP.size} bytes, not {size}")
        _, _, step, when = _STEP.unpack(message)
        return Progress(step, when / _NANOSECONDS)
    return _PLAIN[kind] if kind in _PLAIN else Unknown(kind)


_PLAIN: dict[int, Message] = {_CLEAR: Clear(), _TABLE: TableMessage(), _LOOK: Look()}


def _decode_acquire(message: bytes, size: int) -> Acquire:
    if not _TIMER.size < size <= MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"an acquire has {_TIMER.size + 1} to {MAX_MESSAGE_BYTES} bytes, not {size}")
    _, _, signal, flags, token, since, after = _TIMER.unpack_from(message)
    if not after and not flags & _LEARNS:
        raise MalformedMessage(
            "an acquire has a duration of at least one nanosecond, not 0, unless it learns"
        )
    if after and flags & _LEARNS:
        raise MalformedMessage("an acquire that learns has a duration of 0")
    if _MAX_SIGNAL < signal != NO_SIGNAL:
        raise MalformedMessage(f"the signal of an acquire is 0 to {_MAX_SIGNAL} or {NO_SIGNAL}, not {signal}")
    try:
        scope = message[_TIMER.size :].decode()
    except UnicodeDecodeError:
        raise MalformedMessage("the scope of an acquire is UTF-8; this one is not") from None
    return Acquire(token, since / _NANOSECONDS, after / _NANOSECONDS, scope, signal)
