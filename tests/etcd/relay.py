"""A place between a client and a member that can stop passing anything on, without a word to either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Relay:
    """Passes bytes on both ways while it is open."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()
        self.endpoint = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.endpoint = f"{host}:{port}"

    def cut(self) -> None:
        """Pass nothing on from now."""
        self._open.clear()

    def mend(self) -> None:
        """Pass on again, also what came meanwhile."""
        self._open.set()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._passing:
            task.cancel()
        if self._passing:
            await asyncio.wait(self._passing)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._relay(reader, writer))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        ways: list[asyncio.Task[None]] = []
        with suppress(OSError):
            try:
                far_reader, far_writer = await asyncio.open_connection(*self._to)
                ends.append(far_writer)
                ways = [
                    asyncio.create_task(self._pass(reader, far_writer)),
                    asyncio.create_task(self._pass(far_reader, writer)),
                ]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                if ways:
                    await asyncio.wait(ways)
                for end in ends:
                    end.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                await self._open.wait()
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def relay_to(endpoint: str) -> AsyncIterator[Relay]:
    """A relay that ends with its block."""
    host, _, port = endpoint.rpartition(":")
    relay = Relay(host, int(port))
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()
