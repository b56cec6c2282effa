"""Attempts at a call, with a jittered back-off between them, until it has taken too long."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from rallypoint.serving.errors import ServiceError, decode

# First and longest back-off between two attempts, each drawn from 0 to that. The longest is what a client may
# lose at worst after the service is back. Seconds.
FIRST_BACKOFF = 0.05
LONGEST_BACKOFF = 2.0

# Codes that tell of a connection or a server that is gone, and perhaps soon back.
GONE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        # Not by us: that would be asyncio's CancelledError. A server under a storm of connects drops calls with it.
        grpc.StatusCode.CANCELLED,
        # No service of ours answers with these two: they are broken connections that gRPC couldn't name better.
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)

_Response = TypeVar("_Response")


@dataclass(frozen=True, slots=True)
class Pace:
    """How time passes for a client, and what spreads its attempts.

    Attributes:
        clock: Seconds, monotonic.
        sleep: Waits for some seconds.
        draw: A number from 0 to 1, for the jitter.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    draw: Callable[[], float] = random.random


class Attempts:
    """The attempts at one call."""

    def __init__(self, pace: Pace, timeout: float, service: str) -> None:
        """Begin.

        Args:
            pace: How time passes.
            timeout: There are attempts for so many seconds from now.
            service: What is called, in one word: "store" is refused with STORE_UNAVAILABLE in the end.
        """
        self._pace = pace
        self._timeout = timeout
        self._service = service
        self._deadline = pace.clock() + timeout
        self._backoff = FIRST_BACKOFF
        self._last = "no connection"

    def remaining(self) -> float:
        """Seconds left for the next attempt."""
        return max(0.0, self._deadline - self._pace.clock())

    async def call(
        self,
        method: Callable[..., Awaitable[_Response]],
        request: Any,
        before_attempt: Callable[[], None] = lambda: None,
    ) -> _Response:
        """Call a method until it answers; what it answers.

        Raises:
            ServiceError: See `failed`.
        """
        while True:
            before_attempt()
            try:
                return await method(request, timeout=self.remaining(), wait_for_ready=True)
            except grpc.aio.AioRpcError as failure:
                error = decode(failure)
            await self.failed(error)

    async def failed(self, error: ServiceError) -> None:
        """Wait until the next attempt.

        Raises:
            ServiceError: There is none: `error`, if it is final, otherwise UNAVAILABLE for the reason of the service.
        """
        if not _is_retryable(error):
            raise error
        if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            self._last = error.message
        pause = (error.retry_after or 0.0) + self._pace.draw() * self._backoff
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)
        await self._pace.sleep(min(pause, self.remaining()))
        if self.remaining() <= 0:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                f"{self._service.upper()}_UNAVAILABLE",
                f"the {self._service} service gave no answer for {self._timeout:g} s ({self._last})",
            )


def _is_retryable(error: ServiceError) -> bool:
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return error.retry_after is not None
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        # Without a reason of the service's it is our own deadline, which ends the attempts by itself.
        return error.reason == error.code.name
    return error.code in GONE
