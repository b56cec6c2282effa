"""The agent's end of its workers' timers: a Unix socket on one side, the timer service's client on the other.

docs/timer-socket.md is what workers have to know of it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.sockets.timer_tables import (
    Holder,
    Holders,
    OpenTable,
    TableRefused,
    Tables,
    TimerLimits,
    Timers,
)
from rallypoint.agent.sockets.torch_timers import TimerFifo
from rallypoint.rpc.logs import get_logger
from rallypoint.timer.client.client import ExpiredTimer
from rallypoint.timer.worker import wire

__all__ = ["TimerLimits", "TimerSocket", "TimerSocketError"]

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
_DESCRIPTOR = struct.Struct("i")
# Room for the descriptors that come with a message. The kernel closes those that find none.
_ANCILLARY = socket.CMSG_SPACE(4 * _DESCRIPTOR.size)


class TimerSocketError(Exception):
    """The socket cannot be had. One line that says why."""


@dataclass(slots=True, eq=False)
class _TimerConnection:
    socket: socket.socket
    # The timers of which messages tell.
    holder: Holder
    table: OpenTable | None = None
    # Whether the messages just taken ask to look at it.
    rung: bool = False
    # While it is left alone: when it is read next.
    resting: asyncio.TimerHandle | None = None
    closed: bool = False

    @property
    def worker_id(self) -> str:
        return self.holder.worker_id


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
        rank_of: Callable[[str], int | None],
        on_expired: Callable[[HungWorker], Awaitable[bool | None]],
        fifos: Sequence[str | os.PathLike[str]] = (),
        worker_at: Callable[[int], tuple[str, int] | None] = lambda local_rank: None,
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
            rank_of: the global rank of a worker; None if there is no such worker.
            on_expired: has the worker reaped. One call at a time per worker. False: it could not, try again
                later.
            fifos: where to make the named pipes for torch's timers, one for each worker, by local rank.
            worker_at: the name and the process of the worker with a local rank; None while there is none.
            limits: see TimerLimits.
            clock: CLOCK_MONOTONIC, in seconds.
        """
        self.path = os.fspath(path)
        self._timers = timers
        self._worker_of = worker_of
        self._on_expired = on_expired
        self._limits = limits or TimerLimits()
        self._holders = Holders(timers, rank_of=rank_of, limits=self._limits, clock=clock)
        self._tables = Tables(clock)
        self._fifos = [
            TimerFifo(Path(path), self._holders, worker=partial(worker_at, local_rank), worker_of=worker_of)
            for local_rank, path in enumerate(fifos)
        ]
        self._listener: socket.socket | None = None
        self._again: asyncio.TimerHandle | None = None
        self._connections: dict[str, set[_TimerConnection]] = {}
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
            for fifo in self._fifos:
                fifo.start()
        except OSError as error:
            listener.close()
            for fifo in self._fifos:
                fifo.stop()
            path = error.filename or self.path
            raise TimerSocketError(f"can't listen for workers at {path}: {error.strerror}") from error
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        self._timers.start(self._judge, self._tables.forget)

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
        for worker_id in list(self._connections):
            self.clear(worker_id)
        for fifo in self._fifos:
            fifo.stop()
        await self._timers.close()

    def introduce(self) -> None:
        """More workers have become known: looks again at who has connected and was unknown."""
        for connected in list(self._strangers):
            self._welcome(connected)
        for fifo in self._fifos:
            fifo.introduce()

    def clear(self, worker_id: str) -> None:
        """A worker is gone: ends its timers and its connections, those of its descendants included."""
        for connection in list(self._connections.get(worker_id, ())):
            self._close(connection)
        for fifo in self._fifos:
            fifo.clear(worker_id)
        self._tables.clear(worker_id)
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
        holder = self._holders.open(worker_id, pid)
        connections = self._connections.setdefault(worker_id, set())
        if len(connections) >= self._limits.connections:
            holder.warn("too many processes with timers", self._limits.connections)
            holder.close()
            connected.close()
            return True
        connected.setblocking(False)
        connection = _TimerConnection(connected, holder)
        connections.add(connection)
        asyncio.get_running_loop().add_reader(connected, self._read, connection)
        return True

    def _read(self, connection: _TimerConnection) -> None:
        if self._take(connection, _TURN) or connection.closed:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(connection.socket)
        connection.resting = loop.call_later(_REST, self._wake, connection)

    def _wake(self, connection: _TimerConnection) -> None:
        connection.resting = None
        asyncio.get_running_loop().add_reader(connection.socket, self._read, connection)

    def _take(self, connection: _TimerConnection, most: int) -> bool:
        """Takes messages that wait, at most so many. Whether there may be more."""
        connection.holder.begin_pass()
        connection.rung = False
        try:
            more = self._receive(connection, most)
        except OSError:
            self._close(connection)
            return False
        except (wire.MalformedMessage, TableRefused) as error:
            log.warning(
                "closed a worker's timer connection",
                worker_id=connection.worker_id,
                pid=connection.holder.pid,
                reason=str(error),
            )
            self._close(connection)
            return False
        if connection.rung and connection.table is not None:
            connection.table.wake()
        return more

    def _receive(self, connection: _TimerConnection, most: int) -> bool:
        for _ in range(most):
            try:
                message, descriptors = _receive(connection.socket)
            except BlockingIOError:
                return False
            try:
                if not message:
                    self._close(connection)
                    return False
                self._act(connection, wire.decode(message), descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        return True

    def _act(self, connection: _TimerConnection, message: wire.Message, descriptors: list[int]) -> None:
        holder = connection.holder
        match message:
            case wire.Acquire():
                holder.acquire(
                    message.token,
                    message.scope,
                    message.after,
                    message.since,
                    signal=message.signal,
                    learns=not message.after,
                )
            case wire.Release():
                holder.complete(message.token)
            case wire.Clear():
                holder.release_all()
            case wire.Progress():
                holder.progress(message.step, message.when)
            case wire.TableMessage():
                self._open_table(connection, descriptors)
            case wire.Look():
                connection.rung = True
            case wire.Unknown():
                return

    def _open_table(self, connection: _TimerConnection, descriptors: list[int]) -> None:
        if len(descriptors) != 1:
            raise TableRefused(f"a table comes with one descriptor, not {len(descriptors)}")
        if connection.table is not None:
            connection.table.close()
            connection.table = None
        holder = self._holders.open(connection.worker_id, connection.holder.pid)
        try:
            connection.table = self._tables.open(holder, descriptors[0])
        except TableRefused:
            holder.close()
            raise

    def _close(self, connection: _TimerConnection) -> None:
        if connection.closed:
            return
        connection.closed = True
        if connection.resting is not None:
            connection.resting.cancel()
        else:
            asyncio.get_running_loop().remove_reader(connection.socket)
        connection.socket.close()
        if connection.table is not None:
            connection.table.close()
            connection.table = None
        connections = self._connections[connection.worker_id]
        connections.discard(connection)
        if not connections:
            del self._connections[connection.worker_id]
        connection.holder.close()

    async def _judge(self, expired: ExpiredTimer) -> bool | None:
        """Has a worker reaped, unless it let go of the timer meanwhile: its word may wait where nobody has looked.

        Once at a time: a worker that let two timers run out is gone, with its second timer, after the first.
        """
        worker_id = expired.worker_id
        lock = self._judging.setdefault(worker_id, asyncio.Lock())
        async with lock:
            try:
                self._poll_table(worker_id)
            except Exception:
                log.exception("could not look what a worker holds", worker_id=worker_id)
                return False
            if not self._timers.holds(expired):
                return None
            return await self._on_expired(self._hang(expired))

    def _poll_table(self, worker_id: str) -> None:
        """Takes what the worker has written or sent until now."""
        for connection in list(self._connections.get(worker_id, ())):
            self._take(connection, _MOST_QUEUED)
            if connection.table is not None:
                connection.table.read_changes()
        for fifo in self._fifos:
            fifo.read_requests()

    def _hang(self, expired: ExpiredTimer) -> HungWorker:
        timer = self._holders.find(expired.worker_id, expired.scope) if expired.sequence else None
        return HungWorker(
            worker_id=expired.worker_id,
            scope=timer.scope if timer is not None else expired.scope,
            after=expired.after,
            late_by=expired.late_by,
            pid=timer.pid if timer is not None else 0,
            signal=timer.signal if timer is not None else 0,
            cpu_seconds=timer.cpu_seconds if timer is not None else None,
            learned_from=expired.learned_from,
        )


def _receive(connected: socket.socket) -> tuple[bytes, list[int]]:
    """One message, and the descriptors that came with it, which are the caller's to close."""
    # One byte more than is allowed: the kernel cuts what is longer, and it must not pass for valid.
    message, ancillary, _flags, _address = connected.recvmsg(
        wire.MAX_MESSAGE_BYTES + 1, _ANCILLARY, socket.MSG_CMSG_CLOEXEC
    )
    descriptors = [
        descriptor
        for level, kind, data in ancillary
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
        for (descriptor,) in _DESCRIPTOR.iter_unpack(data[: len(data) // _DESCRIPTOR.size * _DESCRIPTOR.size])
    ]
    return message, descriptors


def _peer(connected: socket.socket) -> int:
    """Process that connected: the kernel's word, given at that moment; the worker has no say in it."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid
