"""The agent's end of its workers' timers: a Unix socket on one side, the timer service's client on the other.

docs/timer-socket.md is what workers have to know of it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from rallypoint.serving.logs import get_logger
from rallypoint.timer import wire
from rallypoint.timer.client import ExpiredTimer, OnExpired

log = get_logger(__name__)

# Connections that wait to be accepted. All workers of a host start at once, data loaders included.
_BACKLOG = 1024
# Messages taken from one connection before the others get their turn.
_TURN = 64
# Seconds that a connection is left alone after it was read. A worker that enters a scope every 100 us would
# otherwise wake the agent, and pay for it, each time. Messages carry their time, so no deadline suffers.
_REST = 0.005
# No queue of the kernel holds as many messages as this: what comes later was sent later.
_MOST_QUEUED = 4096
# Seconds until the next attempt to accept, when the process has no descriptor left.
_OUT_OF_FILES = 1.0
_CREDENTIALS = struct.Struct("3i")


class TimerSocketError(Exception):
    """The socket cannot be had. One line that says why."""


class Timers(Protocol):
    """What the socket needs of a rallypoint.timer.client.TimerClient."""

    def start(self, on_expired: OnExpired) -> None:
        """Begins to talk with the service."""

    async def close(self) -> None:
        """Ends."""

    def acquire(self, worker_id: str, scope: str, after: float, since: float | None = None) -> None:
        """Starts a timer."""

    def release(self, worker_id: str, scope: str) -> None:
        """Ends a timer."""

    def clear(self, worker_id: str) -> None:
        """Ends all timers of a worker."""

    def holds(self, expired: ExpiredTimer) -> bool:
        """Whether the timer that ran out is still the one that the worker holds."""


@dataclass(frozen=True, slots=True)
class TimerLimits:
    """What one worker, its child processes included, may take of its agent."""

    # Timers at once. Default 1024. What is beyond is not guarded, which the log says.
    timers: int = 1024
    # Connections at once, one per process. Default 256: data loaders of a very large host. Each costs a file
    # descriptor of the agent.
    connections: int = 256


@dataclass(slots=True, eq=False)
class _Worker:
    worker_id: str
    connections: set[_Connection] = field(default_factory=set)
    # The scopes in use, as the service knows them.
    scopes: set[str] = field(default_factory=set)
    judging: asyncio.Lock = field(default_factory=asyncio.Lock)
    warned: bool = False


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    pid: int
    worker: _Worker
    # token -> (what the worker calls the scope, what the service calls it)
    timers: dict[int, tuple[str, str]] = field(default_factory=dict)
    # Set while it is left alone.
    resting: asyncio.TimerHandle | None = None


class TimerSocket:
    """Takes timers from the workers of this host and has those reaped that let one run out.

    Belongs to one event loop. A timer ends when its worker releases it, when its connection ends, and when its
    worker is cleared; none of these accuses anybody.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        timers: Timers,
        *,
        worker_of: Callable[[int], str | None],
        on_expired: Callable[[str, str, float, float], Awaitable[bool | None]],
        limits: TimerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes a socket that nobody can connect to yet.

        Args:
            path: where to listen; what workers get as RALLYPOINT_TIMER_SOCKET. Others are kept out by the
                permissions of its directory.
            timers: a client of the timer service, not started yet.
            worker_of: the worker to whom a process of this host belongs, being the worker or a descendant of
                it; None if there is none, and its connection is refused. Called once per connection.
            on_expired: has the worker reaped: (worker_id, scope, seconds it was given, seconds since its
                deadline). One call at a time per worker. False: it could not, try again later.
            limits: see TimerLimits.
            clock: CLOCK_MONOTONIC, in seconds.
        """
        self.path = os.fspath(path)
        self._timers = timers
        self._worker_of = worker_of
        self._on_expired = on_expired
        self._limits = limits or TimerLimits()
        self._clock = clock
        self._listener: socket.socket | None = None
        self._again: asyncio.TimerHandle | None = None
        self._workers: dict[str, _Worker] = {}
        self._suffixes: defaultdict[str, int] = defaultdict(int)
