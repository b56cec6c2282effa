"""A client that calls too often, or holds too many streams, is refused with the time to wait; others never notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.rpc.errors import ServiceError, decode
from rallypoint.serving.flow import Rate, Turns
from rallypoint.serving.interceptor import CallInterceptor
from rallypoint.serving.server import Registration, Server
from support.clock import Clock
from support.refusals import refusal
from support.waiting import PATIENCE

SERVICE = "tiny.v1.TinyService"
METHOD = f"/{SERVICE}/Do"


@asynccontextmanager
async def served(handler: Any, clock: Clock, **rates: Any) -> AsyncIterator[Any]:
    """A bare server with the interceptor, and a channel to it."""
    calls = CallInterceptor(lambda error: None, clock=clock, **rates)
    server = grpc.aio.server(interceptors=[calls])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Do": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def echo(request: bytes, context: Any) -> bytes:
    """Reply with the request."""
    return request


async def echo_each(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    """Reply to each message with itself."""
    async for request in requests:
        yield request


async def test_calls_past_the_rate_are_refused_until_it_is_time() -> None:
    """The refusal has the reason, and RetryInfo with the right time."""
    clock = Clock()
    handler: Any = grpc.unary_unary_rpc_method_handler(echo)
    async with served(handler, clock, request_rate=Rate(2, 3)) as channel:
        call = channel.unary_unary(METHOD)
        for _ in range(3):
            assert await call(b"x", timeout=PATIENCE) == b"x"
        error = await refusal(call(b"x", timeout=PATIENCE))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        assert error.retry_after == pytest.approx(0.5)
        clock.now += 0.5
        assert await call(b"x", timeout=PATIENCE) == b"x"


async def test_another_connection_of_the_same_host_is_the_same_client() -> None:
    """Otherwise a client could reconnect again and again."""
    clock = Clock()
    handler: Any = grpc.unary_unary_rpc_method_handler(echo)
    calls = CallInterceptor(lambda error: None, clock=clock, request_rate=Rate(1, 1))
    assert calls.excess("10.0.0.1") is None
    assert calls.excess("10.0.0.1") is not None
    assert calls.excess("10.0.0.2") is None
    async with served(handler, clock, request_rate=Rate(1, 1)) as channel:
        await channel.unary_unary(METHOD)(b"x", timeout=PATIENCE)
        assert (
            await refusal(channel.unary_unary(METHOD)(b"x", timeout=PATIENCE))
        ).reason == "TOO_MANY_REQUESTS"


async def test_bytes_past_the_rate_are_refused_until_it_is_time() -> None:
    """A request larger than the burst counts as the burst, or it would never be accepted."""
    clock = Clock()
    handler: Any = grpc.unary_unary_rpc_method_handler(echo)
    async with served(handler, clock, byte_rate=Rate(10, 100)) as channel:
        call = channel.unary_unary(METHOD)
        for size in (60, 40):
            await call(b"x" * size, timeout=PATIENCE)
        error = await refusal(call(b"x" * 5, timeout=PATIENCE))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        assert error.retry_after == pytest.approx(0.5)
        clock.now += 0.5
        await call(b"x" * 5, timeout=PATIENCE)
        clock.now += 10
        await call(b"x" * 1000, timeout=PATIENCE)
        assert (await refusal(call(b"x", timeout=PATIENCE))).retry_after == pytest.approx(0.1)


async def test_a_few_requests_of_a_client_are_handled_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose handler takes long, since it waits for a commit, does not count."""
    monkeypatch.setattr(Turns.__init__, "__defaults__", (0.5,))  # `hold`: this machine may be busy
    running, most, over = 0, 0, asyncio.Event()

    async def work(request: bytes, context: Any) -> bytes:
        nonlocal running, most
        if request == b"wait":
            await over.wait()
            return request
        running += 1
        most = max(most, running)
        for _ in range(20):
            await asyncio.sleep(0)
        running -= 1
        return request

    handler: Any = grpc.unary_unary_rpc_method_handler(work)
    async with served(handler, Clock()) as channel:
        call = channel.unary_unary(METHOD)
        waiting = [call(b"wait", timeout=PATIENCE) for _ in range(40)]
        await asyncio.gather(*(call(b"work", timeout=PATIENCE) for _ in range(200)))
        assert 1 < most <= 16
        over.set()
        await asyncio.gather(*waiting)


async def test_a_stream_counts_as_one_call_and_its_messages_by_themselves() -> None:
    """A node that uses only its stream never meets the rate of calls; a stream with too many messages is ended."""
    clock = Clock()
    handler: Any = grpc.stream_stream_rpc_method_handler(echo_each)
    rates = {"request_rate": Rate(1, 1), "message_rates": {SERVICE: Rate(10, 5)}}
    async with served(handler, clock, **rates) as channel:
        stream = channel.stream_stream(METHOD)(timeout=PATIENCE)
        for _ in range(50):
            clock.now += 0.1
            await stream.write(b"x")
            assert await stream.read() == b"x"
        for _ in range(4):
            await stream.write(b"x")
            assert await stream.read() == b"x"
        error = await refusal(stream.read())
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        assert error.retry_after == pytest.approx(1.0)


