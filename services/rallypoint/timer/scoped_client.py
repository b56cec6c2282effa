"""Timers of this process by scope, as torch's timer clients have them: one per scope, started and ended at will."""

from __future__ import annotations

import os
import time

from rallypoint.timer.place import Place, encode
from rallypoint.timer.process import PATIENCE, process
from rallypoint.timer.table import TableWriter


class Client:
    """A TimerClient that tells Rallypoint's agent, over a connection of its own.

    Any thread may use it, but not two at once for the same scope.
    """

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, patience: float = PATIENCE) -> None:
        """Makes a client that connects at its first timer.

        Args:
            socket: path of the agent's timer socket; None: what RALLYPOINT_TIMER_SOCKET says.
            patience: most seconds to wait for an agent that doesn't read.

        Raises:
            RuntimeError: no socket is named.
        """
        uplink = process.open_uplink(socket, True, patience)
        assert uplink is not None
        self._uplink = uplink
        self._held: dict[str, tuple[TableWriter, int]] = {}

    def acquire(self, scope: str, after: float) -> None:
        """Starts the scope's timer, of `after` seconds; replaces the deadline of one that runs already.

        Raises:
            ValueError, TypeError: `after` is no duration (see `expires`), or `scope` no string.
        """
        text = encode(scope)
        place = Place(after, None, text)
        if not place.after:
            raise TypeError(f"after is {after!r}; expected a number of seconds: a client does not learn them")
        table = self._uplink.table()
        slot = table.acquire(table.tick(), time.monotonic_ns(), place.after, text, place.kind)
        former, self._held[scope] = self._held.get(scope), (table, slot)
        _end(former)
        if place.hasty or time.monotonic_ns() > table.listening[0]:
            table.ring()

    def release(self, scope: str) -> None:
        """Ends the scope's timer. One that does not run is no error."""
        held = self._held.pop(scope, None)
        _end(held)
        if held is not None and not held[0].listening[0]:
            held[0].ring()

    def close(self) -> None:
        """Ends all timers and the connection."""
        self._uplink.close()


def _end(held: tuple[TableWriter, int] | None) -> None:
    # -1: there was no slot left for it.
    if held is not None and held[1] >= 0:
        held[0].release(held[1])
