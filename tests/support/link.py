"""A TCP proxy for connections from one host to another, which can stop or slow down their traffic."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

# Bytes forwarded at a time over a slow link: few, so that the rate is even.
_PIECE = 4096
_CHUNK = 1 << 16


class Link:
    """Forwards data between a service and its clients.

    Data sent during a partition waits, as with a TCP that retransmits until the network heals: neither end sees its
    connection close, and new connections wait as well.

    Attributes:
        address: The address on which it listens, `host:port`; known once it is open.
        kilobits: Its rate in kilobits per second, each way; 0: no limit.
    """

    def __init__(self, target: str) -> None:
        """Forward to the service at `target`, a `host:port`."""
        self.address = ""
        self.kilobits = 0
        self._target = target
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.open("127.0.0.1")
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def open(self, host: str) -> None:
        """Listen on a free port of an address."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        there, port = self._server.sockets[0].getsockname()
        self.address = f"{there}:{port}"

    async def close(self) -> None:
        """Close it and all its connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def part(self) -> None:
        """Deliver nothing from now on."""
        self._whole.clear()

    def heal(self) -> None:
        """Deliver everything from now on, at full speed, including the data that has waited."""
        self.kilobits = 0
        self._whole.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ends = [writer]
        try:
            await self._whole.wait()
            host, _, port = self._target.rpartition(":")
            there = await asyncio.open_connection(host, int(port))
            ends.append(there[1])
            ways = [
                asyncio.create_task(self._pass_on(*way)) for way in ((reader, there[1]), (there[0], writer))
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the client sees its connection close
        finally:
            for end in ends:
                end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE if self.kilobits else _CHUNK):
                await self._whole.wait()
                if self.kilobits:
                    await asyncio.sleep(len(data) * 8 / (1000 * self.kilobits))
                writer.write(data)
                await writer.drain()
            await self._whole.wait()
