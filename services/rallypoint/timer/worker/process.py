"""The destination of this process's timers; set once, by `configure` or by the first timer."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import weakref
from typing import Protocol

from rallypoint.timer.worker.connection import AgentConnection
from rallypoint.timer.worker.table import SIZE, TableWriter, private_memory

# ---- Lets the agent request the stacks of a worker's threads, even while the worker hangs.


STACKS_VARIABLE = "RALLYPOINT_STACKS"
"""The environment variable with the path of a FIFO that the agent reads; the agent sets it for its workers."""

STACK_SIGNAL = signal.SIGRTMIN + 7
"""On this signal a worker writes the Python stack of each of its threads into the FIFO."""

# The FIFO's descriptor, once opening was tried: the handler uses it without holding a reference.
_pipe: int | None = None
_NONE = -1
# A program that closes all descriptors does not know of this one. The files it opens next get the lowest numbers, so
# that the handler never writes into one of them by this number. The usual limit is 1,024.
_FAR = 900


def offer_stacks() -> None:
    """Make this process write its stacks on STACK_SIGNAL. Once per process; harmless if that is impossible.

    A program's own handler for the signal, or its SIG_IGN, stays in place. A forked child keeps the handler and writes
    into the same FIFO.
    """
    global _pipe  # noqa: PLW0603 - signal handlers are the process's, too
    path = os.environ.get(STACKS_VARIABLE)
    if _pipe is not None or not path:
        return
    _pipe = _NONE
    try:
        # Missing in some builds of the interpreter.
        import faulthandler  # noqa: PLC0415

        if _is_free(STACK_SIGNAL):
            # Non-blocking: neither opening it nor writing stacks waits for an agent that does not read.
            _pipe = _moved_away(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            faulthandler.register(STACK_SIGNAL, file=_pipe, all_threads=True, chain=False)
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError):
        # No process reads the FIFO, or no descriptor is left: the agent gets the stacks in another way, or none.
        return


def _moved_away(descriptor: int) -> int:
    try:
        far = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FAR)
    except OSError:
        # The limit of this process is lower.
        return descriptor
    os.close(descriptor)
    return far


def _is_free(number: int) -> bool:
    """Return True if a signal has its default action according to the kernel: Python can't see handlers of C code."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigIgn:", "SigCgt:"))]
    return not any(mask >> number - 1 & 1 for mask in masks)


SOCKET_VARIABLE = "RALLYPOINT_TIMER_SOCKET"
"""The environment variable with the path of the agent's timer socket; the agent sets it for its workers."""

PATIENCE = 0.05
"""Most seconds that a worker waits for an agent that does not read."""


class TimerClient(Protocol):
    """A replacement for Rallypoint's agent in `expires`: it keeps one timer per scope."""

    def acquire(self, scope: str, after: float) -> None:
        """Start the scope's timer, of `after` seconds; replace the deadline of one that runs already."""

    def release(self, scope: str) -> None:
        """End the scope's timer. A scope without one is no error."""


class ProcessTimers:
    """The destination of this process's timers."""

    __slots__ = ("_choosing", "_connections", "client", "connection", "table")

    def __init__(self) -> None:
        # None: not chosen yet, a custom client is in use, or this process has just been forked.
        self.table: TableWriter | None = None
        self.connection: AgentConnection | None = None
        self.client: TimerClient | None = None
        self._connections: weakref.WeakSet[AgentConnection] = weakref.WeakSet()
        self._choosing = threading.Lock()

    def choose(
        self,
        socket: str | os.PathLike[str] | None,
        client: TimerClient | None,
        required: bool,
        patience: float,
    ) -> None:
        """Set the destination; running timers are dropped. The arguments are those of `configure`.

        Raises:
            RuntimeError: there is no agent, and one is required.
        """
        offer_stacks()
        connection = self.open_connection(socket, required, patience) if client is None else None
        # A table without a reader makes `expires` as cheap without an agent as with one.
        table = _unread_table() if client is None and connection is None else None
        with self._choosing:
            former = self.connection
            self.table, self.connection, self.client = table, connection, client
        if former is not None:
            former.close()

    def find(self) -> TableWriter | None:
        """Return the table for timers; None: use `client`.

        Raises:
            RuntimeError: no destination was set, and there is no agent.
        """
        if self.client is not None:
            return None
        if self.connection is None and self.table is None:
            offer_stacks()
            # Bounded, because a signal handler may have interrupted the very thread that holds the lock.
            mine = self._choosing.acquire(timeout=PATIENCE)
            try:
                if self.connection is None and self.table is None and self.client is None:
                    self.connection = self.open_connection(None, True, PATIENCE)
            finally:
                if mine:
                    self._choosing.release()
        connection = self.connection
        if connection is not None:
            self.table = connection.table()
        return self.table

    def open_connection(
        self, socket: str | os.PathLike[str] | None, required: bool, patience: float
    ) -> AgentConnection | None:
        """Return a connection that survives forks; None: there is no agent.

        Raises:
            RuntimeError: there is none, and one is required.
        """
        path = os.fspath(socket) if socket is not None else os.environ.get(SOCKET_VARIABLE, "")
        if path:
            connection = AgentConnection(path, patience)
            self._connections.add(connection)
            return connection
        if required:
            raise RuntimeError(
                f"no agent guards this process: {SOCKET_VARIABLE} is not set. Start it with `rallypoint run`, or "
                "call rallypoint.timer.configure(required=False) once to let expires() do nothing here"
            )
        return None

    def after_fork(self) -> None:
        """In a forked child: leave the table and the connections to the parent."""
        self._choosing = threading.Lock()
        if self.connection is not None:
            self.table = None
        for connection in self._connections:
            connection.after_fork()


def _unread_table() -> TableWriter:
    table = TableWriter(private_memory(SIZE))
    table.mute()
    return table


process = ProcessTimers()
"""The timers of this process."""

os.register_at_fork(after_in_child=process.after_fork)
