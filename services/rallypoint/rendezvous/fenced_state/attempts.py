"""Attempts at a call, with a jittered back-off between them, until it has taken too long."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from rallypoint.serving.errors import ServiceError

# First and longest back-off between two attempts, each drawn from 0 to that. The longest is what a client may
# lose at worst after the service is back. Seconds.
FIRST_BACKOFF = 0.05
LONGEST_BACKOFF = 2.0

_RETRYABLE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # the service never answers with it: our own deadline, which ends the loop
    grpc.StatusCode.CANCELLED,  # not by us: that would be asyncio's CancelledError
    # The service never answers with these two: they are broken connections that gRPC couldn't name better.
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}


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

    def __init__(self, pace: Pace, timeout: float) -> None:
        """Begin; there are attempts for `timeout` seconds from now."""
        self._pace = pace
        self._timeout = timeout
        self._deadline = pace.clock() + timeout
        self._backoff = FIRST_BACKOFF
        self._last = "no connection"

    def remaining(self) -> float:
        """Seconds left for the next attempt."""
        return max(0.0, self._deadline - self._pace.clock())

    async def failed(self, error: ServiceError) -> None:
        """Wait until the next attempt.

        Raises:
            ServiceError: There is none: `error`, if it is final, otherwise STATE_UNAVAILABLE.
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
                "STATE_UNAVAILABLE",
                f"the state service gave no answer for {self._timeout:g} s ({self._last})",
            )


def _is_retryable(error: ServiceError) -> bool:
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return error.retry_after is not None
    return error.code in _RETRYABLE
