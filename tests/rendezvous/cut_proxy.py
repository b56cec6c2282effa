"""A TCP proxy that can cut its connections, or drop the bytes of one direction."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self


class CutProxy:
    """Forwards bytes between clients and a server.

    Attributes:
        address: The `host:port` on which it listens.
        swallowed: Bytes of the client that did not reach the server.
        kept_back: Bytes of the server that did not reach the client.
    """

    def __init__(self, target: str) -> None:
        """Forward to `target`, a `host:port`."""
        self._target = target
        self.address = ""
        self.swallowed = self.kept_back = 0
        self._swallowing = self._keeping_back = self._refusing = False
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def swallow(self) -> None:
        """Drop all bytes of the client from now on."""
        self._swallowing, self.swallowed = True, 0

    def keep_back(self) -> None:
        """Drop all bytes of the server from now on."""
        self._keeping_back, self.kept_back = True, 0

    def refuse(self) -> None:
        """Cut all connections, and every new one at once."""
        self._refusing = True
        self.cut()

    def heal(self) -> None:
        """Forward everything again, on new connections."""
        self._swallowing = self._keeping_back = self._refusing = False

    def cut(self) -> None:
        """Abort all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        current = asyncio.current_task()
        assert current is not None
        self._tasks.add(current)
        current.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError):
            if self._refusing:
                writer.transport.abort()
                return
            host, _, port = self._target.rpartition(":")
            there = await asyncio.open_connection(host, int(port))
            self._writers |= {writer, there[1]}
            try:
                await asyncio.gather(self._upward(reader, there[1]), self._downward(there[0], writer))
            finally:
                for end in (writer, there[1]):
                    end.transport.abort()
                    self._writers.discard(end)

    async def _upward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self._swallowing:
                self.swallowed += len(data)
            else:
                writer.write(data)
        writer.transport.abort()

    async def _downward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self._keeping_back:
                self.kept_back += len(data)
            else:
                writer.write(data)
        writer.transport.abort()
