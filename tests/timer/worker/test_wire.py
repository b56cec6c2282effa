"""Messages between worker and agent arrive unchanged, and no other bytes are accepted as one."""

from __future__ import annotations

import struct
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rallypoint.timer.worker import wire

TOKENS = st.integers(0, 2**64 - 1)


@given(TOKENS, st.integers(0, 2**63), st.integers(1, 10**9), st.text(min_size=1, max_size=64))
def test_an_acquire_arrives(token: int, since: int, after: int, scope: str) -> None:
    """Token and scope are exact, times have the precision of a float."""
    message = wire.decode(wire.acquire(token, since, after / 1000, scope.encode()))
    assert isinstance(message, wire.Acquire)
    assert message == wire.Acquire(token, message.since, message.after, scope)
    assert message.since == pytest.approx(since / 1e9, rel=1e-12)
    assert message.after == pytest.approx(after / 1000)


@given(st.sampled_from([0, 1, 15, 64, wire.NO_SIGNAL]))
def test_a_signal_arrives(signal: int) -> None:
    """It arrives with a timer that has a given duration, and with one that learns it."""
    for after in (1.0, 0.0):
        message = wire.decode(wire.acquire(1, 0, after, b"s", signal))
        assert message == wire.Acquire(1, 0.0, after, "s", signal)


def test_the_shortest_duration_is_no_learning() -> None:
    """A duration below a nanosecond becomes one."""
    assert wire.decode(wire.acquire(1, 0, 1e-12, b"s")) == wire.Acquire(1, 0.0, 1e-9, "s")


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63))
def test_progress_arrives(step: int, when: int) -> None:
    """The step is exact, the time has the precision of a float."""
    assert wire.decode(wire.progress(step, when)) == wire.Progress(step, when / 10**9)


@given(TOKENS)
def test_a_release_arrives(token: int) -> None:
    """The token arrives exactly."""
    assert wire.decode(wire.release(token)) == wire.Release(token)


@given(st.binary(max_size=wire.MAX_MESSAGE_BYTES + 10))
@example(b"")
@example(b"\x01\x01" + bytes(6))
def test_any_bytes_are_a_message_or_malformed(message: bytes) -> None:
    """Any bytes are a message or a MalformedMessage, never another error."""
    try:
        decoded = wire.decode(message)
    except wire.MalformedMessage:
        return
    assert isinstance(decoded, get_args(wire.Message))


def test_the_layout_is_the_documented_one() -> None:
    """The layout of docs/timer-socket.md for other languages, byte by byte."""
    assert wire.acquire(7, 5, 1.5, b"s#1") == (
        b"\x01\x01\0\0\0\0\0\0" + struct.pack("<QQQ", 7, 5, 1_500_000_000) + b"s#1"
    )
    assert wire.release(7) == b"\x02\x01\0\0\0\0\0\0" + struct.pack("<Q", 7)
    assert (
        wire.acquire(7, 5, 0, b"s", 10) == b"\x01\x01\x0a\x01\0\0\0\0" + struct.pack("<QQQ", 7, 5, 0) + b"s"
    )
    assert wire.progress(7, 5) == b"\x04\x01\0\0\0\0\0\0" + struct.pack("<QQ", 7, 5)
    assert wire.TABLE == b"\x05\x01\0\0\0\0\0\0"
    assert wire.LOOK == b"\x06\x01\0\0\0\0\0\0"
    assert wire.decode(b"\x03\x01\0\0\0\0\0\0") == wire.Clear()
    assert wire.decode(wire.TABLE) == wire.TableMessage()
    assert wire.decode(wire.LOOK) == wire.Look()


def test_a_newer_client_is_understood_as_far_as_possible() -> None:
    """An unknown kind is ignored; an unknown version is refused."""
    assert wire.decode(b"\x63\x01\0\0\0\0\0\0 anything") == wire.Unknown(0x63)
    with pytest.raises(wire.MalformedMessage, match="version 2"):
        wire.decode(b"\x01\x02" + bytes(30))


@pytest.mark.parametrize(
    "message",
    [
        wire.acquire(1, 0, 1.0, b""),
        wire.acquire(1, 0, 1.0, b"x" * 257),
        wire.acquire(1, 0, 1.0, b"\xff"),
        wire.acquire(1, 0, 1.0, b"x", 65),
        b"\x01\x01" + bytes(6) + struct.pack("<QQQ", 1, 0, 0) + b"x",
        b"\x01\x01\0\x01" + bytes(4) + struct.pack("<QQQ", 1, 0, 5) + b"x",
        wire.release(1) + b"x",
        wire.progress(1, 1)[:-1],
    ],
)
def test_a_malformed_message_is_refused(message: bytes) -> None:
    """It has no scope, one too long or one that isn't text, no such signal, no duration or one too many, or bytes left
    over or missing."""
    with pytest.raises(wire.MalformedMessage):
        wire.decode(message)
