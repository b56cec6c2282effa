"""The caller of any handler gets a status to act on: never UNKNOWN or INTERNAL, never the text of a bug, never
silence. All four kinds of call, and both ways to answer with a stream."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from rallypoint.rpc.errors import ServiceError, decode
from rallypoint.serving.interceptor import CallInterceptor
from support.refusals import refusal
from support.waiting import PATIENCE

SERVICE = "tiny.v1.TinyService"
METHOD = f"/{SERVICE}/Do"
# The kind of call; for streams of answers also the style of the handler.
SHAPES = (
    "unary_unary",
    "stream_unary",
    "unary_stream/generator",
    "unary_stream/writer",
    "stream_stream/generator",
    "stream_stream/writer",
)

Body = Callable[[Any], Awaitable[Any]]
Start = Callable[..., Any]


class SealBrokenError(Exception):
    """An error that the service knows and the server does not."""


def encode_answer(answer: Any) -> bytes:
    if not isinstance(answer, bytes):
        raise TypeError(f"cannot encode {answer!r}")
    return answer


def decode_request(data: bytes) -> bytes:
    if data == b"malformed":
        raise ValueError("the decoder's own words")
    return data


def handler_of(shape: str, body: Body) -> Any:
    """Return a handler of that shape which reads its request, runs `body(context)`, and answers with its result."""
    kind, _, _style = shape.partition("/")

    async def read(request: Any) -> None:
        if kind.startswith("stream"):
            async for _ in request:
                pass

    async def single(request: Any, context: Any) -> Any:
        await read(request)
        return await body(context)

    async def generator(request: Any, context: Any) -> AsyncIterator[Any]:
        yield b"first"
        await read(request)
        yield await body(context)

    async def writer(request: Any, context: Any) -> None:
        await context.write(b"first")
        await read(request)
        await context.write(await body(context))

    function = single if kind.endswith("unary") else generator if shape.endswith("generator") else writer
    return getattr(grpc, f"{kind}_rpc_method_handler")(function, decode_request, encode_answer)


def start_call(channel: grpc.aio.Channel, shape: str, request: bytes = b"please") -> Any:
    kind = shape.partition("/")[0]

    async def requests() -> AsyncIterator[bytes]:
        yield request

    call = getattr(channel, kind)(METHOD)
    return call(requests() if kind.startswith("stream") else request, timeout=PATIENCE)


async def answers_of(call: Any, shape: str) -> list[bytes]:
    if shape.partition("/")[0].endswith("unary"):
        return [await call]
    return [answer async for answer in call]


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def do(shape: str, serve: Start, connect: Start) -> Callable[..., Awaitable[ServiceError | list[bytes]]]:
    """Serve `body`, call it once, return the answers or the error."""

    async def once(
        body: Body,
        *,
        request: bytes = b"please",
        translate: Callable[[Exception], ServiceError | None] = lambda error: None,
    ) -> ServiceError | list[bytes]:
        server = await serve({"Do": handler_of(shape, body)}, translate=translate)
        try:
            return await answers_of(start_call(connect(server), shape, request), shape)
        except grpc.aio.AioRpcError as error:
            return decode(error)

    return once


def raising(error: BaseException) -> Body:
    async def body(_context: Any) -> Any:
        raise error

    return body


def assert_hidden_bug(got: object, caplog: pytest.LogCaptureFixture) -> None:
    """The caller receives an incident number; the log has that number and the traceback."""
    assert isinstance(got, ServiceError), got
    assert (got.code, got.reason) == (grpc.StatusCode.UNAVAILABLE, "UNEXPECTED_ERROR")
    assert got.retry_after is not None
    # Errors of asyncio itself are left out, of gRPC's threads that raced for a wake-up.
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    [record] = [each for each in errors if each.name.startswith("rallypoint")]
    assert got.metadata["incident"] in record.getMessage()
    assert got.metadata["incident"] in got.message
    assert record.exc_info
    assert record.exc_info[1] is not None
    assert str(record.exc_info[1]) not in got.message or not str(record.exc_info[1])


async def test_a_good_answer_passes(do: Start, shape: str) -> None:
    async def body(_context: Any) -> bytes:
        return b"done"

    streams = "stream/" in shape
    assert await do(body) == ([b"first", b"done"] if streams else [b"done"])


async def test_a_service_error_arrives_with_its_details(do: Start) -> None:
    sent = ServiceError(
        grpc.StatusCode.ABORTED,
        "REVISION_CONFLICT",
        "revision 3 is not the latest, 4",
        metadata={"revision": "4"},
        field_violations=[("revision", "stale")],
        retry_after=0.5,
    )
    got = await do(raising(sent))
    assert vars(got) == vars(sent)


async def test_errors_that_the_service_knows_are_translated(do: Start) -> None:
    def translate(error: Exception) -> ServiceError | None:
        if isinstance(error, SealBrokenError):
            return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "SEAL_BROKEN", f"broken by {error}")
        return None

    got = await do(raising(SealBrokenError("n1")), translate=translate)
    assert (got.code, got.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SEAL_BROKEN")
    assert got.message == "broken by n1"


async def test_a_bug_is_hidden_from_the_caller_and_shown_in_the_log(
    do: Start, caplog: pytest.LogCaptureFixture
) -> None:
    assert_hidden_bug(await do(raising(KeyError("a password"))), caplog)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.OK])
async def test_codes_without_information_for_a_caller_count_as_bugs(
    do: Start, code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    assert_hidden_bug(await do(raising(ServiceError(code, "WHATEVER", "some words"))), caplog)


async def test_a_translation_that_fails_is_a_bug_too(do: Start, caplog: pytest.LogCaptureFixture) -> None:
    def translate(error: Exception) -> ServiceError | None:
        raise RuntimeError("the translator's own words")

    assert_hidden_bug(await do(raising(SealBrokenError("n1")), translate=translate), caplog)


async def test_an_answer_that_cannot_be_encoded_is_a_bug(do: Start, caplog: pytest.LogCaptureFixture) -> None:
    async def body(_context: Any) -> Any:
        return {"not": "bytes"}

    assert_hidden_bug(await do(body), caplog)


class Held:
    """A large object in a handler's local variable."""


