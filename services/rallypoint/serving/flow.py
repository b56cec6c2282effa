"""Limits of clients: rates, and operations at a time; time limits of waits, first messages and writes."""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import grpc

from rallypoint.rpc.errors import ServiceError

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
"""The context of a request: its connection, deadline and metadata."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate limit: per second in the long run, and at once."""

    per_second: float
    """More than 0."""

    burst: int
    """Events, or bytes, that may come at once after a long enough pause; at least 1."""

    def __post_init__(self) -> None:
        if not self.per_second > 0 or self.burst < 1:
            raise ValueError(f"no such rate: {self.per_second:g} a second, {self.burst} at once")


class Bucket:
    """The used part of one client's rate."""

    __slots__ = ("_at", "_burst", "_level", "_per_second")

    def __init__(self, rate: Rate, now: float) -> None:
        """Begin with an unused rate; `now`: monotonic seconds."""
        self._per_second = rate.per_second
        self._burst = rate.burst
        self._level = 0.0
        self._at = now

    def take(self, now: float, amount: int = 1) -> float:
        """Use an amount; return 0, or, if less is left, the seconds until it is there; then none is used.

        An amount above the burst counts as the burst, so that it is there some time.
        """
        level = max(0.0, self._level - (now - self._at) * self._per_second)
        self._level, self._at = level, now
        filled = level + min(amount, self._burst)
        if filled > self._burst:
            return (filled - self._burst) / self._per_second
        self._level = filled
        return 0.0


class Buckets:
    """A bucket for each of the clients seen last.

    If there are too many, that of the client that was not seen for longest is dropped, and the client later begins with
    a new one. So memory is limited, and a client gains by it only if that many others came in the meantime.
    """

    def __init__(self, rate: Rate, most: int) -> None:
        """Begin without buckets.

        Args:
            rate: the limit of each client.
            most: how many buckets to keep; at least 1. Each takes about 250 bytes, plus the client's name.
        """
        self._of = lru_cache(most)(lambda client: Bucket(rate, -math.inf))

    def __len__(self) -> int:
        return self._of.cache_info().currsize

    def take(self, client: str, now: float, amount: int = 1) -> float:
        """Use an amount of a client's bucket; see `Bucket.take`."""
        return self._of(client).take(now, amount)


# ---- The client behind a gRPC peer address, for its rate of calls.


# A connection keeps its address, and makes many calls. 65,536: several times the connections of a large service;
# each entry takes about 300 bytes.
@lru_cache(maxsize=65_536)
def client_of(peer: str) -> str:
    """Return the client behind `context.peer()`: its host, without the port.

    An IPv6 client is its /64, because a host with one address of it can use all. Unix sockets have no address, so all
    clients of the service's own socket count as one. Certificates and tokens do not count: a fleet often shares one,
    and the address of a connection cannot be forged.
    """
    scheme, _, place = peer.partition(":")
    if scheme == "ipv4":
        return place.rpartition(":")[0]
    if scheme == "ipv6":
        # As in ipv6:%5Bfe80::1%25eth0%5D:50051; only some versions encode the brackets.
        host = unquote(place).rpartition(":")[0].strip("[]").partition("%")[0]
        try:
            return str(ipaddress.IPv6Network((host, 64), strict=False))
        except ValueError:
            return host
    return scheme


# ---- Waits with a time limit, many at once: like `asyncio.timeout`, but with one timer for all that share a limit.
#
# Most waits end long before their limit, and a timer for each costs more than the rest of them: a tenth of the time of
# a service while a thousand nodes connected.


_T = TypeVar("_T")


class _Wait:
    """One wait of a task, which is cancelled at a deadline; `task` is None once the wait has ended."""

    __slots__ = ("cancelling", "deadline", "over", "task")

    def __init__(self, task: asyncio.Task[Any], deadline: float) -> None:
        self.task: asyncio.Task[Any] | None = task
        self.deadline = deadline
        self.cancelling = task.cancelling()
        self.over = False


class _TimedWaits:
    """The waits of one loop with the same limit: they expire in the order in which they began."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._waits: deque[_Wait] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> _Wait:
        """Begin a wait of the calling task."""
        task = asyncio.current_task(self._loop)
        assert task is not None, "only a task can be cancelled"
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
    """Wait for `awaitable` for at most `seconds`. Use few different limits: each one stays in memory.

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
        # Cancelled by nothing else: the same distinction as in asyncio.timeout.
        if wait.over and task is not None and task.uncancel() <= wait.cancelling:
            raise TimeoutError from None
        raise
    finally:
        wait.task = None


