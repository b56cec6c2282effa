"""A stream without a first message is ended after a while, and does not delay a server that drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.flow import ServerDraining, UnopenedStreams

LONG = 600.0


async def silent() -> AsyncIterator[str]:
    """A client that sends nothing."""
    await asyncio.Event().wait()
    yield "never"


async def saying(*messages: str) -> AsyncIterator[str]:
    """A client that sends these messages, and ends its stream."""
    for message in messages:
        yield message


async def begun(openings: UnopenedStreams) -> asyncio.Task[str]:
    """Return a stream that waits for its first message."""
    task = asyncio.create_task(openings.first(silent()))
    await asyncio.sleep(0)
    return task


async def test_the_first_message_is_returned() -> None:
    """The rest is left in the stream."""
    requests = saying("a", "b")
    assert await UnopenedStreams(LONG).first(requests) == "a"
    assert await anext(requests) == "b"


async def test_the_end_of_a_stream_without_a_message_is_raised() -> None:
    """Its client has changed its mind."""
    with pytest.raises(StopAsyncIteration):
        await anext(saying())
    with pytest.raises((StopAsyncIteration, RuntimeError)):
        await UnopenedStreams(LONG).first(saying())


async def test_the_wait_is_bounded() -> None:
    """The client may be cut off, or have nothing to send; it may also have been stalled, and should retry."""
    with pytest.raises(ServiceError) as late:
        await UnopenedStreams(0.01).first(silent())
    assert (late.value.code, late.value.reason) == (grpc.StatusCode.UNAVAILABLE, "FIRST_MESSAGE_LATE")


async def test_a_draining_server_waits_for_no_unopened_stream() -> None:
    """This holds for streams that wait, and for one that comes in the last moment."""
    openings = UnopenedStreams(LONG)
    tasks = [await begun(openings) for _ in range(3)]
    openings.end()
    for task in tasks:
        with pytest.raises(ServerDraining):
            await task
    with pytest.raises(ServerDraining):
        await openings.first(saying("too late"))


async def test_a_stream_cancelled_by_its_client_stays_cancelled() -> None:
    """The server may begin to drain in that moment: the client has gone, and no error must be sent."""
    openings = UnopenedStreams(LONG)
    gone, both = await begun(openings), await begun(openings)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    both.cancel()
    openings.end()
    with pytest.raises(asyncio.CancelledError):
        await both
