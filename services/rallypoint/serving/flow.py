"""How often somebody may do something: a token bucket, and one bucket for each of many. Pure: no clock."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import grpc

from rallypoint.rpc.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Rate:
    """So many a second for ever, and so many at once."""

    per_second: float
    """More than 0."""

    burst: int
    """At least 1: what may come at once after a pause long enough."""

    def __post_init__(self) -> None:
        if not self.per_second > 0 or self.burst < 1:
            raise ValueError(f"no such rate: {self.per_second:g} a second, {self.burst} at once")


class Bucket:
    """What one party has used up of its rate."""

    __slots__ = ("_at", "_burst", "_level", "_per_second")

    def __init__(self, rate: Rate, now: float) -> None:
        """A bucket of which nothing is used up.

        Args:
            rate: what it allows.
            now: monotonic seconds.
        """
        self._per_second = rate.per_second
        self._burst = rate.burst
        self._level = 0.0
        self._at = now

    def take(self, now: float) -> float:
        """Uses one up; returns 0, or if there is none the seconds until there is one again. Then none is used up."""
        level = max(0.0, self._level - (now - self._at) * self._per_second)
        self._level, self._at = level, now
        excess = level + 1 - self._burst
        if excess > 0:
            return excess / self._per_second
        self._level = level + 1
        return 0.0


class Buckets:
    """A bucket for each of the parties seen last.

    Whoever was not seen for longer than all the others has its bucket dropped when there are too many, and comes back
    with a fresh one. So memory is bounded, and a party gains by that only if so many others came meanwhile.
    """

    def __init__(self, rate: Rate, most: int) -> None:
        """No bucket yet.

        Args:
            rate: what each allows.
            most: how many to keep; at least 1. Each takes about 250 bytes, and those of its name.
        """
        self._rate = rate
        self._most = most
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, party: str, now: float) -> float:
        """Uses one up of a party's bucket; see `Bucket.take`."""
        bucket = self._buckets.get(party)
        if bucket is None:
            bucket = self._buckets[party] = Bucket(self._rate, now)
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(party)
        return bucket.take(now)


# ---- Waits that are bounded by a time, many at once: as `asyncio.timeout`, with one timer for all that share a time.
#
# Most waits are over long before their time, and a timer for each costs more than the rest of them: a tenth of
# what a
# service did while a thousand nodes connected.


_T = TypeVar("_T")


class _Wait:
    """One wait: of a task that is let go at a deadline, unless it has gone by then (None)."""

    __slots__ = ("cancelling", "deadline", "over", "task")

    def __init__(self, task: asyncio.Task[Any], deadline: float) -> None:
        self.task: asyncio.Task[Any] | None = task
        self.deadline = deadline
        self.cancelling = task.cancelling()
        self.over = False


class _TimedWaits:
    """The waits of one loop that share a time: they come due in the order in which they began."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._waits: deque[_Wait] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> _Wait:
        """Begin to wait, in the task that calls."""
        task = asyncio.current_task(self._loop)
        assert task is not None, "only a task can be let go"
        wait = _Wait(task, self._loop.time() + self._seconds)
        waits = self._waits
        while waits and waits[0].task is None:
            waits.popleft()
        waits.append(wait)
        if self._timer is None:
            self._timer = self._loop.call_at(wait.deadline, self._check)
        return wait

    def _check(self) -> None:
        now = self._loop.time()
        while self._waits and (self._waits[0].task is None or self._waits[0].deadline <= now):
            wait = self._waits.popleft()
            if wait.task is not None:
                wait.over = True
                wait.task.cancel()
        self._timer = self._loop.call_at(self._waits[0].deadline, self._check) if self._waits else None


_waits: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, _TimedWaits]] = WeakKeyDictionary()


async def bounded(awaitable: Awaitable[_T], seconds: float) -> _T:
    """Wait for something for so many seconds at most. For times of which there are few: each is kept in mind.

    Raises:
        TimeoutError: It took longer, and was cancelled.
    """
    loop = asyncio.get_running_loop()
    of_loop = _waits.get(loop)
    if of_loop is None:
        of_loop = _waits[loop] = {}
    waits = of_loop.get(seconds)
    if waits is None:
        waits = of_loop[seconds] = _TimedWaits(loop, seconds)
    wait = waits.begin()
    task = wait.task
    try:
        return await awaitable
    except asyncio.CancelledError:
        # Cancelled by nobody else as well: as asyncio.timeout tells the two apart.
        if wait.over and task is not None and task.uncancel() <= wait.cancelling:
            raise TimeoutError from None
        raise
    finally:
        wait.task = None


# ---- First messages of streams: waited for, but neither for ever nor by a server that is going away.


_M = TypeVar("_M")


class ServerDraining(Exception):
    """The server is going away, and the stream has not said what it is for."""


class UnopenedStreams:
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
            ServerDraining: The server is going away; or it was when this was called.
            StopAsyncIteration: The client has ended the stream.
            ServiceError: UNAVAILABLE, FIRST_MESSAGE_LATE: None came in time. Client, server or network may have
                stalled: that is no reason to refuse the client for good.
        """
        task = asyncio.current_task()
        assert task is not None, "a stream is served by a task"
        if self._over:
            raise ServerDraining
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
                raise ServerDraining from None
            raise
        finally:
            self._waiting.pop(task, None)

    def end(self) -> None:
        """Wait no more."""
        self._over = True
        while self._waiting:
            task, _ = self._waiting.popitem()
            task.cancel()


# ---- How long a stream waits for a subscriber to take a message.


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

    async def send(self, message: object) -> None:
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
