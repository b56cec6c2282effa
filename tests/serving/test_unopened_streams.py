"""Streams that don't say what they are for are not waited for for ever, nor by a server that goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.flow import ServerDraining, UnopenedStreams

LONG = 600.0


async def silent() -> AsyncIterator[str]:
    """A client that says nothing."""
    await asyncio.Event().wait()
    yield "never"


async def saying(*messages: str) -> AsyncIterator[str]:
    """A client that says this, and ends its stream."""
    for message in messages:
        yield message


async def begun(openings: UnopenedStreams) -> asyncio.Task[str]:
    """A stream that waits for its first message."""
    task = asyncio.create_task(openings.first(silent()))
    await asyncio.sleep(0)
    return task


async def test_the_first_message_is_returned() -> None:
    """And the rest is left to the stream."""
    requests = saying("a", "b")
    assert await UnopenedStreams(LONG).first(requests) == "a"
    assert await anext(requests) == "b"


async def test_one_that_ends_without_a_message_says_so() -> None:
    """Its client has changed its mind."""
    with pytest.raises(StopAsyncIteration):
        await anext(saying())
    with pytest.raises((StopAsyncIteration, RuntimeError)):
        await UnopenedStreams(LONG).first(saying())


async def test_the_wait_is_bounded() -> None:
    """A client may be cut off, or not know what to say; it may also have been stalled, and is to try again."""
    with pytest.raises(ServiceError) as late:
        await UnopenedStreams(0.01).first(silent())
    assert (late.value.code, late.value.reason) == (grpc.StatusCode.UNAVAILABLE, "FIRST_MESSAGE_LATE")


async def test_a_server_that_goes_waits_for_none() -> None:
    """Neither for those that wait, nor for one that comes in the last moment."""
    openings = UnopenedStreams(LONG)
    tasks = [await begun(openings) for _ in range(3)]
    openings.end()
    for task in tasks:
        with pytest.raises(ServerDraining):
            await task
    with pytest.raises(ServerDraining):
        await openings.first(saying("too late"))


async def test_one_that_is_cancelled_by_others_is_cancelled() -> None:
    """Also in the moment in which the server goes: its client has gone, and nobody is to be told anything."""
    openings = UnopenedStreams(LONG)
    gone, both = await begun(openings), await begun(openings)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    both.cancel()
    openings.end()
    with pytest.raises(asyncio.CancelledError):
        await both
