"""A server starts wholly or not at all, is alone on its address, reports its health, and ends without a surprise."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from rallypoint.rpc.endpoint import Endpoint, PortInUseError, ServerOptions, ServiceStartError
from rallypoint.rpc.errors import decode
from rallypoint.serving import server as server_module
from rallypoint.serving.server import Registration, Server, check_free, raise_open_files
from support.log_events import log_events
from support.refusals import refusal
from support.waiting import PATIENCE, until

Start = Callable[..., Any]
SERVICE = "tiny.v1.TinyService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def echo(request: bytes, _context: Any) -> bytes:
    return request


ECHO: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}


class Hall:
    """A service with one stream, `Wait`, that sends "in" and ends when the doors open."""

    def __init__(self) -> None:
        self.doors = asyncio.Event()
        self.inside = 0
        self.full = asyncio.Event()
        self.capacity = 1
        self.handlers = {**ECHO, "Wait": grpc.unary_stream_rpc_method_handler(self._wait)}

    async def _wait(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        self.inside += 1
        if self.inside == self.capacity:
            self.full.set()
        yield b"in"
        await self.doors.wait()
        yield b"draining"

    async def open_doors(self) -> None:
        self.doors.set()


def wait_call(channel: grpc.aio.Channel) -> Any:
    wait: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{SERVICE}/Wait")
    return wait(b"", timeout=PATIENCE)


async def read_all(call: Any) -> list[bytes]:
    return [answer async for answer in call]


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
    return int(answer.status)


async def soon(awaitable: Awaitable[Any]) -> Any:
    """Await within a time below the drain grace of these tests, a minute, and above the need of a slow machine."""
    return await asyncio.wait_for(awaitable, PATIENCE)


def can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def port_of(server: Server) -> int:
    return int(server.address.rpartition(":")[2])


MIB = 1 << 20


async def test_a_started_server_answers_at_its_address(serve: Start, connect: Start) -> None:
    server = await serve(ECHO)
    assert server.address.startswith("127.0.0.1:")
    assert port_of(server) > 0
    assert await connect(server).unary_unary(f"/{SERVICE}/Echo")(b"hello", timeout=PATIENCE) == b"hello"


async def test_no_usual_garbage_collection_stops_the_service_for_long(serve: Start) -> None:
    """Except for the oldest objects it examines at most 50,000: about 40 ms, in which no heartbeat is read."""
    await serve(ECHO)
    newest, collections, _ = gc.get_threshold()
    assert newest * collections <= 50_000


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
async def test_memory_of_large_values_is_given_back(serve: Start) -> None:
    """Each has its own mapping, also after one was freed, which makes glibc keep those that follow."""
    await serve(ECHO)
    large = 16 * MIB  # no heap of a process that runs tests has room for it
    value = bytearray(large + MIB)
    del value
    before = _mapped_bytes()
    values = [bytearray(large) for _ in range(8)]
    assert _mapped_bytes() - before >= (len(values) - 1) * large
    del values
    assert _mapped_bytes() - before < MIB


class MallInfo(ctypes.Structure):
    """The result of mallinfo2(3): ten sizes, of which the fifth is that of blocks with their own mapping."""

    _fields_ = (("before", ctypes.c_size_t * 4), ("mapped", ctypes.c_size_t), ("after", ctypes.c_size_t * 5))


def _mapped_bytes() -> int:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo
    return int(mallinfo().mapped)


async def test_the_ready_line_has_services_address_and_security(
    serve: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = await serve(ECHO)
    [ready] = [each.getMessage() for each in caplog.records if each.getMessage().startswith("ready")]
    assert SERVICE.rpartition(".")[2] in ready
    assert server.address in ready
    assert "secret of this user" in ready


def test_a_server_that_was_not_started_has_no_address() -> None:
    with pytest.raises(RuntimeError, match="not started"):
        _ = Server(ServerOptions(), services=[]).address


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_an_address_in_use_is_refused_and_named(serve: Start, host: str) -> None:
    first = await serve(ECHO, options=ServerOptions(host=host))
    with pytest.raises(ServiceStartError) as caught:
        await serve(ECHO, options=ServerOptions(host=host, port=port_of(first)))
    assert first.address in str(caught.value)
    assert "--port" in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_name_with_one_of_its_addresses_in_use_is_refused(serve: Start) -> None:
    # gRPC alone would listen on ::1 and leave 127.0.0.1, where clients may look first, to another process.
    first = await serve(ECHO)
    with pytest.raises(ServiceStartError, match="in use"):
        await serve(ECHO, options=ServerOptions(host="localhost", port=port_of(first)))


@pytest.mark.parametrize(
    ("host", "complaint"),
    [
        ("192.0.2.1", "is no address of this machine"),
        ("two words", "--host 'two words'"),
        ("unix:/no/such/folder/socket", "/no/such/folder"),
    ],
)
async def test_an_address_that_cannot_be_had_is_refused_and_named(host: str, complaint: str) -> None:
    with pytest.raises(ServiceStartError) as caught:
        await Server(ServerOptions(host=host, insecure=True), services=[]).start()
    assert complaint in str(caught.value)
    assert "--host" in str(caught.value)


async def test_a_name_without_an_address_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    with pytest.raises(ServiceStartError) as caught:
        await Server(ServerOptions(host="nowhere.example", insecure=True), services=[]).start()
    assert str(caught.value) == (
        "cannot find the address of nowhere.example (Name or service not known): change --host"
    )


async def test_a_failed_start_leaves_nothing_behind(serve: Start) -> None:
    first = await serve(ECHO)

    def broken(_server: grpc.aio.Server) -> None:
        raise RuntimeError("cannot be registered")

    async def fail_twice() -> None:
        with pytest.raises(ServiceStartError):
            await serve(ECHO, options=ServerOptions(port=port_of(first)))
        with pytest.raises(RuntimeError, match="cannot be registered"):
            await Server(ServerOptions(), services=[Registration(SERVICE, broken)]).start()

    me = psutil.Process()
    await fail_twice()
    descriptors, threads = me.num_fds(), me.num_threads()
    for _ in range(5):
        await fail_twice()
    # gRPC closes sockets on its own threads, a little later.
    await until(lambda: me.num_fds() <= descriptors, "the descriptors to be closed")
    await until(lambda: me.num_threads() <= threads + 1, "the threads to end")


async def test_a_start_that_fails_after_binding_gives_the_port_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = []

    def bind_then_fail(server: grpc.aio.Server, *_: object) -> int:
        bound.append(server.add_insecure_port("127.0.0.1:0"))
        raise ServiceStartError("on purpose")

    monkeypatch.setattr("rallypoint.serving.server._bind", bind_then_fail)
    with pytest.raises(ServiceStartError, match="on purpose"):
        await Server(ServerOptions(), services=[]).start()
    assert can_listen(bound[0])


async def test_a_unix_socket_is_served_alone_and_cleaned_up(
    serve: Start, connect: Start, tmp_path: Path
) -> None:
    path = tmp_path / "rallypoint.sock"
    # The socket file of a killed server is no obstacle.
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    options = ServerOptions(host=f"unix:{path}")
    server = await serve(ECHO, options=options)
    assert server.address == f"unix:{path}"
    assert await connect(server).unary_unary(f"/{SERVICE}/Echo")(b"hello", timeout=PATIENCE) == b"hello"
    with pytest.raises(ServiceStartError, match="in use"):
        await serve(ECHO, options=options)
    await server.stop()
    assert not path.is_socket()


async def test_a_file_that_is_not_a_socket_is_not_replaced(serve: Start, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    with pytest.raises(ServiceStartError, match=str(precious)):
        await serve(ECHO, options=ServerOptions(host=f"unix:{precious}"))
    assert precious.read_text() == "data"


async def test_health_answers_for_each_service_and_for_the_whole(serve: Start, connect: Start) -> None:
    channel = connect(await serve(ECHO))
    assert await health_of(channel, "") == SERVING
    assert await health_of(channel, SERVICE) == SERVING
    assert (await refusal(health_of(channel, "tiny.v1.NoSuchService"))).code is grpc.StatusCode.NOT_FOUND


async def test_each_service_has_a_status_of_its_own(connect: Start) -> None:
    """The server as a whole serves while all of its services do: the same by Check, by Watch and by List."""
    if not hasattr(health_pb2, "HealthListRequest"):
        pytest.skip("grpcio-health-checking below 1.85 has no List")
    one, other = (Registration(f"tiny.v1.{name}", lambda server: None) for name in ("One", "Other"))
    names = ("", one.service_name, other.service_name)
    server = Server(ServerOptions(), services=[one, other], ready=False)
    await server.start()
    channel = connect(server)
    stub = health_pb2_grpc.HealthStub(channel)
    watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE) for name in names]

    async def reported(changed: tuple[int, ...]) -> list[int]:
        listed = (await stub.List(health_pb2.HealthListRequest(), timeout=PATIENCE)).statuses
        assert set(listed) == {*names, "rallypoint.server.v1.ServerService"}
        assert listed["rallypoint.server.v1.ServerService"].status == SERVING
        checked = [await health_of(channel, name) for name in names]
        assert [listed[name].status for name in names] == checked
        assert [(await watches[index].read()).status for index in changed] == [checked[i] for i in changed]
        return checked

    assert await reported((0, 1, 2)) == [NOT_SERVING, NOT_SERVING, NOT_SERVING]
    await server.set_ready(True)
    assert await reported((0, 1, 2)) == [SERVING, SERVING, SERVING]
    await server.set_ready(False, one)
    assert await reported((0, 1)) == [NOT_SERVING, NOT_SERVING, SERVING]
    await server.set_ready(False, other)
    await server.set_ready(True, one)
    assert await reported((1, 2)) == [NOT_SERVING, SERVING, NOT_SERVING]
    await server.set_ready(True, one, other)
    assert await reported((0, 2)) == [SERVING, SERVING, SERVING]
    draining = asyncio.create_task(server.drain(60))
    assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * 3
    await soon(draining)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services(serve: Start, connect: Start, version: str) -> None:
    """It does so in both versions, whose messages are the same."""
    call = connect(await serve(ECHO)).stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def ask() -> AsyncIterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async for answer in call(ask(), timeout=PATIENCE):
        names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_health_and_reflection_can_be_closed(serve: Start, connect: Start) -> None:
    """Then they are unknown methods; the service itself is there."""
    channel = connect(await serve(ECHO, options=ServerOptions(health=False, reflection=False)))

    async def ask() -> AsyncIterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    assert (await refusal(health_of(channel, ""))).code is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (
            reflection_pb2_grpc.ServerReflectionStub(channel)
            .ServerReflectionInfo(ask(), timeout=PATIENCE)
            .read()
        )
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert await channel.unary_unary(f"/{SERVICE}/Echo")(b"here", timeout=PATIENCE) == b"here"


async def test_a_drain_notifies_streams_refuses_new_calls_and_lets_open_ones_end(
    serve: Start, connect: Start
) -> None:
    hall, told = Hall(), asyncio.Event()

    async def on_drain() -> None:
        told.set()

    server = await serve(hall.handlers, on_drain=on_drain)
    port, channel = port_of(server), connect(server)
    stream = wait_call(channel)
    assert await stream.read() == b"in"
    draining = asyncio.create_task(server.drain(60))
    await soon(told.wait())
    assert await health_of(channel, SERVICE) == NOT_SERVING
    assert await health_of(channel, "") == NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{SERVICE}/Echo")(b"too late", timeout=PATIENCE)
    refusal = decode(caught.value)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert refusal.retry_after is not None
    assert not draining.done()
    await hall.open_doors()
    assert await stream.read() == b"draining"
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK
    await soon(draining)
    assert can_listen(port)


async def test_a_drain_waits_only_for_open_calls_of_our_services(serve: Start, connect: Start) -> None:
    server = await serve(ECHO)
    watch = health_pb2_grpc.HealthStub(connect(server)).Watch(
        health_pb2.HealthCheckRequest(service=SERVICE), timeout=PATIENCE
    )
    assert (await watch.read()).status == SERVING
    draining = asyncio.create_task(server.drain(60))
    assert (await watch.read()).status == NOT_SERVING
    await soon(draining)


async def test_a_drain_ends_with_its_grace(
    serve: Start, connect: Start, caplog: pytest.LogCaptureFixture
) -> None:
    hall, cancelled = Hall(), asyncio.Event()

    async def never_ends() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    server = await serve(hall.handlers, on_drain=never_ends)
    stream = wait_call(connect(server))
    assert await stream.read() == b"in"
    await soon(server.drain(0.05))
    assert cancelled.is_set()
    assert (await refusal(stream.read())).code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert "open_calls=1" in caplog.text


async def test_a_service_that_fails_to_drain_stops_no_other(
    serve: Start, connect: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> None:
        raise RuntimeError("on purpose")

    hall = Hall()
    server = Server(
        ServerOptions(),
        services=[
            Registration("tiny.v1.Failing", lambda server: None, fails),
            Registration(
                SERVICE,
                lambda server: server.add_generic_rpc_handlers(
                    (grpc.method_handlers_generic_handler(SERVICE, hall.handlers),)
                ),
                hall.open_doors,
            ),
        ],
    )
    await server.start()
    stream = wait_call(connect(server))
    assert await stream.read() == b"in"
    await soon(server.drain(60))
    assert [await stream.read(), await stream.read()] == [b"draining", grpc.aio.EOF]
    assert "on purpose" in caplog.text


async def test_draining_twice_is_draining_once(serve: Start) -> None:
    calls = 0

    async def count() -> None:
        nonlocal calls
        calls += 1

    server = await serve(ECHO, on_drain=count)
    await soon(asyncio.gather(server.drain(60), server.drain(60)))
    await soon(server.drain(60))
    assert calls == 1


async def test_a_stop_cuts_a_drain_short(serve: Start, connect: Start) -> None:
    hall = Hall()
    server = await serve(hall.handlers)
    stream = wait_call(connect(server))
    assert await stream.read() == b"in"
    draining = asyncio.create_task(server.drain(60))
    await asyncio.sleep(0)
    await soon(server.stop())
    await soon(draining)
    with pytest.raises(grpc.aio.AioRpcError):
        await stream.read()


async def test_a_handler_that_ignores_its_end_does_not_delay_a_stop(
    serve: Start, connect: Start, caplog: pytest.LogCaptureFixture
) -> None:
    waits, release, failed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def stubborn(_request: bytes, context: Any) -> None:
        await context.write(b"in")
        waits.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        failed.set()
        raise KeyError("long after its server")

    server = await serve({"Wait": grpc.unary_stream_rpc_method_handler(stubborn)})
    stream = wait_call(connect(server))
    try:
        assert await stream.read() == b"in"
        await soon(waits.wait())  # the client may have read a message that the handler still writes
        await soon(server.stop())
        with pytest.raises(grpc.aio.AioRpcError):
            await soon(stream.read())
    finally:
        release.set()
    await soon(failed.wait())
    await soon(server.stop())
    assert "long after its server" in caplog.text


async def test_a_server_starts_once(serve: Start) -> None:
    server = await serve(ECHO)
    with pytest.raises(RuntimeError, match="started before"):
        await server.start()


@pytest.mark.parametrize(("hard", "warnings"), [(2048, 1), (4096, 0), (resource.RLIM_INFINITY, 0)])
async def test_it_may_open_as_many_files_as_the_hard_limit_allows(
    serve: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hard: int, warnings: int
) -> None:
    """The soft limit does not matter; a low hard limit is logged once, with the way to raise it."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    raise_open_files.cache_clear()
    for _ in range(2):
        await serve({})
    assert given == [(1 << 20 if hard == resource.RLIM_INFINITY else hard, hard)]
    assert [event.fields["limit"] for event in log_events(caplog.records)] == [hard] * warnings
    assert caplog.text.count("LimitNOFILE=") == warnings


