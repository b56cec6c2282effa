"""Unary calls that may be repeated, to whichever replica of a service answers them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from rallypoint.serving.attempts import Attempts, Pace
from rallypoint.serving.errors import ServiceError, decode
from rallypoint.serving.logs import get_logger
from rallypoint.serving.switchboard import Line, Switchboard

_TELL_AFTER = 10.0  # seconds without an answer after which whoever reads the log is told why nothing goes on

_Stub = TypeVar("_Stub")
_Response = TypeVar("_Response")

_log = get_logger(__name__)


class Asking(Generic[_Stub]):
    """Calls of one service. Each is repeated until it is answered: only for what may be done twice."""

    def __init__(
        self, board: Switchboard, stub: Callable[[grpc.aio.Channel], _Stub], service: str, pace: Pace
    ) -> None:
        """Set up.

        Args:
            board: Where the service is.
            stub: Makes its stub.
            service: What is called, in one word: "store" is refused with STORE_UNAVAILABLE in the end.
            pace: How time passes.
        """
        self._board = board
        self._stub = stub
        self._service = service
        self._pace = pace
        self._told = False

    def attempts(self, timeout: float) -> Attempts:
        """The attempts at something that begins now and may take so many seconds."""
        return Attempts(self._pace, timeout, self._service, self._board)

    async def call(
        self,
        pick: Callable[[_Stub], Callable[..., Awaitable[_Response]]],
        request: Any,
        timeout: float,
        before_attempt: Callable[[], None] = lambda: None,
        *,
        waits: bool = False,
    ) -> _Response:
        """Call a method until it answers; what it answers.

        Args:
            pick: The method, of a stub.
            request: What it gets.
            timeout: Seconds for it all.
            before_attempt: Called before each attempt.
            waits: The service may take its time; otherwise one that is silent is left for another.

        Raises:
            ServiceError: See Attempts.failed.
        """
        began = self._pace.clock()
        attempts = self.attempts(timeout)
        while True:
            before_attempt()
            try:
                line = await attempts.line()
            except ServiceError as no_connection:
                error = no_connection
            else:
                began_attempt = self._pace.clock()
                try:
                    response = await self._one(line, pick, request, attempts.remaining(), waits=waits)
                    line.answered()
                    self._told = False
                    return response
                except grpc.aio.AioRpcError as failure:
                    error = decode(failure)
                    ours = error.reason == grpc.StatusCode.DEADLINE_EXCEEDED.name
                    # A call that had less time than that knows nothing: others must not shun the place for it.
                    if not ours or self._pace.clock() - began_attempt >= line.patience:
                        line.failed(error)
                finally:
                    line.hang_up()
            if not self._told and self._pace.clock() - began >= _TELL_AFTER:
                self._told = True
                _log.warning(
                    "no answer yet, trying again",
                    service=self._service,
                    endpoint=str(self._board),
                    error=error.message,
                )
            await attempts.failed(error)

    async def _one(
        self,
        line: Line,
        pick: Callable[[_Stub], Callable[..., Awaitable[_Response]]],
        request: Any,
        remaining: float,
        *,
        waits: bool,
    ) -> _Response:
        timeout = remaining if waits else min(remaining, line.patience)
        return await pick(line.stub(self._stub))(request, timeout=timeout, wait_for_ready=line.alone)
