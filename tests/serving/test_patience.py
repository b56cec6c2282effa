"""A subscriber that takes nothing is let go after a while, with a reason that tells it to come back."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from rallypoint.serving.errors import ServiceError
from rallypoint.serving.patience import in_time


async def test_who_takes_nothing_is_too_slow() -> None:
    """The write is given up."""
    writing = asyncio.ensure_future(asyncio.Event().wait())
    with pytest.raises(ServiceError, match=r"took no message for 0\.01 s") as refused:
        await in_time(writing, 0.01)
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.UNAVAILABLE, "SUBSCRIBER_TOO_SLOW")
    assert writing.cancelled()


async def test_what_goes_wrong_with_a_write_is_told_as_it_is() -> None:
    """Who has gone is not slow."""

    async def write() -> None:
        raise asyncio.InvalidStateError("the stream is over")

    with pytest.raises(asyncio.InvalidStateError):
        await in_time(write(), 60.0)