async def ping(channel: grpc.aio.Channel) -> bytes | grpc.StatusCode:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/Echo")
    try:
        return await call(b"hello", timeout=PATIENCE)
    except grpc.aio.AioRpcError as error:
        return error.code()


@pytest.mark.skipif(
    tuple(map(int, grpc.__version__.split(".")[:2])) < (1, 70),
    reason="grpcio 1.62 has no limit of connections",
)
async def test_connections_leave_files_for_the_rest(
    serve: Start, connect: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One too many is refused at once; each that ends makes room for another, and open ones stay."""
    assert 0 < server_module._most_connections() < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    monkeypatch.setattr(server_module, "_most_connections", lambda: 18)
    server = await serve(ECHO)
    channels = [connect(server) for _ in range(19)]
    answers = [await ping(channel) for channel in channels]
    assert answers == [b"hello"] * 18 + [grpc.StatusCode.UNAVAILABLE]
    await channels[0].close()
    async with asyncio.timeout(PATIENCE):
        while await ping(channels[-1]) != b"hello":
            pass
    assert await ping(channels[1]) == b"hello"


async def test_a_connection_without_calls_is_closed(
    serve: Start, connect: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes in order: the client's next call reconnects. A connection with an open stream stays."""
    arguments = {**dict(server_module.SERVER_ARGUMENTS), "grpc.max_connection_idle_ms": 1000}
    monkeypatch.setattr(server_module, "SERVER_ARGUMENTS", tuple(arguments.items()))
    hall = Hall()
    server = await serve(hall.handlers, on_drain=hall.open_doors)

    def connections() -> int:
        own = psutil.Process().net_connections("tcp")
        return sum(bool(each.raddr) and each.laddr.port == port_of(server) for each in own)

    idle_one, streaming = connect(server), connect(server)
    stream = wait_call(streaming)
    assert await stream.read() == b"in"
    assert await ping(idle_one) == b"hello"
    assert connections() == 2
    await until(lambda: connections() == 1)
    assert await ping(idle_one) == b"hello"
    await hall.open_doors()
    assert await stream.read() == b"draining"


async def test_stopping_an_unstarted_server_does_nothing() -> None:
    server = Server(ServerOptions(), services=[])
    await server.stop()
    await server.drain()


@pytest.mark.slow
async def test_a_storm_of_streams_loses_none(serve: Start, connect: Start) -> None:
    """With gRPC's own limits, 20 to 120 of 2,000 streams opened at once end as CANCELLED."""
    hall = Hall()
    hall.capacity = 2000
    options = ServerOptions(max_watches_per_client=0)
    server = await serve(hall.handlers, options=options, on_drain=hall.open_doors)
    channels = [connect(server) for _ in range(4)]
    streams = [wait_call(channels[number % 4]) for number in range(2000)]
    await soon(hall.full.wait())
    draining = asyncio.create_task(server.drain(60))
    answers = await soon(asyncio.gather(*(read_all(stream) for stream in streams)))
    assert answers == [[b"in", b"draining"]] * 2000
    await soon(draining)


async def test_a_port_that_is_taken_between_the_check_and_the_bind_is_in_use(
    monkeypatch: pytest.MonkeyPatch, serve: Start
) -> None:
    """Another agent that starts at once may take it: the caller gets the same error as from the check."""
    port = port_of(await serve(ECHO))
    checks = []

    async def check_once(endpoint: Endpoint) -> None:
        checks.append(endpoint)
        if len(checks) > 1:
            await check_free(endpoint)

    monkeypatch.setattr(server_module, "check_free", check_once)
    with pytest.raises(PortInUseError, match="is in use"):
        await serve(ECHO, options=ServerOptions(port=port))
