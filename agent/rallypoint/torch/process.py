"""The companion process of a torch program, as seen by that program; `rallypoint.torch.companion` is its own side."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

ERRORS: Mapping[str, type[Exception]] = {
    "closed": RendezvousClosedError,
    "connection": RendezvousConnectionError,
    "graceful": RendezvousGracefulExitError,
    "setting": ValueError,
    "state": RendezvousStateError,
    "timeout": RendezvousTimeoutError,
}
"""torch's exceptions, by the names that the companion has for the end of a membership."""

START_TIMEOUT = 60.0
"""Seconds that a companion gets to start. It takes one on an idle machine; a cold network disk takes more."""

SLACK = 2.0
"""Seconds beyond a time limit of the companion for the same wait."""

_COMPANION = "rallypoint.torch.companion"
# Seconds that the companion gets to end by itself.
_END_TIMEOUT = 5.0


class CompanionProcess:
    """A companion, and our end of the socket to it. Forks of this process can't use it."""

    def __init__(self) -> None:
        """Start it.

        Raises:
            RendezvousConnectionError: It can't be started.
        """
        self._pid = os.getpid()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        # Of its own, because it has a time limit.
        self._sending = self._socket.dup()
        self._sending.settimeout(SLACK)
        self._received = b""
        self._lock = threading.Lock()
        with theirs:
            try:
                # In its own session: signals of the terminal don't reach it.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _COMPANION, str(theirs.fileno()), str(self._pid)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                self._close()
                raise RendezvousConnectionError(f"can't start Rallypoint's companion: {error}") from error

    @property
    def is_ours(self) -> bool:
        """False in a fork of the process that started it."""
        return os.getpid() == self._pid

    def send(self, do: str, **fields: object) -> None:
        """Send a message.

        Raises:
            RendezvousConnectionError: The process is dead, or reads nothing.
        """
        line = json.dumps({"do": do, **fields}).encode() + b"\n"
        try:
            with self._lock:
                self._sending.sendall(line)
        except OSError as error:
            raise self._lost() from error

    def receive(self, timeout: float | None) -> list[dict[str, Any]]:
        """Return the messages that have arrived, after a wait of at most `timeout` seconds for the first one.

        Raises:
            RendezvousConnectionError: The process is dead.
        """
        poll = select.poll()
        deadline = None if timeout is None else time.monotonic() + timeout
        messages: list[dict[str, Any]] = []
        try:
            poll.register(self._socket, select.POLLIN)
            while not messages:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not poll.poll(None if left is None else 1000 * left):
                    break
                messages = self._read()
        except (OSError, ValueError) as error:  # ValueError: the socket is closed
            raise self._lost() from error
        return messages

    def _read(self) -> list[dict[str, Any]]:
        with self._lock:
            try:
                piece = self._socket.recv(1 << 16)
            except BlockingIOError:  # another thread was faster
                return []
            if not piece:
                raise self._lost()
            *lines, self._received = (self._received + piece).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """End the process: as after the death of this one, it releases all that it has, and leaves no run."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a fork of this process may still have the socket
        self._close()
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close(self) -> None:
        self._socket.close()
        self._sending.close()

    def _lost(self) -> RendezvousConnectionError:
        code = self._process.poll()
        state = "is silent" if code is None else f"ended with {code}"
        return RendezvousConnectionError(f"Rallypoint's companion {state}; its log has more")
