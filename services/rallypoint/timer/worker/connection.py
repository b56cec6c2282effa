"""A worker process's table of timers, and its connection to the agent. Never raises, and never waits for long.

After any error the worker goes on unguarded. The agent treats the end of a connection as the end of all its timers, so
closing a connection never causes a kill. Where memory can't be shared (a kernel before 3.17, a filter of system calls,
a program that closed all its descriptors), the table stays private to the process, and each change of it is sent as a
message, at more cost.
"""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from functools import partial

from rallypoint.rpc.backoff import Backoff
from rallypoint.timer.worker import wire
from rallypoint.timer.worker.table import (
    SIZE,
    DescriptorCheck,
    SharedMemory,
    StepSlot,
    TableReader,
    TableWriter,
    TimerSlot,
    private_memory,
)

# ---- An open connection of a worker process to its agent's timer socket.


# A socket's queue is bounded by bytes, overhead included. This is the most that an unprivileged process gets by
# default; the kernel doubles it. It holds some 500 messages, so the agent may pause reading for a while.
_SEND_BUFFER = 212_992
_INT = struct.Struct("@i")


class AgentSocket:
    """A connection. It is closed when the last thread drops its reference.

    Closing it earlier could give its descriptor number to another file while a thread is about to send on it. If the
    program itself closed the descriptor, and the number may now belong to another file, the connection counts as gone.
    """

    __slots__ = ("_file", "_socket", "opened_at")

    def __init__(self, path: str, timeout: float, opened_at: int) -> None:
        """Connect.

        Args:
            path: the agent's socket.
            timeout: most seconds to wait, now and at each send.
            opened_at: the present time on the caller's clock.

        Raises:
            OSError: no process listens on the socket.
            ValueError: the path has a zero byte.
        """
        self.opened_at = opened_at
        self._socket = connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._file = DescriptorCheck(connected.fileno())
        # The kernel bounds how long connecting and sending wait; that costs no further system call.
        seconds, fraction = divmod(timeout, 1)
        limit = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        connected.connect(path)

    def send(self, message: bytes, descriptor: int = -1) -> None:
        """Send a message, with a descriptor if it is not negative.

        Raises:
            BlockingIOError: the agent did not read within the timeout.
            OSError: the connection is gone.
        """
        if not self._is_open():
            raise OSError(errno.EBADF, "the program has closed the connection")
        if descriptor < 0:
            self._socket.send(message, socket.MSG_NOSIGNAL)
        else:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            self._socket.sendmsg([message], [rights], socket.MSG_NOSIGNAL)

    def has_unread(self) -> bool:
        """Return True if a message is unread by the agent; False also if the kernel does not report it."""
        if not self._is_open():
            return False
        try:
            waiting = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(_INT.size))
        except OSError:
            return False
        return bool(_INT.unpack(waiting)[0])

    def shut(self) -> None:
        """Shut the connection down for both sides, even if another process holds a copy of it."""
        if not self._is_open():
            return
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The agent has closed it already.
            return

    def close(self) -> None:
        """Close this descriptor; copies of other processes stay open."""
        if self._is_open():
            self._socket.close()
        else:
            self._socket.detach()

    def __del__(self) -> None:
        # Missing if creating the socket failed.
        if getattr(self, "_file", None) is not None:
            self.close()

    def _is_open(self) -> bool:
        return self._file.is_behind(self._socket.fileno())


# After a failure, the next attempt to connect is made so many seconds later, then twice that, up to the maximum. A dead
# agent thus costs one failed system call every five seconds. All other times are in nanoseconds.
_RETRY_FIRST = 0.1
_RETRY_MOST = 5.0
# The end of a connection that lived this long is no failure: connect again at once.
_LIVED = 1_000_000_000
# Least time between two requests to look sooner than at the next poll.
_GAP = 10_000_000
_NANOSECONDS = 1_000_000_000


class AgentConnection:
    """The table of this process, and the connection that reports it.

    Any thread may use it, and so may a signal handler that interrupts one.
    """

    def __init__(self, path: str, timeout: float, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Create a connection that opens when its table is first written to.

        `timeout`: most seconds to wait for an agent that does not read. `clock`: CLOCK_MONOTONIC, in nanoseconds.
        """
        self._path = path
        self._timeout = timeout
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._table: TableWriter | None = None
        self._shared: SharedMemory | None = None
        # Without shared memory, or its descriptor: the reader of the table, and the state last sent to the agent.
        self._own: TableReader | None = None
        self._sent: dict[int, TimerSlot] = {}
        self._sent_step: StepSlot | None = None
        self._making = threading.Lock()
        self._link: AgentSocket | None = None
        self._closed = False
        # Only the thread with this lock connects and sends; the others return at once.
        self._ringing = threading.Lock()
        self._wanted = False
        self._rung_at = 0
        self._retry_at = 0
        self._backoff = Backoff(lambda: 1.0, first=_RETRY_FIRST, longest=_RETRY_MOST)

    def table(self) -> TableWriter:
        """Return the table of this process; create it at the first call."""
        table = self._table
        if table is None:
            # Bounded, because a signal handler may have interrupted the very thread that holds the lock.
            mine = self._making.acquire(timeout=self._timeout)
            try:
                table = self._table or self._make_table()
            finally:
                if mine:
                    self._making.release()
        return table

    def _make_table(self) -> TableWriter:
        try:
            shared = SharedMemory(SIZE)
        except OSError:
            table = TableWriter(private_memory(SIZE), self._ring)
        else:
            table = TableWriter(shared.memory, self._ring)
            self._shared = shared
        self._table = table
        return table

    def after_fork(self) -> None:
        """In a forked child: drop the parent's table and connection. New ones are created when the child needs them."""
        table, shared, link = self._table, self._shared, self._link
        self._begin()
        if table is not None:
            # Blocks that the parent has entered, and that end in the child as well, write to memory without a reader.
            table.disown(private_memory(SIZE))
        if link is not None:
            # Not shut down: the connection is still the parent's.
            link.close()
        if shared is not None:
            shared.close()

    def close(self) -> None:
        """End all timers and close the connection. Later writes to the table have no reader."""
        self._closed = True
        if self._table is not None:
            self._table.mute()
        link, self._link = self._link, None
        if link is not None:
            link.shut()

    def _ring(self) -> None:
        """Make the agent look at the table, unless it will do so anyway.

        No request is lost to another thread: a thread that can't get the lock has set `_wanted` before, and the holder
        checks that after releasing the lock.
        """
        self._wanted = True
        while self._wanted and self._ringing.acquire(blocking=False):
            try:
                self._wanted = False
                self._send()
            finally:
                self._ringing.release()

    def _send(self) -> None:
        table, link = self._table, self._link
        if table is None or self._closed:
            return
        now = self._clock()
        if link is None:
            if now >= self._retry_at:
                self._open(table, now)
        elif self._own is not None:
            self._attempt(table, link, self._send_changes)
        elif (now > table.listening[0] or now - self._rung_at >= _GAP) and not link.has_unread():
            # While the agent polls, a ring asks it to look at a short timer sooner, and is not repeated at once;
            # everything written is seen at the next poll.
            #
            # While it does not poll, ring however recent the last ring is, unless that message is still unread. If it
            # is unread, the agent looks after reading it, which is after the present write. If it is not, that look
            # may have come before the write. So no write goes unseen, and a slow agent finds one message in its queue,
            # not thousands.
            self._rung_at = now
            self._attempt(table, link, _send_look_message)
        if link is not None and self._link is None and not (self._retry_at or self._closed):
            # The connection was lost since the last ring, and this write may be the last that this process makes.
            self._open(table, now)

    def _send_changes(self, link: AgentSocket) -> None:
        """Send the difference between the table and the state last sent to the agent."""
        assert self._own is not None
        sent, held = self._sent, {slot.token: slot for slot in self._own.slots()}
        for token in sent.keys() - held.keys():
            del sent[token]
            link.send(wire.release(token))
        for token, slot in held.items():
            if token not in sent:
                sent[token] = slot
                after = slot.after / _NANOSECONDS
                link.send(wire.acquire(token, slot.since, after, slot.scope, slot.signal))
        step = self._own.step()
        if step is not None and step != self._sent_step:
            self._sent_step = step
            link.send(wire.progress(*step))

    def _attempt(self, table: TableWriter, link: AgentSocket, send: Callable[[AgentSocket], None]) -> None:
        try:
            send(link)
        except BlockingIOError:
            # The agent did not read within the timeout: connecting again at once would not help.
            self._give_up(table, link, lived=0)
        except OSError:
            self._give_up(table, link, lived=self._clock() - link.opened_at)
        except BaseException:
            # A signal handler raised, and the rest was not sent. The next connection sends everything.
            self._give_up(table, link, lived=_LIVED)
            raise

    def _give_up(self, table: TableWriter, link: AgentSocket, lived: int) -> None:
        link.shut()
        self._link = None
        self._failed(table, lived)

    def _failed(self, table: TableWriter, lived: int) -> None:
        if lived >= _LIVED:
            self._backoff.reset()
            self._retry_at = 0
        else:
            self._retry_at = self._clock() + round(self._backoff.next() * 1e9)
        # No other thread or process writes this word now, and until `_retry_at` a ring has no effect.
        table.listening[0] = self._retry_at

    def _open(self, table: TableWriter, now: int) -> None:
        try:
            link = AgentSocket(self._path, self._timeout, now)
        except (OSError, ValueError):
            # ValueError: a path with a zero byte, on which no agent listens.
            self._failed(table, lived=0)
            return
        # A promise of the agent to poll ended with the earlier connection.
        table.listening[0] = 0
        self._sent.clear()
        self._sent_step = None
        self._link = link
        self._attempt(table, link, partial(self._introduce, table))
        if self._closed:
            # Closed meanwhile by another thread, which found no connection to shut down.
            link.shut()
            table.mute()

    def _introduce(self, table: TableWriter, link: AgentSocket) -> None:
        """Send the table, with all the timers in it. The agent looks at it on receipt."""
        descriptor = self._shared.descriptor if self._shared is not None else -1
        if descriptor >= 0:
            link.send(wire.TABLE, descriptor)
        else:
            self._own = self._own or TableReader(table.memory)
            self._send_changes(link)


def _send_look_message(link: AgentSocket) -> None:
    link.send(wire.LOOK)
