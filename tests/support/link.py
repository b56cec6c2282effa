"""A TCP proxy for one way between two hosts: held up while they are parted, slow while their link is."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

# What is passed on at a time over a slow link, so that its pace is even. Bytes.
_PIECE = 4096
_CHUNK = 1 << 16


class Link:
    """Passes on what clients of a service say, and what it answers.

    What is said while hosts are parted waits, as it would with a TCP that sends it again until the network heals;
    nobody is told of an end, and whoever connects meanwhile waits as well.

    Attributes:
        address: Where it listens, as `host:port`; known once it is open.
        kilobits: How many it carries a second, each way; 0: as many as come.
    """

    def __init__(self, target: str) -> None:
        """Stand before a service, a `host:port`."""
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
        """Listen at an address, at a free port."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        there, port = self._server.sockets[0].getsockname()
        self.address = f"{there}:{port}"

    async def close(self) -> None:
        """End it and all its connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def part(self) -> None:
        """From now on nothing arrives."""
        self._whole.clear()

    def heal(self) -> None:
        """From now on everything arrives, at full speed; also what was said meanwhile."""
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
            pass  # who was connected sees its end
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