async def test_streams_of_other_services_are_not_metered() -> None:
    """An agent sends the timers of all its workers on one stream, without a limit."""
    clock = Clock()
    handler: Any = grpc.stream_stream_rpc_method_handler(echo_each)
    async with served(handler, clock, message_rates={"other.v1.OtherService": Rate(1, 1)}) as channel:
        stream = channel.stream_stream(METHOD)(timeout=PATIENCE)
        for _ in range(50):
            await stream.write(b"x")
            assert await stream.read() == b"x"
        stream.cancel()


async def hold_as_generator(request: bytes, context: Any) -> AsyncIterator[bytes]:
    """Reply, and end only with the client."""
    yield request
    await asyncio.Event().wait()


async def hold_as_writer(request: bytes, context: Any) -> None:
    """Do the same by writes."""
    await context.write(request)
    await asyncio.Event().wait()


@pytest.mark.parametrize("behaviour", [hold_as_generator, hold_as_writer])
async def test_one_client_holds_so_many_streams_and_no_more(behaviour: Any) -> None:
    """The next one is refused until one has ended, for any reason."""
    handler: Any = grpc.unary_stream_rpc_method_handler(behaviour)
    async with served(handler, Clock(), most_watches=2) as channel:
        call = channel.unary_stream(METHOD)
        held = [call(b"x", timeout=PATIENCE) for _ in range(2)]
        for each in held:
            assert await each.read() == b"x"
        error = await refusal(call(b"x", timeout=PATIENCE).read())
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS")
        assert error.metadata == {"limit": "2"}
        assert error.retry_after
        held.pop().cancel()
        async with asyncio.timeout(PATIENCE):
            while not held[1:]:
                another = call(b"x", timeout=PATIENCE)
                try:
                    assert await another.read() == b"x"
                    held.append(another)
                except grpc.aio.AioRpcError as refused:
                    if decode(refused).reason != "TOO_MANY_WATCHERS":
                        raise
                    await asyncio.sleep(0.01)


def test_the_streams_of_another_client_are_counted_apart() -> None:
    """One client can't take them all."""
    calls = CallInterceptor(lambda error: None, clock=Clock(), most_watches=1)
    calls.begin_watch("10.0.0.1")
    calls.begin_watch("10.0.0.2")
    with pytest.raises(ServiceError, match=r"client '10\.0\.0\.1' has 1 open streams"):
        calls.begin_watch("10.0.0.1")
    calls.end_watch("10.0.0.1")
    calls.begin_watch("10.0.0.1")


async def test_a_flooded_server_does_not_look_ill() -> None:
    """An orchestrator that checks health would restart the server; so these calls are never refused."""
    handler: Any = grpc.unary_unary_rpc_method_handler(echo)
    generic = grpc.method_handlers_generic_handler(SERVICE, {"Do": handler})
    registration = Registration(SERVICE, lambda server: server.add_generic_rpc_handlers((generic,)))
    server = Server(
        ServerOptions(insecure=True, request_rate=0.001, request_burst=1), services=[registration]
    )
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            call: Any = channel.unary_unary(METHOD)
            await call(b"x", timeout=PATIENCE)
            error = await refusal(call(b"x", timeout=PATIENCE))
            assert error.reason == "TOO_MANY_REQUESTS"
            health = health_pb2_grpc.HealthStub(channel)
            for _ in range(10):
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop()


async def test_a_service_sets_the_message_rate_of_its_streams() -> None:
    """The server has it from the registration; its other services are not affected."""
    handler: Any = grpc.stream_stream_rpc_method_handler(echo_each)
    generic = grpc.method_handlers_generic_handler(SERVICE, {"Do": handler})
    registration = Registration(
        SERVICE, lambda server: server.add_generic_rpc_handlers((generic,)), message_rate=Rate(0.001, 3)
    )
    server = Server(ServerOptions(insecure=True), services=[registration])
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stream: Any = channel.stream_stream(METHOD)(timeout=PATIENCE)
            for _ in range(3):
                await stream.write(b"x")
                assert await stream.read() == b"x"
            assert (await refusal(stream.read())).reason == "TOO_MANY_REQUESTS"
    finally:
        await server.stop()


async def test_zero_is_no_limit() -> None:
    """The flag's help states it."""
    calls = CallInterceptor(lambda error: None, clock=Clock())
    assert not any(calls.excess("10.0.0.1") for _ in range(100_000))


async def test_a_stream_of_reflection_is_bounded() -> None:
    """Each of its messages may be answered with a whole file."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x"

    calls = CallInterceptor(lambda error: None, clock=Clock())
    stream = calls.metered("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", endless())
    for _ in range(1_000):
        await anext(stream)
    with pytest.raises(ServiceError) as refused:
        await anext(stream)
    assert refused.value.reason == "TOO_MANY_REQUESTS"
