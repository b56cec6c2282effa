"""Attempts at a call, with a jittered back-off between them, until it has taken too long."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from rallypoint.serving.errors import ServiceError

if TYPE_CHECKING:
    from rallypoint.serving.route import Search
    from rallypoint.serving.switchboard import Line, Switchboard

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


MOVED = frozenset({"NOT_OWNER", "OWNERSHIP_LOST"})
"""Reasons of those who do not own what was asked for, and name who does, if they know it. With the second it may have
been done all the same: the owner changed on the way."""


UNHEARD = frozenset({grpc.StatusCode.UNAVAILABLE.name, "NO_CONNECTION", "NO_ANSWER"})
"""Reasons that nobody gave who was asked: there was no answer. One who answers knows better what is wrong."""


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

    def __init__(self, pace: Pace, timeout: float, service: str, board: Switchboard | None = None) -> None:
        """Begin.

        Args:
            pace: How time passes.
            timeout: There are attempts for so many seconds from now.
            service: What is called, in one word: "store" is refused with STORE_UNAVAILABLE in the end.
            board: Where the service is; None: always the same place.
        """
        self._board = board
        self._search: Search | None = board.search() if board is not None else None
        self._pace = pace
        self._timeout = timeout
        self._service = service
        self._deadline = pace.clock() + timeout
        self._backoff = FIRST_BACKOFF
        self._last = "no connection"

    def remaining(self) -> float:
        """Seconds left for the next attempt."""
        return max(0.0, self._deadline - self._pace.clock())

    async def line(self) -> Line:
        """The way to whom to ask next.

        Raises:
            ServiceError: It could not be had; see Switchboard.line.
        """
        assert self._board is not None, "whom to ask was said"
        assert self._search is not None
        return await self._board.line(self._search, self.remaining())

    async def failed(self, error: ServiceError) -> None:
        """Wait until the next attempt, which comes at once where another replica is to be asked.

        Raises:
            ServiceError: There is none: `error`, if it is final, otherwise UNAVAILABLE for the reason of the service.
        """
        if not _is_retryable(error):
            raise error
        if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            self._last = error.message
        if self._search is not None and self._search.at_once and self.remaining() > 0:
            return
        pause = (error.retry_after or 0.0) + self._pace.draw() * self._backoff
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)
        if self._board is not None and self._search is not None:
            self._board.rest(self._search)
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
