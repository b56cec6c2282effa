"""Sockets between worker processes and their agent, as the kernel keeps them: ordered, lossless, and quick.

The agent's end is used by the product's `TimerSocket` through what it asks of a socket and of an event loop.
Descriptors that travel are real ones, of real memory: what is mapped and refused is up to the product and the kernel.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from simulation.clockwork import Process

_Ancillary = list[tuple[int, int, bytes]]
_CREDENTIALS = struct.Struct("3i")
_DESCRIPTOR = struct.Struct("i")


class Source(Protocol):
    """What a process may wait for."""

    wake: Callable[[], None]

    @property
    def readable(self) -> bool:
        """Whether there is something to read."""


class ReadingProcess(Process):
    """A process whose loop waits for sockets, too; level-triggered, as asyncio's."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._readers: dict[Source, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self._due: set[Source] = set()

    def add_reader(self, source: Source, callback: Callable[..., object], *args: Any) -> None:
        self._readers[source] = (callback, args)
        source.wake = lambda: self._is_due(source)
        self._is_due(source)

    def remove_reader(self, source: Source) -> bool:
        return self._readers.pop(source, None) is not None

    def _is_due(self, source: Source) -> None:
        if source in self._readers and source.readable and source not in self._due:
            self._due.add(source)
            self.call_soon(self._arrived, source)

    def _arrived(self, source: Source) -> None:
        self._due.discard(source)
        if source in self._readers and source.readable:
            callback, args = self._readers[source]
            callback(*args)
            self._is_due(source)


class Listener:
    """The socket at which workers knock."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = _nobody
        self._waiting: deque[Line] = deque()

    @property
    def readable(self) -> bool:
        return bool(self._waiting)

    def knock(self, line: Line) -> None:
        """A process connects."""
        self._waiting.append(line)
        self.wake()

    def accept(self) -> tuple[Line, str]:
        if not self._waiting:
            raise BlockingIOError
        return self._waiting.popleft(), ""


class Line:
    """A connection. What the worker's end sends waits until the agent reads it, whatever becomes of the sender."""

    type = socket.SOCK_SEQPACKET

    def __init__(self, pid: int) -> None:
        self.wake: Callable[[], None] = _nobody
        self._pid = pid
        self._waiting: deque[tuple[bytes, int | None]] = deque()
        self._ended = False
        self._closed = False

    # ---- the worker's end

    def send(self, message: bytes, descriptor: int | None = None) -> None:
        """Put a message in; nothing happens if the agent has closed it."""
        if not self.over:
            self._waiting.append((message, descriptor))
            self.wake()

    def end(self) -> None:
        """Close it."""
        self._ended = True
        self.wake()

    @property
    def over(self) -> bool:
        """Whether one end is closed."""
        return self._ended or self._closed

    @property
    def unread(self) -> int:
        """How many messages wait."""
        return len(self._waiting)

    # ---- the agent's end

    @property
    def readable(self) -> bool:
        return bool(self._waiting) or self._ended

    def recvmsg(self, size: int, ancillary: int, flags: int) -> tuple[bytes, _Ancillary, int, None]:
        if self._waiting:
            message, descriptor = self._waiting.popleft()
            if descriptor is None:
                return message, [], 0, None
            copy = _DESCRIPTOR.pack(os.dup(descriptor))
            return message, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, copy)], 0, None
        if self._ended:
            return b"", [], 0, None
        raise BlockingIOError

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """See socket: who the peer is."""
        return _CREDENTIALS.pack(self._pid, 0, 0)

    def setblocking(self, flag: bool) -> None:
        """See socket."""

    def close(self) -> None:
        self._closed = True


def _nobody() -> None:
    """Nobody waits for it."""
