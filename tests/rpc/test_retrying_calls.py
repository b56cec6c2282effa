"""A call is repeated until a replica answers, each attempt with the time that is left; a refusal ends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc import StatusCode

from rallypoint.rpc.calls import RetryingCalls
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.pace import Pace
from rallypoint.rpc.replica_client import ReplicaClient


class Timeline:
    """A clock that advances by sleeping; `script`: for each attempt, the code of the service's error or None."""

    def __init__(self, *script: StatusCode | None) -> None:
        self.now = 1000.0
        self.left: list[float] = []
        self._script = list(script)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def method(self, request: str, *, timeout: float, wait_for_ready: bool) -> str:
        assert wait_for_ready, "there is nobody else to ask"
        self.left.append(timeout)
        code = self._script.pop(0)
        if code is not None:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(code, nothing, nothing, details="gone")
        return f"{request} answered"

    def call(self, before: Callable[[], None] = lambda: None) -> Awaitable[str]:
        pace = Pace(clock=lambda: self.now, sleep=self.sleep, draw=lambda: 1.0)
        channel: Any = object()
        asking: RetryingCalls[Timeline] = RetryingCalls(
            ReplicaClient.over(channel), lambda _: self, "store", pace
        )
        return asking.call(lambda stub: stub.method, "call", 60.0, before)


async def test_a_call_is_repeated_until_it_answers() -> None:
    """Each attempt has the time that is left, and waits for a connection."""
    timeline = Timeline(StatusCode.UNAVAILABLE, StatusCode.UNAVAILABLE, None)
    prepared: list[float] = []
    assert await timeline.call(lambda: prepared.append(timeline.now)) == "call answered"
    assert timeline.left == pytest.approx([60.0, 60.0 - 0.05, 60.0 - 0.15])
    assert prepared == pytest.approx([1000.0, 1000.05, 1000.15])


async def test_a_refusal_is_the_last_word() -> None:
    timeline = Timeline(StatusCode.FAILED_PRECONDITION)
    with pytest.raises(ServiceError, match="gone"):
        await timeline.call()


async def test_a_long_wait_is_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    """The line has the address; it is not repeated with every attempt."""
    timeline = Timeline(*[StatusCode.UNAVAILABLE] * 30, None)
    with caplog.at_level("WARNING"):
        assert await timeline.call() == "call answered"
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("no answer yet, trying again")
