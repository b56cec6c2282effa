"""How long a stream waits for a subscriber to take a message."""

from __future__ import annotations

from typing import Any

import grpc

from rallypoint.serving.bounded import bounded
from rallypoint.serving.errors import ServiceError

# Seconds, before the subscriber's stream is ended. It loses nothing by that: it comes back, and is told the latest.
WRITE_TIMEOUT = 10.0


class Subscriber:
    """Who receives the answers of one stream, each within a time.

    The headers go before the first answer and wait for nobody: what a client doesn't read doesn't hold them up. Sent
    with an answer that is given up, they would be taken for unsent: gRPC would send them again, fail, and the stream
    would end with no status.
    """

    __slots__ = ("_context", "_greeted", "_timeout")

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], timeout: float = WRITE_TIMEOUT) -> None:
        """Nothing is sent yet.

        Args:
            context: The stream's.
            timeout: Seconds for each answer.
        """
        self._context = context
        self._timeout = timeout
        self._greeted = False

    async def greet(self) -> None:
        """Send the headers, by which a client learns that its stream is there."""
        self._greeted = True
        await self._context.send_initial_metadata(())

    async def tell(self, message: object) -> None:
        """Send an answer.

        Raises:
            ServiceError: SUBSCRIBER_TOO_SLOW: it was not taken, and the stream is to be ended.
        """
        if not self._greeted:
            await self.greet()
        try:
            await bounded(self._context.write(message), self._timeout)
        except TimeoutError:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "SUBSCRIBER_TOO_SLOW",
                f"the subscriber took no message for {self._timeout:g} s: connect again and resume",
            ) from None
