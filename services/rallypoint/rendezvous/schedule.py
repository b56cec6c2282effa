"""When to look at which run again."""

from __future__ import annotations

import heapq


class Schedule:
    """One deadline per run. Asking for the next costs the same however many runs there are."""

    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}
        # Entries whose deadline is no longer the run's are passed over when they come up.
        self._queue: list[tuple[float, str]] = []

    def put(self, run_id: str, deadline: float | None) -> None:
        """Set a run's deadline in the place of the one before; None: it has none."""
        if deadline is None:
            self._deadlines.pop(run_id, None)
        elif self._deadlines.get(run_id) != deadline:
            self._deadlines[run_id] = deadline
            heapq.heappush(self._queue, (deadline, run_id))
            self._prune()

    def next(self) -> float | None:
        """The earliest deadline; None: there is none."""
        while self._queue:
            deadline, run_id = self._queue[0]
            if self._deadlines.get(run_id) == deadline:
                return deadline
            heapq.heappop(self._queue)
        return None

    def due(self, now: float) -> list[str]:
        """Take off the runs whose deadlines have come, the earliest first."""
        due = []
        while (deadline := self.next()) is not None and deadline <= now:
            _, run_id = heapq.heappop(self._queue)
            del self._deadlines[run_id]
            due.append(run_id)
        return due

    def _prune(self) -> None:
        """Deadlines that are moved more often than they come up must not pile up."""
        if len(self._queue) > 2 * len(self._deadlines) + 64:
            self._queue = [(deadline, run_id) for run_id, deadline in self._deadlines.items()]
            heapq.heapify(self._queue)
