"""What connections and messages cost a server: it takes them one after the other, and not while it is stopped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulation.clockwork import Clockwork, Process


@dataclass(frozen=True, slots=True)
class Costs:
    """Virtual seconds of a server's processor; 0: none."""

    accept: float = 0.0
    message: float = 0.0


@dataclass(slots=True)
class Cpu:
    """The processor of a process: work is done in the order in which it comes."""

    clockwork: Clockwork
    process: Process
    costs: Costs
    _waiting: deque[tuple[float, Callable[..., object], tuple[Any, ...]]] = field(default_factory=deque)
    _busy: bool = False
    # What was done aside, and is paid for before the next work.
    _owed: float = 0.0

    def accept(self, work: Callable[..., object], *args: Any) -> None:
        """Do what follows a connection."""
        self._take(self.costs.accept, work, *args)

    def message(self, work: Callable[..., object], *args: Any) -> None:
        """Do what follows a message."""
        self._take(self.costs.message, work, *args)

    def sent(self) -> None:
        """Pay for a message that leaves."""
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
