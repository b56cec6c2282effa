"""Where this process tells its timers; chosen once, by `configure` or by the first timer."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import weakref
from typing import Protocol

from rallypoint.timer.worker.connection import AgentConnection
from rallypoint.timer.worker.table import SIZE, TableWriter, private_memory

# ---- Lets the agent ask a worker where its threads are, even while it hangs.


STACKS_VARIABLE = "RALLYPOINT_STACKS"
"""The agent sets it for its workers: the path of a FIFO that it reads."""

STACK_SIGNAL = signal.SIGRTMIN + 7
"""At this signal a worker writes the Python stack of each of its threads into the FIFO."""

# The FIFO's descriptor, once it was tried: the handler holds on to it without counting it as in use.
_pipe: int | None = None
_NONE = -1
# A program that closes all descriptors doesn't know that the handler has this one. What it opens next gets the
# lowest numbers, so that the handler finds none of it at this one. The usual limit is 1,024.
_FAR = 900


def offer_stacks() -> None:
    """Has this process answer STACK_SIGNAL from now on. Once per process; harmless if it can't be done.

    A program that has a handler of its own for the signal, or ignores it, keeps that. A forked child goes on
    answering, into the same FIFO.
    """
    global _pipe  # noqa: PLW0603 - signal handlers are the process's, too
    path = os.environ.get(STACKS_VARIABLE)
    if _pipe is not None or not path:
        return
    _pipe = _NONE
    try:
        # Part of the interpreter, but not of every one.
        import faulthandler  # noqa: PLC0415

        if _is_free(STACK_SIGNAL):
            # Non-blocking: neither opening it nor writing stacks waits for an agent that doesn't read.
            _pipe = _moved_away(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            faulthandler.register(STACK_SIGNAL, file=_pipe, all_threads=True, chain=False)
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError):
        # Nobody reads the FIFO, or no files are left: the agent gets stacks elsewhere, or none.
        return


def _moved_away(descriptor: int) -> int:
    try:
        far = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FAR)
    except OSError:
        # This process may not have so many.
        return descriptor
    os.close(descriptor)
    return far


def _is_free(number: int) -> bool:
    """Whether a signal has its default action, by the kernel's word: C code has handlers Python can't see."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigIgn:", "SigCgt:"))]
    return not any(mask >> number - 1 & 1 for mask in masks)


SOCKET_VARIABLE = "RALLYPOINT_TIMER_SOCKET"
"""The agent sets it for its workers: the path of its timer socket."""

PATIENCE = 0.05
"""Seconds that a worker waits for an agent that doesn't read."""


class TimerClient(Protocol):
    """Who may take the place of Rallypoint's own agent for `expires`: it keeps one timer per scope."""

    def acquire(self, scope: str, after: float) -> None:
        """Starts the scope's timer, of `after` seconds; replaces the deadline of one that runs already."""

    def release(self, scope: str) -> None:
        """Ends the scope's timer. One that does not run is no error."""


class ProcessTimers:
    """Where this process tells its timers."""

    __slots__ = ("_choosing", "_uplinks", "client", "connection", "table")

    def __init__(self) -> None:
        # None: not chosen yet, or the client is someone else's, or this process has just been forked.
        self.table: TableWriter | None = None
        self.connection: AgentConnection | None = None
        self.client: TimerClient | None = None
        self._uplinks: weakref.WeakSet[AgentConnection] = weakref.WeakSet()
        self._choosing = threading.Lock()

    def choose(
        self,
        socket: str | os.PathLike[str] | None,
        client: TimerClient | None,
        required: bool,
        patience: float,
    ) -> None:
        """Chooses; what runs so far is dropped.

        Args:
            socket: the agent's; None: what the environment says.
            client: takes the place of an agent.
            required: whether there has to be an agent.
            patience: most seconds to wait for one that doesn't read.

        Raises:
            RuntimeError: there is no agent, and one is required.
        """
        offer_stacks()
        uplink = self.open_connection(socket, required, patience) if client is None else None
        # A table that nobody reads costs those who have no agent as little as one that somebody does.
        table = _unread_table() if client is None and uplink is None else None
        with self._choosing:
            former = self.connection
            self.table, self.connection, self.client = table, uplink, client
        if former is not None:
            former.close()

    def find(self) -> TableWriter | None:
        """Where to write timers; None: `client` is to be told.

        Raises:
            RuntimeError: nothing was chosen, and no agent is in sight.
        """
        if self.client is not None:
            return None
        if self.connection is None and self.table is None:
            offer_stacks()
            # Bounded, because a signal handler may have interrupted the very thread that chooses.
            mine = self._choosing.acquire(timeout=PATIENCE)
            try:
                if self.connection is None and self.table is None and self.client is None:
                    self.connection = self.open_connection(None, True, PATIENCE)
            finally:
                if mine:
                    self._choosing.release()
        uplink = self.connection
        if uplink is not None:
            self.table = uplink.table()
        return self.table

    def open_connection(
        self, socket: str | os.PathLike[str] | None, required: bool, patience: float
    ) -> AgentConnection | None:
        """An uplink that survives forks; None: there is no agent.

        Raises:
            RuntimeError: there is none, and one is required.
        """
        path = os.fspath(socket) if socket is not None else os.environ.get(SOCKET_VARIABLE, "")
        if path:
            uplink = AgentConnection(path, patience)
            self._uplinks.add(uplink)
            return uplink
        if required:
            raise RuntimeError(
                f"no agent guards this process: {SOCKET_VARIABLE} is not set. Start it with `rallypoint run`, or "
                "call rallypoint.timer.configure(required=False) once to let expires() do nothing here"
            )
        return None

    def after_fork(self) -> None:
        """In a forked child: whatever the parent holds is left to the parent."""
        self._choosing = threading.Lock()
        if self.connection is not None:
            self.table = None
        for uplink in self._uplinks:
            uplink.after_fork()


def _unread_table() -> TableWriter:
    table = TableWriter(private_memory(SIZE))
    table.mute()
    return table


process = ProcessTimers()
"""This process."""

os.register_at_fork(after_in_child=process.after_fork)