async def test_a_refused_call_releases_its_objects_at_once(do: Start) -> None:
    """The next garbage collection would be too late: until then a thousand hostile requests would pile up in memory."""
    held: list[weakref.ref[Held]] = []

    async def body(_context: Any) -> Any:
        in_hand = Held()
        held.append(weakref.ref(in_hand))
        # As the engine answers: the future, which the exception's traceback refers to, keeps the exception.
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(ServiceError(grpc.StatusCode.ABORTED, "REVISION_CONFLICT", "stale"))
        return await answer

    gc.disable()
    try:
        assert (await do(body)).reason == "REVISION_CONFLICT"
        for _ in range(100):  # its task ends a few cycles of the loop after the reply to its client
            await asyncio.sleep(0)
        assert held[0]() is None
    finally:
        gc.enable()


async def test_a_method_that_a_service_leaves_out_is_no_bug(
    do: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Generated code raises for it, as for List in gRPC's own health service."""

    async def body(context: Any) -> Any:
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        raise NotImplementedError("Method not implemented!")

    got = await do(body)
    assert (got.code, got.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED")
    assert not caplog.records
    assert_hidden_bug(await do(raising(NotImplementedError("deep inside"))), caplog)


async def test_a_cancellation_that_leaks_from_within_does_not_leave_the_caller_waiting(
    do: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(_context: Any) -> Any:
        inner = asyncio.get_running_loop().create_future()
        inner.cancel()
        await inner

    assert_hidden_bug(await do(body), caplog)


async def test_a_request_that_cannot_be_decoded_is_the_callers_fault(
    do: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(_context: Any) -> bytes:
        return b"never"

    got = await do(body, request=b"malformed")
    assert (got.code, got.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
    assert "decoder" not in got.message
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_an_abort_passes_untouched(do: Start, caplog: pytest.LogCaptureFixture) -> None:
    async def body(context: Any) -> Any:
        await context.abort(grpc.StatusCode.DATA_LOSS, "as I say", (("key", "value"),))

    got = await do(body)
    assert (got.code, got.message) == (grpc.StatusCode.DATA_LOSS, "as I say")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_trailing_metadata_of_the_handler_stays_beside_the_details(
    serve: Start, connect: Start, shape: str
) -> None:
    async def body(context: Any) -> Any:
        context.set_trailing_metadata((("owner", "replica-2"),))
        raise ServiceError(grpc.StatusCode.UNAVAILABLE, "NOT_OWNER", "ask the owner")

    server = await serve({"Do": handler_of(shape, body)})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers_of(start_call(connect(server), shape), shape)
    assert ("owner", "replica-2") in list(caught.value.trailing_metadata())
    assert decode(caught.value).reason == "NOT_OWNER"


async def test_an_enormous_error_arrives(do: Start) -> None:
    huge = ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "日" * 100_000,
        metadata={str(number): "é" * 1000 for number in range(1000)},
        field_violations=[("field", "ü" * 1000)] * 1000,
    )
    got = await do(raising(huge))
    assert (got.code, got.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert got.message.endswith("…")


async def test_a_client_that_goes_away_ends_its_handler_and_is_no_error(
    serve: Start, connect: Start, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    waiting, ended = asyncio.Event(), asyncio.Event()

    async def body(_context: Any) -> Any:
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    server = await serve({"Do": handler_of(shape, body)})
    call = start_call(connect(server), shape)
    reading = asyncio.create_task(answers_of(call, shape))
    await asyncio.wait_for(waiting.wait(), PATIENCE)
    call.cancel()
    await asyncio.wait({reading}, timeout=PATIENCE)
    assert reading.done()
    await asyncio.wait_for(ended.wait(), PATIENCE)
    await server.drain(10)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("style", ["generator", "writer"])
async def test_a_handler_blocked_in_a_write_is_ended_when_its_client_goes_away(
    serve: Start, connect: Start, style: str
) -> None:
    full, ended = asyncio.Event(), asyncio.Event()
    chunk = b"x" * 1_000_000

    async def generator(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield chunk
                full.set()
        finally:
            ended.set()

    async def writer(_request: bytes, context: Any) -> None:
        try:
            while True:
                await context.write(chunk)
                full.set()
        finally:
            ended.set()

    function = generator if style == "generator" else writer
    server = await serve({"Do": grpc.unary_stream_rpc_method_handler(function)})
    call = connect(server).unary_stream(METHOD)(b"", timeout=PATIENCE)
    assert await call.read() == chunk
    await asyncio.wait_for(full.wait(), PATIENCE)
    call.cancel()
    await asyncio.wait_for(ended.wait(), PATIENCE)


async def test_a_status_set_by_the_handler_is_sent_without_an_answer(serve: Start, connect: Start) -> None:
    async def not_there(_request: bytes, context: Any) -> None:
        context.set_code(grpc.StatusCode.NOT_FOUND)
        context.set_details("no such run")

    server = await serve({"Do": grpc.unary_unary_rpc_method_handler(not_there, None, encode_answer)})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await connect(server).unary_unary(METHOD)(b"")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, "no such run")


async def test_a_method_that_does_not_exist_is_unimplemented(serve: Start, connect: Start) -> None:
    server = await serve({})
    assert (await refusal(connect(server).unary_unary(METHOD)(b""))).code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_handler_that_is_not_async_is_a_bug_and_not_a_hang(
    serve: Start, connect: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve({"Do": grpc.unary_unary_rpc_method_handler(lambda request, context: request)})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await connect(server).unary_unary(METHOD)(b"", timeout=PATIENCE)
    assert_hidden_bug(decode(caught.value), caplog)


async def test_a_method_is_wrapped_once_and_keeps_its_shape() -> None:
    async def generator(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield b""

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(generator)

    class Details:
        method = METHOD

    async def find(_details: object) -> Any:
        return handler

    interceptor: Any = CallInterceptor(lambda error: None)
    first = await interceptor.intercept_service(find, Details())
    assert first is await interceptor.intercept_service(find, Details())
    # Other interceptors, such as OpenTelemetry's, distinguish the two styles of streams by this.
    assert hasattr(first.unary_stream(b"", None), "__aiter__")
