"""Metrics for Prometheus over HTTP, for any process that is started with `--metrics-address`.

Served on the process's own event loop: prometheus_client's server polls for its end twice a second in its own thread,
and looks up its name in DNS before it serves, which takes seconds on a cluster without DNS.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from rallypoint.rpc.endpoint import Endpoint, EndpointError, ServiceStartError, listening_endpoint
from rallypoint.rpc.logs import get_logger

if TYPE_CHECKING:
    # Costs 50 ms to load, and a process without metrics does not need it.
    from prometheus_client import CollectorRegistry

_TIMEOUT = 10.0  # timeout for a request and its response together, seconds
_MOST_AT_ONCE = 32  # requests in progress; a scraper makes one, a broken one many
_LARGEST_REQUEST = 16 * 1024  # bytes

# Its own logger name: an agent hides the logs of the services inside it, but shows the address of its metrics.
_log = get_logger("rallypoint.metrics")


def parse_metrics_address(text: str) -> Endpoint:
    """Parse a value of `--metrics-address`: HOST:PORT, or :PORT for 127.0.0.1; port 0 for any free one.

    Raises:
        EndpointError: The value is not valid.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise EndpointError(f"--metrics-address: {text!r} is not of the form HOST:PORT, as in 127.0.0.1:9400")
    return listening_endpoint(host or "127.0.0.1", int(port))


@asynccontextmanager
async def serve_metrics(text: str, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serve a registry at /metrics for as long as the context lasts; yield the address, as host:port.

    In plaintext, to every client that can reach the address; the metrics are read-only.

    Raises:
        EndpointError: The address is not valid.
        ServiceStartError: The server cannot listen there; one line.
    """
    endpoint = parse_metrics_address(text)
    if endpoint.path is not None:
        raise EndpointError(f"--metrics-address: {text!r} is a socket in a file; expected HOST:PORT")
    exposition = _Exposition(registry)
    try:
        server = await asyncio.start_server(
            exposition.answer, endpoint.host, endpoint.port, limit=_LARGEST_REQUEST
        )
    except OSError as error:
        # asyncio repeats the address in its text; for a host name, only the resolver's text has the reason.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror or str(error)
        raise ServiceStartError(f"--metrics-address {text}: can't listen there: {reason}") from None
    port: int = server.sockets[0].getsockname()[1]
    address = str(Endpoint(endpoint.host, port))
    if not endpoint.loopback:
        _log.info("metrics are readable by every client that can reach this address", address=address)
    _log.info("metrics ready", metrics=f"http://{address}/metrics")
    try:
        yield address
    finally:
        server.close()
        exposition.cancel()
        await server.wait_closed()


class _Exposition:
    """Replies to requests, one on each connection."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._under_way: set[asyncio.Task[None]] = set()

    def cancel(self) -> None:
        for task in self._under_way:
            task.cancel()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is served by a task"
        if len(self._under_way) >= _MOST_AT_ONCE:
            writer.transport.abort()
            return
        self._under_way.add(task)
        try:
            # The client may disconnect at any time, or send nothing.
            with suppress(
                OSError,
                TimeoutError,
                asyncio.IncompleteReadError,
                asyncio.LimitOverrunError,
                asyncio.CancelledError,
            ):
                async with asyncio.timeout(_TIMEOUT):
                    request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._response(request.decode("latin-1")))
                    await writer.drain()
        finally:
            self._under_way.discard(task)
            writer.close()

    def _response(self, request: str) -> bytes:
        first, *lines = request.split("\r\n")
        method, _, rest = first.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _message("405 Method Not Allowed", "text/plain", b"metrics are read-only: use GET\n")
        if path not in ("/metrics", "/"):
            return _message("404 Not Found", "text/plain", b"metrics are at /metrics\n")
        # Imported on the first request; creating the registry has loaded most of it.
        from prometheus_client.exposition import choose_encoder  # noqa: PLC0415

        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        encode, kind = choose_encoder(headers.get("accept", ""))
        body = encode(self._registry)
        return _message("200 OK", kind, body, without_body=method == "HEAD")


def _message(status: str, kind: str, body: bytes, *, without_body: bool = False) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (b"" if without_body else body)
