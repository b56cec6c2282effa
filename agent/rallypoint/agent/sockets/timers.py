"""The agent's timer socket: receives the timers of workers and forwards them to the timer service's client.

docs/timer-socket.md describes the protocol for workers.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.sockets.timer_tables import (
    Holder,
    Holders,
    HostWorkers,
    OpenTable,
    TableRefused,
    Tables,
    TimerLimits,
)
from rallypoint.agent.sockets.torch_timers import TimerFifo
from rallypoint.rpc.logs import get_logger
from rallypoint.timer.client.client import ExpiredTimer, NodeTimers
from rallypoint.timer.worker import wire
from rallypoint.worker.store import PREFIX

log = get_logger(__name__)

# Connections queued until they are accepted. All workers of a host start at once, data loaders included.
_BACKLOG = 1024
# Messages read from one connection before the others are served.
_TURN = 64
# Seconds without reading after a connection was read. A worker that enters a scope every 100 us would otherwise wake
# the agent, and pay for it, each time. Messages carry their time, so no deadline is affected.
_REST = 0.005
# More messages than a kernel queue can hold: a later message was sent after the reading began. In a stream, the
# shortest take 16 of at most 425,984 bytes.
_MOST_QUEUED = 32_768
# Seconds until the next attempt to accept, when the process has no descriptor left.
_OUT_OF_FILES = 1.0
_CREDENTIALS = struct.Struct("3i")
_DESCRIPTOR = struct.Struct("i")
# Space for the descriptors that come with a message. The kernel closes those that do not fit.
_ANCILLARY = socket.CMSG_SPACE(4 * _DESCRIPTOR.size)


class TimerSocketError(Exception):
    """The socket cannot be opened. One line."""


class MessageFrames:
    """Reads the messages of a SOCK_STREAM connection: in the frames of the store socket, with empty bodies."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._size = PREFIX.size

    def receive(self, connected: socket.socket) -> bytes:
        """Return the next message; empty at the end of the stream, also if that is within a frame.

        It reads no byte after the message, so that an empty kernel queue means that there is no other one.

        Raises:
            BlockingIOError: the message has not come yet, or a part of it. Call again once there is more.
        """
        while True:
            while len(self._received) < self._size:
                part = connected.recv(self._size - len(self._received))
                if not part:
                    return b""
                self._received += part
            if self._size > PREFIX.size:
                message = bytes(self._received[PREFIX.size :])
                self._received.clear()
                self._size = PREFIX.size
                return message
            size, body_size = PREFIX.unpack(self._received)
            if not 0 < size <= wire.MAX_MESSAGE_BYTES or body_size:
                raise wire.MalformedMessage(
                    f"a frame has a message of 1 to {wire.MAX_MESSAGE_BYTES} bytes and no body, not {size:,} + "
                    f"{body_size:,} bytes"
                )
            self._size += size


@dataclass(slots=True, eq=False)
class _TimerConnection:
    socket: socket.socket
    # The timers that come in messages.
    holder: Holder
    # Of a stream: the frames in it.
    frames: MessageFrames | None
    table: OpenTable | None = None
    # True if a message just read requests a read of the table.
    wake_requested: bool = False
    # The timer for the next read, while the connection is not watched.
    resting: asyncio.TimerHandle | None = None
    closed: bool = False

    @property
    def worker_id(self) -> str:
        return self.holder.worker_id


