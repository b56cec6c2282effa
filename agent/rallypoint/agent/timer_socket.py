"""The agent's end of its workers' timers: a Unix socket on one side, the timer service's client on the other.

docs/timer-socket.md is what workers have to know of it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

from rallypoint.serving.logs import get_logger
from rallypoint.timer import wire
from rallypoint.timer.client import ExpiredTimer, OnExpired

log = get_logger(__name__)

# Connections that wait to be accepted. All workers of a host start at once, data loaders included.
_BACKLOG = 1024
# sun_path of Linux holds 108 bytes, the closing NUL included.
_LONGEST_PATH = 107
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
    # Seconds that a process nobody knows may wait to be introduced. Default 1. A worker can be quicker with its
    # first timer than the news of its start is; a second is long for news, and short for a stranger.
    introduction: float = 1.0
    # Strangers that may wait at once. Default 64; each costs a file descriptor.
    strangers: int = 64


@dataclass(slots=True, eq=False)
class _Worker:
    worker_id: str
    connections: set[_Connection] = field(default_factory=set)
    # The scopes in use, as the service knows them.
    scopes: set[str] = field(default_factory=set)
    warned: bool = False


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    pid: int
    worker: _Worker
    # token -> (what the worker calls the scope, what the service calls it)
    timers: dict[int, tuple[str, str]] = field(default_factory=dict)
    # While it is left alone: when it is read next.
    resting: asyncio.TimerHandle | None = None
    closed: bool = False


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
                it; None if there is none. Who stays unknown is refused.
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
        # Connections whose process nobody knows yet, with the end of their waiting.
        self._strangers: dict[socket.socket, asyncio.TimerHandle] = {}
        # One lock per worker that is being judged.
        self._judging: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self) -> None:
        """Listens, and begins to talk with the timer service.

        Raises:
            TimerSocketError: the path is too long or can't be used.
        """
        if (size := len(os.fsencode(self.path))) > _LONGEST_PATH:
            raise TimerSocketError(
                f"the timer socket's path {self.path} has {size} bytes, a socket has at most {_LONGEST_PATH}; "
                "use a shorter folder"
            )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(self.path)
            os.chmod(self.path, 0o600)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise TimerSocketError(f"can't listen for workers at {self.path}: {error.strerror}") from error
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        self._timers.start(self._judge)

    async def stop(self) -> None:
        """Ends all timers, closes every connection, and stops listening."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        if self._again is not None:
            self._again.cancel()
        for connected in list(self._strangers):
            self._refuse(connected)
        for worker_id in list(self._workers):
            self.clear(worker_id)
        await self._timers.close()

    def introduce(self) -> None:
        """More workers have become known: looks again at who has connected and was unknown."""
        for connected in list(self._strangers):
            self._welcome(connected)

    def clear(self, worker_id: str) -> None:
        """A worker is gone: ends its timers and its connections, those of its descendants included."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            for connection in list(worker.connections):
                self._close(connection)
        self._timers.clear(worker_id)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_TURN):
            try:
                connected, _address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Without a pause, a process that has no descriptor left would try again and again.
                log.error("can't take a connection of a worker", reason=error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                self._again = loop.call_later(
                    _OUT_OF_FILES, loop.add_reader, listener, self._accept, listener
                )
                return
            if not self._welcome(connected):
                self._hold(connected)

    def _hold(self, connected: socket.socket) -> None:
        """Keeps a connection unread until its process is introduced, or it is time to refuse it."""
        if len(self._strangers) >= self._limits.strangers:
            self._refuse(connected)
            return
        refuse = asyncio.get_running_loop().call_later(self._limits.introduction, self._refuse, connected)
        self._strangers[connected] = refuse

    def _refuse(self, connected: socket.socket) -> None:
        """Ends a connection of a stranger, or of a child of a worker that is gone already."""
        if (waiting := self._strangers.pop(connected, None)) is not None:
            waiting.cancel()
        log.info("refused a process that belongs to no worker", pid=_peer(connected))
        connected.close()

    def _welcome(self, connected: socket.socket) -> bool:
        """Takes a worker's connection; false if nobody knows the process."""
        pid = _peer(connected)
        try:
            worker_id = self._worker_of(pid)
        except Exception:
            log.exception("could not find the worker of a process", pid=pid)
            worker_id = None
        if worker_id is None:
            return False
        if (waiting := self._strangers.pop(connected, None)) is not None:
            waiting.cancel()
        worker = self._workers.setdefault(worker_id, _Worker(worker_id))
        if len(worker.connections) >= self._limits.connections:
            self._warn(worker, "too many processes with timers", self._limits.connections)
            connected.close()
            return True
        connected.setblocking(False)
        connection = _Connection(connected, pid, worker)
        worker.connections.add(connection)
        asyncio.get_running_loop().add_reader(connected, self._read, connection)
        return True

    def _read(self, connection: _Connection) -> None:
        if self._take(connection, _TURN) or connection.closed:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(connection.socket)
        connection.resting = loop.call_later(_REST, self._wake, connection)

    def _wake(self, connection: _Connection) -> None:
        connection.resting = None
        asyncio.get_running_loop().add_reader(connection.socket, self._read, connection)

    def _take(self, connection: _Connection, most: int) -> bool:
        """Takes messages that wait, at most so many. Whether there may be more."""
        try:
            for _ in range(most):
                # One byte more than is allowed: the kernel cuts what is longer, and it must not pass for valid.
                message = connection.socket.recv(wire.MAX_MESSAGE_BYTES + 1)
                if not message:
                    self._close(connection)
                    return False
                self._act(connection, wire.decode(message))
        except BlockingIOError:
            return False
        except OSError:
            self._close(connection)
            return False
        except wire.MalformedMessage as error:
            log.warning(
                "closed a worker's timer connection",
                worker_id=connection.worker.worker_id,
                pid=connection.pid,
                reason=str(error),
            )
            self._close(connection)
            return False
        return True

    def _act(
        self, connection: _Connection, message: wire.Acquire | wire.Release | wire.Clear | wire.Unknown
    ) -> None:
        if isinstance(message, wire.Acquire):
            self._acquire(connection, message)
        elif isinstance(message, wire.Release):
            self._release(connection, message.token)
        elif isinstance(message, wire.Clear):
            self._release_all(connection)

    def _acquire(self, connection: _Connection, message: wire.Acquire) -> None:
        worker = connection.worker
        former = connection.timers.get(message.token)
        if former is not None and former[0] != message.scope:
            self._release(connection, message.token)
            former = None
        if former is None:
            if len(worker.scopes) >= self._limits.timers:
                self._warn(worker, "too many timers", self._limits.timers)
                return
            known_as = _free_name(message.scope, worker.scopes)
            worker.scopes.add(known_as)
            connection.timers[message.token] = (message.scope, known_as)
        else:
            known_as = former[1]
        now = self._clock()
        since = min(message.since, now) if message.since else now
        self._timers.acquire(worker.worker_id, known_as, message.after, since)

    def _release(self, connection: _Connection, token: int) -> None:
        timer = connection.timers.pop(token, None)
        if timer is not None:
            connection.worker.scopes.discard(timer[1])
            self._timers.release(connection.worker.worker_id, timer[1])

    def _release_all(self, connection: _Connection) -> None:
        for token in list(connection.timers):
            self._release(connection, token)

    def _close(self, connection: _Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        if connection.resting is not None:
            connection.resting.cancel()
        else:
            asyncio.get_running_loop().remove_reader(connection.socket)
        connection.socket.close()
        self._release_all(connection)
        worker = connection.worker
        worker.connections.discard(connection)
        if not worker.connections:
            self._workers.pop(worker.worker_id, None)

    def _warn(self, worker: _Worker, what: str, limit: int) -> None:
        if not worker.warned:
            worker.warned = True
            log.warning(f"{what}; those beyond are not guarded", worker_id=worker.worker_id, limit=limit)

    async def _judge(self, expired: ExpiredTimer) -> bool | None:
        """Has a worker reaped, unless it let go of the timer meanwhile: its word may wait unread in the socket.

        Once at a time: a worker that let two timers run out is gone, with its second timer, after the first.
        """
        worker_id = expired.worker_id
        lock = self._judging.setdefault(worker_id, asyncio.Lock())
        async with lock:
            worker = self._workers.get(worker_id)
            for connection in list(worker.connections) if worker is not None else ():
                self._take(connection, _MOST_QUEUED)
            if not self._timers.holds(expired):
                return None
            return await self._on_expired(worker_id, expired.scope, expired.after, expired.late_by)


def _free_name(scope: str, taken: set[str]) -> str:
    """The scope's name at the service, where a worker has one timer per scope: several processes, threads and
    nested blocks of a worker may be in the same one, and each has its own deadline."""
    if scope not in taken:
        return scope
    return next(name for number in count(2) if (name := f"{scope}~{number}") not in taken)


def _peer(connected: socket.socket) -> int:
    """Process that connected: the kernel's word, given at that moment; the worker has no say in it."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid
