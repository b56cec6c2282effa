"""A worker process's table of timers, and how its agent hears of it. Never raises, and never waits for long.

Whatever goes wrong, the worker goes on unguarded. The agent takes the end of a connection for the end of all its
timers, so giving a connection up accuses nobody. Where memory can't be shared (a kernel before 3.17, a filter of
system calls, a program that closed all its descriptors), the table stays the process's own, and each change of it
is told with a message, at more cost.
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
# default; the kernel doubles it. It holds some 500 messages, so an agent may look away for a while.
_SEND_BUFFER = 212_992
_INT = struct.Struct("@i")


class AgentSocket:
    """A connection. It is closed when the last thread lets go of it.

    Closing it earlier could hand its descriptor number to another file while a thread is about to send on it. If
    the program closed it, and with it perhaps gave its number away, it is gone.
    """

    __slots__ = ("_file", "_socket", "opened_at")

    def __init__(self, path: str, patience: float, opened_at: int) -> None:
        """Connects.

        Args:
            path: the agent's socket.
            patience: most seconds to wait, now and whenever something is sent.
            opened_at: now, by whatever clock the caller goes by.

        Raises:
            OSError: nobody listens there.
            ValueError: nobody can: the path has a zero byte.
        """
        self.opened_at = opened_at
        self._socket = connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._file = DescriptorCheck(connected.fileno())
        # The kernel bounds how long connecting and sending wait; that costs no further system call.
        seconds, fraction = divmod(patience, 1)
        limit = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        connected.connect(path)

    def send(self, message: bytes, descriptor: int = -1) -> None:
        """Sends a message, with a descriptor if it is not negative.

        Raises:
            BlockingIOError: the agent did not read for as long as may be waited.
            OSError: it is gone.
        """
        if not self._is_open():
            raise OSError(errno.EBADF, "the program has closed the connection")
        if descriptor < 0:
            self._socket.send(message, socket.MSG_NOSIGNAL)
        else:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            self._socket.sendmsg([message], [rights], socket.MSG_NOSIGNAL)

    def has_unread(self) -> bool:
        """Whether a message waits that the agent has not read. False if the kernel doesn't say."""
        if not self._is_open():
            return False
        try:
            waiting = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(_INT.size))
        except OSError:
            return False
        return bool(_INT.unpack(waiting)[0])

    def shut(self) -> None:
        """Tells the agent that this is the end, whoever else holds the connection."""
        if not self._is_open():
            return
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The agent was first.
            return

    def close(self) -> None:
        """Lets go of the descriptor and leaves the connection to whoever else holds it."""
        if self._is_open():
            self._socket.close()
        else:
            self._socket.detach()

    def __del__(self) -> None:
        # Not there if no socket could be had.
        if getattr(self, "_file", None) is not None:
            self.close()

    def _is_open(self) -> bool:
        return self._file.is_behind(self._socket.fileno())


# After a failure, the next connection is tried so many seconds later, then twice that, up to the maximum. A dead agent
# thus costs one failed system call every five seconds. All other times are in nanoseconds.
_RETRY_FIRST = 0.1
_RETRY_MOST = 5.0
# A connection that lived so long was no failure: the next one is tried at once.
_LIVED = 1_000_000_000
# The agent is not asked twice within this time to look sooner than it would anyway.
_GAP = 10_000_000
_NANOSECONDS = 1_000_000_000


class AgentConnection:
    """The table of this process, and the connection that tells of it.

    Any thread may use it, and so may a signal handler that interrupts one.
    """

    def __init__(self, path: str, patience: float, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Makes an uplink that connects when its table is first written to.

        Args:
            path: the agent's socket.
            patience: most seconds to wait for an agent that doesn't read.
            clock: CLOCK_MONOTONIC, in nanoseconds.
        """
        self._path = path
        self._timeout = patience
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._table: TableWriter | None = None
        self._shared: SharedMemory | None = None
        # Without shared memory, or its descriptor: what is in the table, and what of it the agent was told.
        self._own: TableReader | None = None
        self._told: dict[int, TimerSlot] = {}
        self._told_step: StepSlot | None = None
        self._making = threading.Lock()
        self._link: AgentSocket | None = None
        self._closed = False
        # Who rings connects and sends; whoever else wants to meanwhile leaves it to that one.
        self._ringing = threading.Lock()
        self._wanted = False
        self._rung_at = 0
        self._retry_at = 0
        self._backoff = Backoff(lambda: 1.0, first=_RETRY_FIRST, longest=_RETRY_MOST)

    def table(self) -> TableWriter:
        """The table of this process, made at the first call."""
        table = self._table
        if table is None:
            # Bounded, because a signal handler may have interrupted the very thread that makes one.
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
        """In a forked child: lets go of the parent's table and connection. It makes its own once it needs them."""
        table, shared, link = self._table, self._shared, self._link
        self._begin()
        if table is not None:
            # Blocks that the parent is in, and that end here as well, write where nobody reads.
            table.disown(private_memory(SIZE))
        if link is not None:
            # Not shut: the connection is still the parent's.
            link.close()
        if shared is not None:
            shared.close()

    def close(self) -> None:
        """Ends all timers and the connection. What is written to the table from now on, nobody reads."""
        self._closed = True
        if self._table is not None:
            self._table.mute()
        link, self._link = self._link, None
        if link is not None:
            link.shut()

    def _ring(self) -> None:
        """Has the agent look at the table, unless it will do so anyway.

        No ring is lost to another thread: who can't have the lock has set `_wanted` before, and who has it looks
        at that after letting go of it.
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
            # While the agent listens, it is rung for because it would look late for a short timer, and not again
            # at once; what was written is seen when it looks.
            #
            # While it does not, we ring however short ago the last time was, except if that message is unread.
            # If it is, the agent looks after it has read it, which is after what we ring for was written. If it
            # is not, that look may have come before. So nothing written goes unseen, and a slow agent finds one
            # message in its queue, not thousands.
            self._rung_at = now
            self._attempt(table, link, _send_look_message)
        if link is not None and self._link is None and not (self._retry_at or self._closed):
            # It was lost since the last ring, and what is rung for may be the last that this process does.
            self._open(table, now)

    def _send_changes(self, link: AgentSocket) -> None:
        """Sends the difference between the table and what the agent was told."""
        assert self._own is not None
        told, held = self._told, {slot.token: slot for slot in self._own.slots()}
        for token in told.keys() - held.keys():
            del told[token]
            link.send(wire.release(token))
        for token, slot in held.items():
            if token not in told:
                told[token] = slot
                after = slot.after / _NANOSECONDS
                link.send(wire.acquire(token, slot.since, after, slot.scope, slot.signal))
        step = self._own.step()
        if step is not None and step != self._told_step:
            self._told_step = step
            link.send(wire.progress(*step))

    def _attempt(self, table: TableWriter, link: AgentSocket, tell: Callable[[AgentSocket], None]) -> None:
        try:
            tell(link)
        except BlockingIOError:
            # The agent did not read for as long as we may wait: no use in connecting again at once.
            self._give_up(table, link, lived=0)
        except OSError:
            self._give_up(table, link, lived=self._clock() - link.opened_at)
        except BaseException:
            # A signal handler raised, and nobody tells the rest. The next connection is told all of it.
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
        # Nobody else writes this now, and until then there is no use in ringing.
        table.listening[0] = self._retry_at

    def _open(self, table: TableWriter, now: int) -> None:
        try:
            link = AgentSocket(self._path, self._timeout, now)
        except (OSError, ValueError):
            # ValueError: a path with a zero byte, which no agent listens on.
            self._failed(table, lived=0)
            return
        # What an agent promised on an earlier connection does not hold on this one.
        table.listening[0] = 0
        self._told.clear()
        self._told_step = None
        self._link = link
        self._attempt(table, link, partial(self._introduce, table))
        if self._closed:
            # Since a moment ago, by somebody who saw no link to shut.
            link.shut()
            table.mute()

    def _introduce(self, table: TableWriter, link: AgentSocket) -> None:
        """Sends the table, with all the timers in it. The agent looks at it once it has got it."""
        descriptor = self._shared.descriptor if self._shared is not None else -1
        if descriptor >= 0:
            link.send(wire.TABLE, descriptor)
        else:
            self._own = self._own or TableReader(table.memory)
            self._send_changes(link)


def _send_look_message(link: AgentSocket) -> None:
    link.send(wire.LOOK)
