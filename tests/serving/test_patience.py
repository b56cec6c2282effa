"""A subscriber that doesn't read is dropped after the write timeout, with a reason to reconnect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from rallypoint.rpc.errors import decode
from rallypoint.serving import flow
from rallypoint.serving.flow import Subscriber
from support.waiting import PATIENCE

METHOD = "/tiny.v1.TinyService/Do"
# More than a transport buffers for a client that doesn't read.
LARGE = b"x" * (2 << 20)

Start = Callable[..., Any]


@pytest.mark.parametrize("taken", [0, 1], ids=["its_first_answer", "a_later_answer"])
async def test_a_client_that_does_not_read_gets_a_retryable_error(
    taken: int,
    serve: Start,
    connect: Start,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This may be the first answer; the log has no entry that looks like a bug."""
    monkeypatch.setattr(flow, "WRITE_TIMEOUT", 0.05)
    given_up = asyncio.Event()

    async def answer(_request: bytes, context: Any) -> None:
        subscriber = Subscriber(context)
        try:
            for _ in range(taken):
                await subscriber.send(b"small")
            await subscriber.send(LARGE)
        finally:
            given_up.set()

    server = await serve({"Do": grpc.unary_stream_rpc_method_handler(answer)})
    call = connect(server).unary_stream(METHOD)(b"please", timeout=PATIENCE)
    answers = aiter(call)
    for _ in range(taken):
        assert await anext(answers) == b"small"
    await given_up.wait()
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        _ = [answer async for answer in answers]
    error = decode(ended.value)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SUBSCRIBER_TOO_SLOW")
    assert "took no message for 0.05 s" in error.message
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_stream_that_ends_while_it_begins_has_its_status(
    serve: Start, connect: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """The greeting task is cancelled, for example because the client's first message is refused meanwhile."""

    async def answer(_request: bytes, context: Any) -> None:
        greeting = asyncio.create_task(Subscriber(context).greet())
        await asyncio.sleep(0)
        greeting.cancel()
        await asyncio.wait([greeting])
        context.set_code(grpc.StatusCode.ABORTED)

    server = await serve({"Do": grpc.unary_stream_rpc_method_handler(answer)})
    call = connect(server).unary_stream(METHOD)(b"please", timeout=PATIENCE)
    assert await call.code() is grpc.StatusCode.ABORTED
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_client_that_has_gone_is_not_slow() -> None:
    """An error of a write is raised unchanged."""

    class Gone:
        async def send_initial_metadata(self, _metadata: object) -> None: ...

        async def write(self, _message: object) -> None:
            raise asyncio.InvalidStateError("the stream is over")

    subscriber: Any = Gone()
    with pytest.raises(asyncio.InvalidStateError):
        await Subscriber(subscriber).send(b"")
