"""What waits to be carried out, run by run, so that a run with much of it keeps no other waiting."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Turns(Generic[_T]):
    """A queue for each run, of which a turn takes the first few of each."""

    def __init__(self, most_per_run: int) -> None:
        """`most_per_run`: how many of one run a turn takes at most."""
        self._most = most_per_run
        self._waiting: dict[str, deque[_T]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, run_id: str, item: _T) -> None:
        """Add to the end of a run's queue."""
        self._waiting.setdefault(run_id, deque()).append(item)

    def take(self) -> list[_T]:
        """Take a turn: of each run what came first, in the order in which it came."""
        taken: list[_T] = []
        for run_id, queue in list(self._waiting.items()):
            taken.extend(queue.popleft() for _ in range(min(self._most, len(queue))))
            if not queue:
                del self._waiting[run_id]
        return taken
