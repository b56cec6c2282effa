"""Metrics are served to valid requests, and other requests do no harm."""

from __future__ import annotations

import asyncio
import socket

import pytest
from prometheus_client import CollectorRegistry, Counter

from rallypoint.rpc.endpoint import EndpointError, ServiceStartError
from rallypoint.serving import metrics
from rallypoint.serving.metrics import parse_metrics_address, serve_metrics
from support.waiting import PATIENCE


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("things", "Counted.", registry=registry).inc(3)
    return registry


async def _ask(address: str, request: str, *, more: bool = False) -> tuple[str, str, str]:
    """Return status line, headers and body of the response; `more`: send the request without its end."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.replace("\n", "\r\n").encode() + (b"" if more else b"\r\n\r\n"))
    answer = (await asyncio.wait_for(reader.read(), PATIENCE)).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    first, _, headers = head.partition("\r\n")
    return first, headers, body


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """Return the remaining bytes of a connection that the other end closes or resets."""
    try:
        return await asyncio.wait_for(reader.read(), PATIENCE)
    except ConnectionResetError:
        return b""


async def test_metrics_are_in_the_requested_format() -> None:
    """Prometheus requests OpenMetrics; curl requests no particular format."""
    async with serve_metrics("127.0.0.1:0", _registry()) as address:
        first, headers, body = await _ask(address, "GET /metrics HTTP/1.1\nHost: here")
        assert first == "HTTP/1.1 200 OK"
        assert "Content-Type: text/plain" in headers
        assert f"Content-Length: {len(body.encode())}" in headers
        assert "things_total 3.0" in body
        accept = "Accept: application/openmetrics-text; version=1.0.0"
        _, headers, body = await _ask(address, f"GET /metrics?x=1 HTTP/1.1\nHost: here\n{accept}")
        assert "application/openmetrics-text" in headers
        assert body.endswith("# EOF\n")
        _, headers, body = await _ask(address, "HEAD /metrics HTTP/1.1\nHost: here")
        assert body == ""
        assert "Content-Length: 0" not in headers


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("POST /metrics HTTP/1.1", "405 Method Not Allowed"),
        ("GET /secrets HTTP/1.1", "404 Not Found"),
        ("\x00\x01\x02", "405 Method Not Allowed"),
    ],
)
async def test_nothing_else_is_served(request_line: str, status: str) -> None:
    """Metrics can be read; nothing can be changed, and there is nothing else."""
    async with serve_metrics("127.0.0.1:0", _registry()) as address:
        assert (await _ask(address, request_line))[0] == f"HTTP/1.1 {status}"


async def test_a_client_with_an_endless_or_no_request_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next client is served."""
    monkeypatch.setattr(metrics, "_TIMEOUT", 0.1)
    async with serve_metrics("127.0.0.1:0", _registry()) as address:
        assert await _ask(address, "GET /metrics HTTP/1.1", more=True) == ("", "", "")
        assert await _ask(address, "x" * 100_000, more=True) == ("", "", "")
        monkeypatch.undo()
        assert (await _ask(address, "GET /metrics HTTP/1.1"))[0].endswith("200 OK")


async def test_the_number_of_idle_connections_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a descriptor that the process needs for its own work."""
    monkeypatch.setattr(metrics, "_MOST_AT_ONCE", 2)
    monkeypatch.setattr(metrics, "_TIMEOUT", 3600.0)
    async with serve_metrics("127.0.0.1:0", _registry()) as address:
        host, _, port = address.rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await _rest(reader) == b""
        for _, each in [*idle, (reader, writer)]:
            each.close()


async def test_the_end_waits_for_no_connection() -> None:
    """An agent whose job is over exits, also with connections open."""
    async with serve_metrics("127.0.0.1:0", _registry()) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /met")
        await writer.drain()
    assert await _rest(reader) == b""
    writer.close()


async def test_a_port_in_use_is_reported_in_one_line() -> None:
    """The error comes before anything runs."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ServiceStartError, match=rf"^--metrics-address 127.0.0.1:{port}: can't listen there: "
        ):
            async with serve_metrics(f"127.0.0.1:{port}", _registry()):
                pass


@pytest.mark.parametrize("text", ["nonsense", "host:", "host:http", "127.0.0.1:70000", "unix:/run/x:1"])
async def test_an_invalid_address_is_reported_in_one_line(text: str) -> None:
    """The error states the expected form."""
    with pytest.raises(EndpointError):
        async with serve_metrics(text, _registry()):
            pass


def test_an_address_without_a_host_is_this_machine_alone() -> None:
    """Plaintext leaves the machine only if a setting allows it."""
    assert str(parse_metrics_address(":9400")) == "127.0.0.1:9400"
    assert not parse_metrics_address("0.0.0.0:9400").loopback
