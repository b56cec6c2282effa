"""Where this process tells its timers; chosen once, by `configure` or by the first timer."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from rallypoint.timer.shared_memory import private_memory
from rallypoint.timer.stacks import offer_stacks
from rallypoint.timer.table import SIZE, TableWriter
from rallypoint.timer.uplink import Uplink

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


class Process:
    """Where this process tells its timers."""

    __slots__ = ("_choosing", "_uplinks", "client", "table", "uplink")

    def __init__(self) -> None:
        # None: not chosen yet, or the client is someone else's, or this process has just been forked.
        self.table: TableWriter | None = None
        self.uplink: Uplink | None = None
        self.client: TimerClient | None = None
        self._uplinks: weakref.WeakSet[Uplink] = weakref.WeakSet()
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
        uplink = self.open_uplink(socket, required, patience) if client is None else None
        # A table that nobody reads costs those who have no agent as little as one that somebody does.
        table = _unread_table() if client is None and uplink is None else None
        with self._choosing:
            former = self.uplink
            self.table, self.uplink, self.client = table, uplink, client
        if former is not None:
            former.close()

    def find(self) -> TableWriter | None:
        """Where to write timers; None: `client` is to be told.

        Raises:
            RuntimeError: nothing was chosen, and no agent is in sight.
        """
        if self.client is not None:
            return None
        if self.uplink is None and self.table is None:
            offer_stacks()
            # Bounded, because a signal handler may have interrupted the very thread that chooses.
            mine = self._choosing.acquire(timeout=PATIENCE)
            try:
                if self.uplink is None and self.table is None and self.client is None:
                    self.uplink = self.open_uplink(None, True, PATIENCE)
            finally:
                if mine:
                    self._choosing.release()
        uplink = self.uplink
        if uplink is not None:
            self.table = uplink.table()
        return self.table

    def open_uplink(
        self, socket: str | os.PathLike[str] | None, required: bool, patience: float
    ) -> Uplink | None:
        """An uplink that survives forks; None: there is no agent.

        Raises:
            RuntimeError: there is none, and one is required.
        """
        path = os.fspath(socket) if socket is not None else os.environ.get(SOCKET_VARIABLE, "")
        if path:
            uplink = Uplink(path, patience)
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
        if self.uplink is not None:
            self.table = None
        for uplink in self._uplinks:
            uplink.after_fork()


def _unread_table() -> TableWriter:
    table = TableWriter(private_memory(SIZE))
    table.mute()
    return table


process = Process()
"""This process."""

os.register_at_fork(after_in_child=process.after_fork)
