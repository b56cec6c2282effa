"""A minimal agent's end of the timer socket, for tests of the messages that workers send."""

from __future__ import annotations

import mmap
import os
import socket
from pathlib import Path

from rallypoint.timer.worker import table, wire
from support.waiting import PATIENCE


class Connection:
    """A worker process's connection."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(PATIENCE)
        self.socket = connected
        # The table that came with the last TABLE message.
        self.table: table.TableReader
        self.view: memoryview

    def receive(self) -> wire.Message | None:
        """Return the next message; None at the end of the connection."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.socket, 1000, 4)
        except ConnectionResetError:
            return None
        for descriptor in descriptors:
            self.view = memoryview(mmap.mmap(descriptor, table.SIZE))
            self.table = table.TableReader(self.view)
            os.close(descriptor)
        return wire.decode(message) if message else None

    def waiting(self) -> list[wire.Message]:
        """Return all messages that wait in the socket."""
        messages: list[wire.Message] = []
        self.socket.setblocking(False)
        try:
            while (message := self.receive()) is not None:
                messages.append(message)
        except BlockingIOError:
            pass
        self.socket.settimeout(PATIENCE)
        return messages

    def scopes(self) -> list[str]:
        """Return the scopes that the table's process is in."""
        return sorted(slot.scope.decode() for slot in self.table.slots())

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


class Agent:
    """A listening socket, and the connections that it has accepted."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.path)
        self.listener.listen(1024)
        self.listener.settimeout(PATIENCE)
        self.connections: list[Connection] = []

    def accept(self) -> Connection:
        """Return the next connection, its first message unread."""
        self.connections.append(Connection(self.listener.accept()[0]))
        return self.connections[-1]

    def welcome(self) -> Connection:
        """Return the next connection, with its table."""
        connection = self.accept()
        assert connection.receive() == wire.TableMessage()
        return connection

    def close(self) -> None:
        """Close all connections, and stop listening."""
        for connection in self.connections:
            connection.close()
        self.listener.close()
