"""The CPU cost of connections and messages of a server: it handles them one by one, and none while it is paused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulation.clockwork import Clockwork, Process


@dataclass(frozen=True, slots=True)
class Costs:
    """Virtual seconds of CPU time for each connection and message."""

    accept: float = 0.0
    message: float = 0.0


@dataclass(slots=True)
class Cpu:
    """The CPU of a process: work is done in order."""

    clockwork: Clockwork
    process: Process
    costs: Costs
    _waiting: deque[tuple[float, Callable[..., object], tuple[Any, ...]]] = field(default_factory=deque)
    _busy: bool = False
    # Seconds for messages sent, which delay the next work.
    _owed: float = 0.0

    def accept(self, work: Callable[..., object], *args: Any) -> None:
        """Do the work for a new connection."""
        self._take(self.costs.accept, work, *args)

    def message(self, work: Callable[..., object], *args: Any) -> None:
        """Do the work for a received message."""
        self._take(self.costs.message, work, *args)

    def sent(self) -> None:
        """Count the cost of a sent message."""
        self._owed += self.costs.message

    def _take(self, seconds: float, work: Callable[..., object], *args: Any) -> None:
        if self.costs == Costs():
            self.process.call_soon(work, *args)
            return
        self._waiting.append((seconds, work, args))
        if not self._busy:
            self._busy = True
            self.process.call_soon(self._begin)

    def _begin(self) -> None:
        seconds, work, args = self._waiting.popleft()
        seconds, self._owed = seconds + self._owed, 0.0
        self.clockwork.after(seconds, self.process.call_soon, self._finish, work, args)

    def _finish(self, work: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self._waiting:
            self.process.call_soon(self._begin)
        else:
            self._busy = False
        work(*args)
