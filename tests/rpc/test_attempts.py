"""A call is repeated as long as that can help, and no longer than its timeout."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from rallypoint.rpc.backoff import FIRST_BACKOFF, LONGEST_BACKOFF
from rallypoint.rpc.calls import Attempts
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.pace import Pace
from rallypoint.rpc.replica_client import ReplicaClient


class Timeline:
    """A clock that advances by sleeping."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def attempts(self, timeout: float) -> Attempts:
        pace = Pace(clock=lambda: self.now, sleep=self.sleep, draw=lambda: 0.5)
        return Attempts(pace, timeout, "store", ReplicaClient("unix:/nowhere"))


def gone(retry_after: float | None = None) -> ServiceError:
    return ServiceError(StatusCode.UNAVAILABLE, "GONE", "it is gone", retry_after=retry_after)


async def test_backing_off_grows_jittered_to_a_bound() -> None:
    """It is drawn from a range that doubles; the delay that the service requests is added."""
    timeline = Timeline()
    attempts = timeline.attempts(3600.0)
    for _ in range(9):
        await attempts.failed(gone(retry_after=5.0))
    assert timeline.slept == [
        5.0 + min(LONGEST_BACKOFF, FIRST_BACKOFF * 2**attempt) / 2 for attempt in range(9)
    ]


async def test_attempts_end_at_the_timeout() -> None:
    """It ends at the timeout, with the service's last error; a deadline that passed is no such error."""
    timeline = Timeline()
    attempts = timeline.attempts(10.0)
    await attempts.failed(gone(retry_after=6.0))
    with pytest.raises(
        ServiceError, match=r"the store service gave no answer for 10 s \(it is gone\)"
    ) as refused:
        await attempts.failed(
            ServiceError(StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "too late", retry_after=6.0)
        )
    assert (refused.value.code, refused.value.reason) == (StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
    assert timeline.now == 1010.0
    assert attempts.remaining() == 0.0


@pytest.mark.parametrize(
    ("code", "reason", "retry_after", "again"),
    [
        (StatusCode.UNAVAILABLE, "DRAINING", None, True),
        (StatusCode.CANCELLED, "CANCELLED", None, True),
        (StatusCode.INTERNAL, "INTERNAL", None, True),
        (StatusCode.UNKNOWN, "UNKNOWN", None, True),
        (StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", None, True),
        (StatusCode.DEADLINE_EXCEEDED, "KEY_WAIT_TIMED_OUT", None, False),
        (StatusCode.RESOURCE_EXHAUSTED, "STORE_BUSY", 0.1, True),
        (StatusCode.RESOURCE_EXHAUSTED, "RUN_STORE_FULL", None, False),
        (StatusCode.FAILED_PRECONDITION, "LEASE_LOST", None, False),
        (StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", None, False),
    ],
    ids=str,
)
async def test_only_temporary_errors_are_retried(
    code: StatusCode, reason: str, retry_after: float | None, again: bool
) -> None:
    """It may after a broken connection, or an error that the service marks as temporary; any other refusal is final."""
    timeline = Timeline()
    error = ServiceError(code, reason, "a sentence", retry_after=retry_after)
    if again:
        await timeline.attempts(60.0).failed(error)
    else:
        with pytest.raises(ServiceError) as refused:
            await timeline.attempts(60.0).failed(error)
        assert refused.value is error
    assert bool(timeline.slept) == again
