"""Two ways for a worker's process to send its scopes to the agent: the product's `expires`, and its own messages.

In the first way the whole worker's side is the product's: `expires`, the table, and the connection that sends wake-ups
and reconnects; the memory is real. The second is possible in any language: one timer for each token, which is acquired
again by sending it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rallypoint.timer.worker import connection, wire
from rallypoint.timer.worker.connection import AgentConnection
from rallypoint.timer.worker.expires import Guard, LearningGuard, expires
from rallypoint.timer.worker.process import PATIENCE
from rallypoint.timer.worker.process import ProcessTimers as Timers
from simulation.timers.sockets import Line

# Messages that a socket holds for an agent that does not read.
_ROOM = 500

Clock = Callable[[], int]
Connect = Callable[[], Line]


class Speech(Protocol):
    """A way to send scopes to the agent."""

    line: Line | None

    def enter(self, token: int, scope: str, after: float | None) -> None:
        """Enter a scope; a known token is acquired again. `after`: seconds; None: the timeout is learned."""

    def leave(self, token: int) -> None:
        """Leave a scope."""

    def reconnect(self) -> None:
        """Reconnect, some time after the connection broke."""


class Link:
    """A replacement of rallypoint.timer.worker.connection.Link."""

    def __init__(self, line: Line, opened_at: int) -> None:
        self.opened_at = opened_at
        self._line = line

    def send(self, message: bytes, descriptor: int = -1) -> None:
        if self._line.over:
            raise BrokenPipeError
        if self._line.unread >= _ROOM:
            raise BlockingIOError
        self._line.send(message, descriptor if descriptor >= 0 else None)

    def has_unread(self) -> bool:
        return self._line.unread > 0

    def shut(self) -> None:
        self._line.end()

    def close(self) -> None:
        """Do nothing: `shut` has ended the connection."""


# By socket path: the program that connects there, in the seed that runs.
_speakers: dict[str, ByTable] = {}


@contextmanager
def simulated_links() -> Iterator[None]:
    """Make the product's worker connections connect to simulated agents."""
    module: Any = connection
    before = module.AgentSocket
    module.AgentSocket = lambda path, patience, opened_at: _speakers[path].open(opened_at)
    try:
        yield
    finally:
        module.AgentSocket = before
        _speakers.clear()


class ByTable:
    """Sends scopes with `expires`."""

    def __init__(self, name: str, clock: Clock, connect: Connect) -> None:
        """`name`: unique in the seed; `clock`: CLOCK_MONOTONIC, in nanoseconds; `connect`: may raise OSError."""
        self.line: Line | None = None
        self._clock = clock
        self._connect = connect
        self._guards: dict[int, Guard] = {}
        self._timers = Timers()
        self._timers.connection = AgentConnection(name, PATIENCE, clock)
        self._timers.table = self._timers.connection.table()
        _speakers[name] = self

    def open(self, opened_at: int) -> Link:
        """Connect, called by the product's connection."""
        self.line = self._connect()
        return Link(self.line, opened_at)

    def enter(self, token: int, scope: str, after: float | None) -> None:
        """See Speech; no token is acquired again."""
        guard = self._guards[token] = expires("auto" if after is None else after, scope)
        guard.__enter__(self._timers, self._clock)

    def leave(self, token: int) -> None:
        guard = self._guards.pop(token)
        if isinstance(guard, LearningGuard):
            guard.__exit__(None, None, None, self._clock)
        else:
            guard.__exit__(None, None, None)

    def reconnect(self) -> None:
        """Do nothing: the product's connection reconnects when it has a wake-up to send."""


class ByMessages:
    """Sends a message for each change."""

    def __init__(self, clock: Clock, connect: Connect) -> None:
        self.line: Line | None = None
        self._clock = clock
        self._connect = connect
        self._held: dict[int, bytes] = {}
        self.reconnect()

    def enter(self, token: int, scope: str, after: float | None) -> None:
        message = self._held[token] = wire.acquire(token, self._clock(), after or 0.0, scope.encode())
        self._send(message)

    def leave(self, token: int) -> None:
        del self._held[token]
        self._send(wire.release(token))

    def reconnect(self) -> None:
        """Connect, and send all held scopes."""
        try:
            self.line = self._connect()
        except OSError:
            self.line = None
        for message in self._held.values():
            self._send(message)

    def _send(self, message: bytes) -> None:
        if self.line is not None:
            self.line.send(message)
