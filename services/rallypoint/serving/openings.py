"""First messages of streams: waited for, but neither for ever nor by a server that is going away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc

from rallypoint.serving.bounded import bounded
from rallypoint.serving.errors import ServiceError

_M = TypeVar("_M")


class ServerGoes(Exception):
    """The server is going away, and the stream has not said what it is for."""


class Openings:
    """The streams of a service of which nobody knows yet what they are for.

    Without this, one client that was cut off between its call and its first message would hold up the end of the server
    for as long as it may take to send that.
    """

    def __init__(self, seconds: float) -> None:
        """Wait for `seconds` at most, each time."""
        self._seconds = seconds
        # With how often each was cancelled by others before.
        self._waiting: dict[asyncio.Task[Any], int] = {}
        self._over = False

    async def first(self, requests: AsyncIterator[_M]) -> _M:
        """The first message of a stream.

        Raises:
            ServerGoes: The server is going away; or it was when this was called.
            StopAsyncIteration: The client has ended the stream.
            ServiceError: UNAVAILABLE, FIRST_MESSAGE_LATE: None came in time. Client, server or network may have
                stalled: that is no reason to refuse the client for good.
        """
        task = asyncio.current_task()
        assert task is not None, "a stream is served by a task"
        if self._over:
            raise ServerGoes
        cancelling = self._waiting[task] = task.cancelling()
        try:
            return await bounded(anext(requests), self._seconds)
        except TimeoutError:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "FIRST_MESSAGE_LATE",
                f"the stream's first message did not come within {self._seconds:g} s: open another stream",
            ) from None
        except asyncio.CancelledError:
            # By nobody else as well: as asyncio.timeout tells the two apart.
            if task not in self._waiting and task.uncancel() <= cancelling:
                raise ServerGoes from None
            raise
        finally:
            self._waiting.pop(task, None)

    def end(self) -> None:
        """Wait no more."""
        self._over = True
        while self._waiting:
            task, _ = self._waiting.popitem()
            task.cancel()
