"""A channel connects only to its endpoint, finds a restarted server again, and refuses an invalid endpoint."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from rallypoint.rpc.channel import CLIENT_ARGUMENTS, open_channel
from rallypoint.rpc.endpoint import EndpointError, ServerOptions
from rallypoint.serving.server import SERVER_ARGUMENTS
from support.refusals import refusal
from support.waiting import PATIENCE

Start = Callable[..., Any]
METHOD = "/tiny.v1.TinyService/Echo"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def echo(request: bytes, _context: Any) -> bytes:
    return request


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")

HANDLERS: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}


def test_an_invalid_endpoint_opens_no_channel() -> None:
    with pytest.raises(EndpointError, match="no port"):
        open_channel("localhost")


def test_the_server_permits_the_pings_that_clients_send() -> None:
    client, server = dict(CLIENT_ARGUMENTS), dict(SERVER_ARGUMENTS)
    permitted = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert permitted * 2 <= client["grpc.keepalive_time_ms"]
    assert server["grpc.keepalive_permit_without_calls"] == 1


@needs_ipv6
async def test_ipv6_works(serve: Start, connect: Start) -> None:
    server = await serve(HANDLERS, options=ServerOptions(host="::1"))
    assert server.address.startswith("[::1]:")
    assert await connect(server).unary_unary(METHOD)(b"over six", timeout=PATIENCE) == b"over six"


async def test_a_name_works(serve: Start, connect: Start) -> None:
    server = await serve(HANDLERS, options=ServerOptions(host="localhost"))
    assert server.address.startswith("localhost:")
    assert await connect(server).unary_unary(METHOD)(b"by name", timeout=PATIENCE) == b"by name"


async def test_no_proxy_stands_between(serve: Start, connect: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server = await serve(HANDLERS, options=ServerOptions(host="localhost"))
    assert await connect(server).unary_unary(METHOD)(b"direct", timeout=PATIENCE) == b"direct"


async def test_a_restarted_server_is_found_again(serve: Start, connect: Start) -> None:
    server = await serve(HANDLERS)
    call = connect(server).unary_unary(METHOD)
    assert await call(b"one", timeout=PATIENCE) == b"one"
    await server.stop()
    assert (await refusal(call(b"two", timeout=PATIENCE))).code is grpc.StatusCode.UNAVAILABLE
    port = int(server.address.rpartition(":")[2])
    await serve(HANDLERS, options=dataclasses.replace(ServerOptions(), port=port))
    assert await call(b"three", timeout=PATIENCE, wait_for_ready=True) == b"three"


async def test_a_goaway_at_the_start_ends_the_call() -> None:
    """It is not retried on that very connection for as long as it is open, with unbounded memory."""
    settings, goaway = "000000040000000000", "000008070000000000" + "00000000" + "0000000b"

    async def send_goaway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes.fromhex(settings + goaway))
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(send_goaway, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    async with listener, open_channel(f"{host}:{port}") as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
        assert (await refusal(call(b"", timeout=20))).code is grpc.StatusCode.UNAVAILABLE


async def test_two_channels_share_no_connection(serve: Start, connect: Start) -> None:
    peers = set()

    async def peer(_request: bytes, context: Any) -> bytes:
        peers.add(context.peer())
        return b""

    server = await serve({"Echo": grpc.unary_unary_rpc_method_handler(peer)})
    await asyncio.gather(*(connect(server).unary_unary(METHOD)(b"", timeout=PATIENCE) for _ in range(3)))
    assert len(peers) == 3


async def test_a_message_past_the_limit_is_refused_as_such(serve: Start, connect: Start) -> None:
    async def much(_request: bytes, _context: Any) -> bytes:
        return bytes(5 * 1024 * 1024)

    server = await serve({**HANDLERS, "Much": grpc.unary_unary_rpc_method_handler(much)})
    channel = connect(server)
    for method, request in ((METHOD, bytes(5 * 1024 * 1024)), ("/tiny.v1.TinyService/Much", b"")):
        assert (
            await refusal(channel.unary_unary(method)(request, timeout=PATIENCE))
        ).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    nearly = bytes(4 * 1024 * 1024 - 1024)
    assert await channel.unary_unary(METHOD)(nearly, timeout=PATIENCE) == nearly


async def test_a_subscriber_that_stops_reading_makes_its_server_queue_little(
    serve: Start, connect: Start
) -> None:
    written = 0

    async def pour(_request: bytes, context: Any) -> None:
        nonlocal written
        while written < 2_000_000:
            try:
                async with asyncio.timeout(1):
                    await context.write(bytes(1000))
            except TimeoutError:
                return
            written += 1000

    server = await serve({"Pour": grpc.unary_stream_rpc_method_handler(pour)})
    call = connect(server).unary_stream("/tiny.v1.TinyService/Pour")(b"", timeout=PATIENCE)
    await call.initial_metadata()
    await server.drain(20)
    assert written < 200_000
    call.cancel()
