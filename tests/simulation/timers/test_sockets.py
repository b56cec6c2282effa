"""Simulated sockets behave like the kernel's: ordered, lossless, and a reader is called until it has read all."""

from __future__ import annotations

import os
import random
import socket
import struct

import pytest

from simulation.clockwork import Clockwork
from simulation.timers.sockets import Line, Listener, ReadingProcess


def never() -> bool:
    return False


def nothing() -> None:
    """Check nothing: there is no referee."""


@pytest.fixture
def clockwork() -> Clockwork:
    return Clockwork(random.Random(1))


@pytest.fixture
def process(clockwork: Clockwork) -> ReadingProcess:
    return ReadingProcess(clockwork, "agent", pytest.fail)


def read(line: Line) -> bytes:
    return line.recvmsg(100, 100, 0)[0]


def test_a_reader_is_called_until_nothing_waits(clockwork: Clockwork, process: ReadingProcess) -> None:
    """A reader gets one message at a time, also those sent before it was added, and the end last."""
    line, seen = Line(1), list[bytes]()

    def take() -> None:
        seen.append(read(line))
        if not seen[-1]:
            process.remove_reader(line)

    line.send(b"one")
    process.add_reader(line, take)
    line.send(b"two")
    clockwork.run(1.0, never, nothing)
    assert seen == [b"one", b"two"]
    line.send(b"three")
    line.end()
    line.send(b"lost")
    clockwork.run(2.0, never, nothing)
    assert seen == [b"one", b"two", b"three", b""]


def test_a_removed_reader_is_not_called(clockwork: Clockwork, process: ReadingProcess) -> None:
    """A removed reader is not called for a message that arrived before."""
    line = Line(1)
    process.add_reader(line, pytest.fail)
    line.send(b"one")
    assert process.remove_reader(line)
    clockwork.run(1.0, never, nothing)
    assert line.unread == 1


def test_a_descriptor_travels_as_a_copy() -> None:
    """The receiver gets a descriptor of its own, of the same file."""
    reading, writing = os.pipe()
    line = Line(1)
    line.send(b"table", writing)
    _, [(level, kind, data)], _, _ = line.recvmsg(100, 100, 0)
    assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
    (copy,) = struct.unpack("i", data)
    assert copy != writing
    os.write(copy, b"x")
    assert os.read(reading, 1) == b"x"
    for descriptor in (reading, writing, copy):
        os.close(descriptor)


def test_an_empty_socket_blocks() -> None:
    """With no connection to accept, or no message to read, BlockingIOError is raised, as by a non-blocking socket."""
    with pytest.raises(BlockingIOError):
        Listener().accept()
    with pytest.raises(BlockingIOError):
        read(Line(1))
