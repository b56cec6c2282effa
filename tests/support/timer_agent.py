"""The agent's end of the timer socket, as bare as it can be, for tests of what workers send."""

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
        # Of the table that came with the last TABLE.
        self.table: table.TableReader
        self.view: memoryview

    def receive(self) -> wire.Message | None:
        """The next message; None at the end."""
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
        """All messages that wait."""
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
        """What the table's process is in."""
        return sorted(slot.scope.decode() for slot in self.table.slots())

    def close(self) -> None:
        """Ends it."""
        self.socket.close()


class Agent:
    """Listens."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.path)
        self.listener.listen(1024)
        self.listener.settimeout(PATIENCE)
        self.connections: list[Connection] = []

    def accept(self) -> Connection:
        """The next connection, its first message unread."""
        self.connections.append(Connection(self.listener.accept()[0]))
        return self.connections[-1]

    def welcome(self) -> Connection:
        """The next connection, with its table."""
        connection = self.accept()
        assert connection.receive() == wire.TableMessage()
        return connection

    def close(self) -> None:
        """Ends it all."""
        for connection in self.connections:
            connection.close()
        self.listener.close()
