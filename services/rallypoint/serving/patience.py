"""How long a stream waits for a subscriber to take a message."""

from __future__ import annotations

from collections.abc import Awaitable

import grpc

from rallypoint.serving.bounded import bounded
from rallypoint.serving.errors import ServiceError

# Seconds, before the subscriber's stream is ended. It loses nothing by that: it comes back, and is told the latest.
WRITE_TIMEOUT = 10.0


async def in_time(writing: Awaitable[object], timeout: float) -> None:
    """Wait for a message to be taken.

    Args:
        writing: Writes it.
        timeout: Seconds.

    Raises:
        ServiceError: SUBSCRIBER_TOO_SLOW: it was not, and the stream is to be ended.
    """
    try:
        await bounded(writing, timeout)
    except TimeoutError:
        raise ServiceError(
            grpc.StatusCode.UNAVAILABLE,
            "SUBSCRIBER_TOO_SLOW",
            f"the subscriber took no message for {timeout:g} s: connect again and resume",
        ) from None
