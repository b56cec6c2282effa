"""Unary calls that may be repeated, to any replica of a service that replies to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from rallypoint.rpc.errors import GONE, MOVED, UNHEARD, ServiceError, decode
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.pace import Pace
from rallypoint.rpc.replica_client import ReplicaClient, ReplicaConnection

_LOG_AFTER = 10.0  # seconds without a reply after which the client logs the reason

_Stub = TypeVar("_Stub")
_Response = TypeVar("_Response")

_log = get_logger(__name__)


class Attempts:
    """The attempts at one call."""

    def __init__(self, pace: Pace, timeout: float, service: str, client: ReplicaClient) -> None:
        """Begin.

        Args:
            timeout: Seconds from now in which attempts are made.
            service: Name of the service, one word: "store" gives the reason STORE_UNAVAILABLE at the end.
        """
        self._replicas = client
        self._search = client.search()
        self._pace = pace
        self._timeout = timeout
        self._service = service
        self._deadline = pace.clock() + timeout
        self._backoff = pace.backoff()
        self._last = "no connection"

    def remaining(self) -> float:
        """Seconds left for the next attempt."""
        return max(0.0, self._deadline - self._pace.clock())

    async def connection(self) -> ReplicaConnection:
        """Return a connection to the next replica to call.

        Raises:
            ServiceError: There is no connection; see ReplicaClient.connect.
        """
        return await self._replicas.connect(self._search, self.remaining())

    async def failed(self, error: ServiceError) -> None:
        """Wait until the next attempt; return at once if another replica is to be called.

        Raises:
            ServiceError: No attempt is left: `error` if it is final, otherwise UNAVAILABLE with the service's reason.
        """
        if not _is_retryable(error):
            raise error
        if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            self._last = error.message
        if self._search.at_once and self.remaining() > 0:
            return
        pause = (error.retry_after or 0.0) + self._backoff.next()
        self._replicas.rest(self._search)
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
        # Without a reason from the service it is our own deadline, which ends the attempts anyway.
        return error.reason == error.code.name
    return error.code in GONE


class RetryingCalls(Generic[_Stub]):
    """Calls of one service. Each is repeated until the service replies, so it must be safe to repeat."""

    def __init__(
        self, client: ReplicaClient, stub: Callable[[grpc.aio.Channel], _Stub], service: str, pace: Pace
    ) -> None:
        """Set up.

        Args:
            service: Name of the service, one word: "store" gives the reason STORE_UNAVAILABLE at the end.
        """
        self._replicas = client
        self._stub = stub
        self._service = service
        self._pace = pace
        self._outage_logged = False

    async def call(
        self,
        pick: Callable[[_Stub], Callable[..., Awaitable[_Response]]],
        request: Any,
        timeout: float,
        before_attempt: Callable[[], None] = lambda: None,
        *,
        waits: bool = False,
    ) -> _Response:
        """Call a method until it replies; return the response.

        Args:
            pick: Returns the method of a stub.
            timeout: Seconds for all attempts.
            before_attempt: Called before each attempt.
            waits: The service may take its time; otherwise the next replica is called after a timeout.

        Raises:
            ServiceError: See Attempts.failed.
        """
        began = self._pace.clock()
        attempts = Attempts(self._pace, timeout, self._service, self._replicas)
        while True:
            before_attempt()
            try:
                connection = await attempts.connection()
            except ServiceError as no_connection:
                error = no_connection
            else:
                began_attempt = self._pace.clock()
                try:
                    response = await self._one(connection, pick, request, attempts.remaining(), waits=waits)
                    connection.answered()
                    self._outage_logged = False
                    return response
                except grpc.aio.AioRpcError as failure:
                    error = decode(failure)
                    ours = error.reason == grpc.StatusCode.DEADLINE_EXCEEDED.name
                    # A call with less time than the timeout proves nothing: do not mark the replica for it.
                    if not ours or self._pace.clock() - began_attempt >= connection.timeout:
                        connection.failed(error)
                finally:
                    connection.hang_up()
            if not self._outage_logged and self._pace.clock() - began >= _LOG_AFTER:
                self._outage_logged = True
                _log.warning(
                    "no answer yet, trying again",
                    service=self._service,
                    endpoint=str(self._replicas),
                    error=error.message,
                )
            await attempts.failed(error)

    async def _one(
        self,
        connection: ReplicaConnection,
        pick: Callable[[_Stub], Callable[..., Awaitable[_Response]]],
        request: Any,
        remaining: float,
        *,
        waits: bool,
    ) -> _Response:
        timeout = remaining if waits else min(remaining, connection.timeout)
        return await pick(connection.stub(self._stub))(
            request, timeout=timeout, wait_for_ready=connection.waits
        )


# ---- One operation at any replica that replies, for callers that wait no longer than necessary.


_Answer = TypeVar("_Answer")


async def call_any(
    client: ReplicaClient,
    stub: Callable[[grpc.aio.Channel], _Stub],
    operation: Callable[[_Stub], Awaitable[_Answer]],
) -> _Answer:
    """Call each replica until one replies; wait for a run that has no owner yet. Limit it with a timeout.

    Args:
        operation: Makes the calls; from the first one again if a replica was lost, so it must be safe to repeat.

    Raises:
        ServiceError: Every replica refused or could not be reached; the error of the last replica that replied.
    """
    pace = Pace()
    search = client.search()
    backoff = pace.backoff()
    last_reply: ServiceError | None = None
    while True:
        try:
            connection = await client.connect(search)
        except ServiceError as no_connection:
            error = no_connection
        else:
            try:
                answer = await _call_once(connection, connection.stub(stub), operation)
                connection.answered()
                return answer
            except ServiceError as failure:
                error = failure
                connection.failed(error)
            finally:
                connection.hang_up()
        if error.reason not in UNHEARD:
            last_reply = error
        if search.at_once:
            continue
        if error.reason not in MOVED:
            # An error from a replica that answered is more useful than a connection error: raise that one.
            raise last_reply or error
        client.rest(search)
        await pace.sleep((error.retry_after or 0.0) + backoff.next())


async def _call_once(
    connection: ReplicaConnection, stub: _Stub, operation: Callable[[_Stub], Awaitable[_Answer]]
) -> _Answer:
    timeout = connection.timeout
    try:
        async with asyncio.timeout(timeout if timeout < float("inf") else None) as bound:
            return await operation(stub)
    except TimeoutError:
        if not bound.expired():
            raise
        message = f"{connection.address} gave no answer within {timeout:g} s"
        raise ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_ANSWER", message) from None
    except grpc.aio.AioRpcError as failure:
        raise decode(failure) from None
