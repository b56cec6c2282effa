"""Sockets between worker processes and their agent, like the kernel's: ordered, lossless, and fast.

The product's `TimerSocket` uses the agent's end through the methods of a socket and of an event loop. The descriptors
that are sent are real, of real memory: the product and the kernel map or refuse them.
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
    """A source that a process may wait for."""

    wake: Callable[[], None]

    @property
    def readable(self) -> bool:
        """True if there is something to read."""


class ReadingProcess(Process):
    """A process whose loop also waits for sockets; level-triggered, like asyncio's."""

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
    """The listening socket of the agent, to which workers connect."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = _do_nothing
        self._waiting: deque[Line] = deque()

    @property
    def readable(self) -> bool:
        return bool(self._waiting)

    def knock(self, line: Line) -> None:
        """Connect a process."""
        self._waiting.append(line)
        self.wake()

    def accept(self) -> tuple[Line, str]:
        if not self._waiting:
            raise BlockingIOError
        return self._waiting.popleft(), ""


class Line:
    """A connection. Messages of the worker's end wait until the agent reads them, even if the sender dies."""

    type = socket.SOCK_SEQPACKET

    def __init__(self, pid: int) -> None:
        self.wake: Callable[[], None] = _do_nothing
        self._pid = pid
        self._waiting: deque[tuple[bytes, int | None]] = deque()
        self._ended = False
        self._closed = False

    # ---- the worker's end

    def send(self, message: bytes, descriptor: int | None = None) -> None:
        """Send a message; it is dropped if an end is closed."""
        if not self.over:
            self._waiting.append((message, descriptor))
            self.wake()

    def end(self) -> None:
        """Close the worker's end."""
        self._ended = True
        self.wake()

    @property
    def over(self) -> bool:
        """True if one end is closed."""
        return self._ended or self._closed

    @property
    def unread(self) -> int:
        """The number of waiting messages."""
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
        """Return the credentials of the peer, as a socket does for SO_PEERCRED."""
        return _CREDENTIALS.pack(self._pid, 0, 0)

    def setblocking(self, flag: bool) -> None:
        """Do nothing: the socket never blocks."""

    def close(self) -> None:
        self._closed = True


def _do_nothing() -> None:
    """Do nothing: no process waits."""