class TimerSocket:
    """Receives timers from the workers of this host, and has workers with an expired timer reaped.

    Belongs to one event loop. A timer ends when its worker releases it, when its connection ends, and when its
    worker is cleared; none of these counts as an expiry.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        timers: NodeTimers,
        workers: HostWorkers,
        *,
        stream_path: str | os.PathLike[str] | None = None,
        fifos: Sequence[str | os.PathLike[str]] = (),
        limits: TimerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up; `start` opens the socket.

        Args:
            path: of the socket, for RALLYPOINT_TIMER_SOCKET; its directory's permissions must exclude other users.
            stream_path: of its SOCK_STREAM form, for RALLYPOINT_TIMER_STREAM_SOCKET; None: there is none.
            timers: a client of the timer service, not started yet.
            workers: the workers; one `reap` at a time per worker. Processes that stay unknown are refused.
            fifos: paths for the named pipes of torch's timers, one for each worker, by local rank.
            limits: see TimerLimits.
            clock: CLOCK_MONOTONIC, in seconds.
        """
        self._paths = {os.fspath(path): socket.SOCK_SEQPACKET}
        if stream_path is not None:
            self._paths[os.fspath(stream_path)] = socket.SOCK_STREAM
        self._timers = timers
        self._workers = workers
        self._limits = limits or TimerLimits()
        self._holders = Holders(timers, rank_of=workers.rank_of, limits=self._limits, clock=clock)
        self._tables = Tables(clock)
        self._fifos = [
            TimerFifo(Path(path), self._holders, workers, local_rank) for local_rank, path in enumerate(fifos)
        ]
        self._listeners: list[socket.socket] = []
        # Listeners that pause, with the timer that ends the pause.
        self._again: dict[socket.socket, asyncio.TimerHandle] = {}
        self._connections: dict[str, set[_TimerConnection]] = {}
        # Connections of processes of which no worker is known yet, with the timer that refuses them.
        self._strangers: dict[socket.socket, asyncio.TimerHandle] = {}
        # One lock per worker with an expiry in progress.
        self._judging: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self) -> None:
        """Listen for workers, and start the client of the timer service.

        Raises:
            TimerSocketError: the path can't be used.
        """
        try:
            for path, kind in self._paths.items():
                self._listen(path, kind)
            for fifo in self._fifos:
                fifo.start()
        except OSError as error:
            self._stop_listening()
            for fifo in self._fifos:
                fifo.stop()
            raise TimerSocketError(
                f"can't listen for workers at {error.filename or path}: {error.strerror}"
            ) from error
        for listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        self._timers.start(self._judge, self._tables.forget)

    def _listen(self, path: str, kind: socket.SocketKind) -> None:
        listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
        self._listeners.append(listener)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            if (again := self._again.pop(listener, None)) is not None:
                again.cancel()
            asyncio.get_running_loop().remove_reader(listener)
            path = listener.getsockname()
            listener.close()
            if path:
                with suppress(FileNotFoundError):
                    os.unlink(path)
        self._listeners.clear()

    async def stop(self) -> None:
        """End all timers, close every connection, and stop listening."""
        self._stop_listening()
        for connected in list(self._strangers):
            self._refuse(connected)
        for worker_id in list(self._connections):
            self.clear(worker_id)
        for fifo in self._fifos:
            fifo.stop()
        await self._timers.close()

    def introduce(self) -> None:
        """Check the waiting connections of unknown processes again, after new workers have become known."""
        for connected in list(self._strangers):
            self._admit(connected)
        for fifo in self._fifos:
            fifo.introduce()

    def clear(self, worker_id: str) -> None:
        """End the timers and connections of a worker that is gone, those of its descendants included."""
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
                # Pause, because a process without free descriptors would otherwise retry in a busy loop.
                log.error("can't accept a connection of a worker", reason=error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                self._again[listener] = loop.call_later(
                    _OUT_OF_FILES, loop.add_reader, listener, self._accept, listener
                )
                return
            if not self._admit(connected):
                self._hold(connected)

    def _hold(self, connected: socket.socket) -> None:
        """Keep a connection unread until its process is introduced, or else refuse it after a timeout."""
        if len(self._strangers) >= self._limits.strangers:
            self._refuse(connected)
            return
        refuse = asyncio.get_running_loop().call_later(self._limits.introduction, self._refuse, connected)
        self._strangers[connected] = refuse

    def _refuse(self, connected: socket.socket) -> None:
        """Close a connection of an unrelated process, or of a child of a worker that is already gone."""
        if (waiting := self._strangers.pop(connected, None)) is not None:
            waiting.cancel()
        log.info("refused a process that belongs to no worker", pid=_peer(connected))
        connected.close()

    def _admit(self, connected: socket.socket) -> bool:
        """Accept a connection if its process belongs to a worker; false if the process is unknown."""
        pid = _peer(connected)
        try:
            worker_id = self._workers.worker_of(pid)
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
        frames = MessageFrames() if connected.type == socket.SOCK_STREAM else None
        connection = _TimerConnection(connected, holder, frames)
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
        """Read at most `most` queued messages. True if there may be more."""
        connection.holder.begin_pass()
        connection.wake_requested = False
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
        if connection.wake_requested and connection.table is not None:
            connection.table.wake()
        return more

    def _receive(self, connection: _TimerConnection, most: int) -> bool:
        for _ in range(most):
            try:
                message, descriptors = receive_message(connection.socket, connection.frames)
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
                connection.wake_requested = True
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
        """Reap a worker, unless it has released the timer: the release may be unread in its table, socket or pipe.

        One expiry at a time: a worker with two expired timers is gone, with its second timer, after the first.
        """
        worker_id = expired.worker_id
        lock = self._judging.setdefault(worker_id, asyncio.Lock())
        async with lock:
            try:
                self._poll_table(worker_id)
            except Exception:
                log.exception("could not read a worker's timers", worker_id=worker_id)
                return False
            if not self._timers.holds(expired):
                return None
            return await self._workers.reap(self._hang(expired))

    def _poll_table(self, worker_id: str) -> None:
        """Read all that the worker has written or sent until now."""
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


def receive_message(connected: socket.socket, frames: MessageFrames | None) -> tuple[bytes, list[int]]:
    """Receive one message and its descriptors, which the caller must close; `frames`: those of a stream."""
    if frames is not None:
        return frames.receive(connected), []
    # One byte more than allowed: the kernel truncates longer messages, and a truncated one must not look valid.
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
    """Return the pid of the connected process: the kernel recorded it at connect(), so a worker can't fake it."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid
