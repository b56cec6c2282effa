"""A worker process's connection to its agent, for timers. It never raises, and never waits for long.

Whatever goes wrong, the worker goes on unguarded. The agent takes the end of a connection for the end of all its
timers, so giving a connection up accuses nobody.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable

from rallypoint.timer import wire

# A socket's queue is bounded by bytes, overhead included. This is the most that an unprivileged process gets by
# default; the kernel doubles it. It holds some 500 messages, so an agent may look away for a while.
_SEND_BUFFER = 212_992
# After a failure, the next connection is tried this many seconds later, then twice that, up to the maximum.
# A dead agent thus costs one failed system call every five seconds.
_RETRY_FIRST = 0.1
_RETRY_MOST = 5.0
# A connection that lived this many seconds was no failure: the next one is tried at once.
_LIVED = 1.0

# Of the process, not of a connection: what is released after a reconnect or a fork can't hit another's timer.
_tokens = itertools.count(1)


class _Link:
    """An open connection. It is closed when the last thread lets go of it.

    Closing it earlier could hand its descriptor number to another file while a thread is about to send on it.
    """

    __slots__ = ("_socket", "opened_at", "send")

    def __init__(self, connected: socket.socket, opened_at: float) -> None:
        self._socket = connected
        self.opened_at = opened_at
        self.send: Callable[[bytes, int], int] = connected.send

    def shut(self) -> None:
        """Tells the agent that this is the end, whoever else holds the connection."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The agent was first.
            return

    def close(self) -> None:
        """Lets go of the descriptor and leaves the connection to whoever else holds it."""
        self._socket.close()

    def __del__(self) -> None:
        self._socket.close()


class Uplink:
    """Timers of this process, and the connection that carries them. Any thread may use it."""

    def __init__(self, path: str, patience: float) -> None:
        """Makes an uplink that connects when it is first used.

        Args:
            path: the agent's socket.
            patience: most seconds to wait for an agent that doesn't read.
        """
        self._path = path
        self._patience = patience
        self._begin()

    def _begin(self) -> None:
        self._link: _Link | None = None
        self._connecting = threading.Lock()
        # What this process holds, by token, as the message that a new connection is told it with.
        self._held: dict[int, bytes] = {}
        self._retry_at = 0.0
        self._retry_delay = _RETRY_FIRST

    def acquire(self, after: float, scope: bytes) -> int:
        """Starts a timer of `after` seconds; returns the token to release it with."""
        token = next(_tokens)
        message = self._held[token] = wire.acquire(token, time.monotonic_ns(), after, scope)
        try:
            link = self._link
            if link is None or not self._send(link, message):
                self._reconnect(message)
        except BaseException:
            # A signal handler raised: the block is not entered, and nobody would release this.
            self.release(token)
            raise
        return token

    def release(self, token: int) -> None:
        """Ends a timer. Harmless for one that this process doesn't hold, such as its parent's."""
        # The order matters, see _open.
        if self._held.pop(token, None) is None:
            return
        link = self._link
        if link is None:
            return
        try:
            self._send(link, wire.release(token))
        except BaseException:
            # A signal handler raised, and nobody releases this again. Rather no timer than one too many.
            self._give_up(link, lived=_LIVED)
            raise

    def after_fork(self) -> None:
        """In a forked child: lets go of the parent's connection and timers. The child connects for itself."""
        link = self._link
        self._begin()
        if link is not None:
            # Not shut(): the connection is still the parent's.
            link.close()

    def close(self) -> None:
        """Ends all timers and the connection."""
        self._held.clear()
        link = self._link
        if link is not None:
            self._give_up(link, lived=_LIVED)

    def _send(self, link: _Link, message: bytes) -> bool:
        try:
            link.send(message, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            # The agent did not read for as long as we may wait: no use in connecting again at once.
            self._give_up(link, lived=0.0)
            return False
        except OSError:
            self._give_up(link, lived=time.monotonic() - link.opened_at)
            return False
        return True

    def _give_up(self, link: _Link, lived: float) -> None:
        link.shut()
        if self._link is link:
            self._link = None
            self._failed(lived)

    def _failed(self, lived: float) -> None:
        if lived >= _LIVED:
            self._retry_delay = _RETRY_FIRST
            self._retry_at = 0.0
            return
        self._retry_at = time.monotonic() + self._retry_delay
        self._retry_delay = min(self._retry_delay * 2, _RETRY_MOST)

    def _reconnect(self, message: bytes) -> None:
        if time.monotonic() < self._retry_at:
            return
        # Bounded, because a signal handler may have interrupted the very thread that connects.
        if not self._connecting.acquire(timeout=self._patience):
            return
        try:
            if self._link is not None:
                self._send(self._link, message)
            elif time.monotonic() >= self._retry_at:
                self._open()
        finally:
            self._connecting.release()

    def _open(self) -> None:
        """Connects and tells what is held.

        A release that another thread makes meanwhile must not be lost, or its worker is accused. It takes the
        timer out of `_held` first and looks for the link second; here the link is published first and `_held`
        is looked at second. So one of the two sends the release; if both do, that is harmless.
        """
        told = list(self._held.items())
        try:
            link = _connect(self._path, self._patience)
            for _, message in told:
                link.send(message, socket.MSG_NOSIGNAL)
        except (OSError, ValueError):
            # ValueError: a path with a zero byte, which no agent listens on.
            self._failed(lived=0.0)
            return
        self._link = link
        for token, _ in told:
            if token not in self._held:
                self._send(link, wire.release(token))


def _connect(path: str, patience: float) -> _Link:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = _Link(connected, time.monotonic())
    # The kernel bounds how long connecting and sending wait; that costs no further system call.
    seconds, fraction = divmod(patience, 1)
    limit = struct.pack("@ll", int(seconds), int(fraction * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    connected.connect(path)
    return link