# ---- Many tasks that have something to do at the same time.


class Turns:
    """Limits how many operations run at the same time. The others wait, in the order in which they came.

    If a change wakes hundreds of tasks and each of them sends a message, gRPC has hundreds of sends to complete, and
    everything else waits behind them.
    """

    def __init__(self, most: int, hold: float = 0.02) -> None:
        """Begin with no operation.

        Args:
            most: operations at a time; at least 1.
            hold: seconds after which an operation no longer counts, so that one whose client does not read holds
                nothing up.
        """
        self._free = asyncio.Semaphore(most)
        self._hold = hold

    def turn(self) -> _Turn:
        """Return a context for one operation, which waits for its turn."""
        return _Turn(self, self._hold)

    async def take(self) -> None:
        """Return when one more operation may run."""
        await self._free.acquire()

    def give_back(self) -> None:
        """Let the next operation run."""
        self._free.release()


class _Turn:
    """One operation of `Turns`."""

    __slots__ = ("_hold", "_timer", "_turns")

    def __init__(self, turns: Turns, hold: float) -> None:
        self._turns: Turns | None = turns
        self._hold = hold
        self._timer: asyncio.TimerHandle

    async def __aenter__(self) -> None:
        assert self._turns is not None, "a turn is taken once"
        await self._turns.take()
        self._timer = asyncio.get_running_loop().call_later(self._hold, self._end)

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        self._end()

    def _end(self) -> None:
        if self._turns is not None:
            self._turns.give_back()
            self._turns = None


# ---- First messages of streams: the wait has a limit, and ends when the server drains.


FIRST_MESSAGE_TIMEOUT = 10.0
"""Seconds that a stream has for its first message."""

_M = TypeVar("_M")


class ServerDraining(Exception):
    """The server drains: it accepts no more requests, nor streams that have not sent their first message."""


class UnopenedStreams:
    """The streams of a service that have not received their first message.

    Without this, one client that was cut off between its call and its first message would delay the end of the server
    for the whole time limit of that message.
    """

    def __init__(self, seconds: float) -> None:
        """Set the limit for each first message, seconds."""
        self._seconds = seconds
        # Each with the number of earlier cancellations by others.
        self._waiting: dict[asyncio.Task[Any], int] = {}
        self._over = False

    async def first(self, requests: AsyncIterator[_M]) -> _M:
        """Return the first message of a stream.

        Raises:
            ServerDraining: The server drains, or drained already when this was called.
            StopAsyncIteration: The client has ended the stream.
            ServiceError: UNAVAILABLE, FIRST_MESSAGE_LATE: None came in time. Client, server or network may have
                stalled, so the client may try again.
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
            # Cancelled by nothing else: the same distinction as in asyncio.timeout.
            if task not in self._waiting and task.uncancel() <= cancelling:
                raise ServerDraining from None
            raise
        finally:
            self._waiting.pop(task, None)

    def end(self) -> None:
        """End all waits."""
        self._over = True
        while self._waiting:
            task, _ = self._waiting.popitem()
            task.cancel()


# ---- Time limit for a subscriber to receive a message.


# Seconds until the subscriber's stream is ended. It loses nothing: it reconnects, and receives the latest state.
WRITE_TIMEOUT = 10.0


class Subscriber:
    """The client of one stream; each message to it has a time limit.

    The headers are sent before the first message and do not wait for the client to read. If they were sent with a
    message that is given up, gRPC would regard them as unsent, send them again, fail, and the stream would end without
    a status.
    """

    __slots__ = ("_context", "_greeted")

    def __init__(self, context: Context) -> None:
        """Begin; nothing is sent yet."""
        self._context = context
        self._greeted = False

    async def greet(self) -> None:
        """Send the headers, which confirm the stream to the client. A cancellation waits until they are sent."""
        self._greeted = True
        sending = asyncio.ensure_future(self._context.send_initial_metadata(()))
        try:
            await asyncio.shield(sending)
        finally:
            await asyncio.gather(sending, return_exceptions=True)

    async def send(self, message: object) -> None:
        """Send a message.

        Raises:
            ServiceError: SUBSCRIBER_TOO_SLOW: the client did not read it, and the stream must be ended.
        """
        if not self._greeted:
            await self.greet()
        try:
            await bounded(self._context.write(message), WRITE_TIMEOUT)
        except TimeoutError:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "SUBSCRIBER_TOO_SLOW",
                f"the subscriber took no message for {WRITE_TIMEOUT:g} s: connect again and resume",
            ) from None
