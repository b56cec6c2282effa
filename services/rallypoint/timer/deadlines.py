"""A queue of deadlines in which entries are moved and dropped far more often than they come due."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

# Below this many stale entries a sweep isn't worth its while.
_SWEEP_FLOOR = 64


class DeadlineQueue(Generic[T]):
    """Items, each with one deadline, in the order of their deadlines; equal ones in the order of scheduling.

    Moving or dropping an item leaves its old heap entry behind, stale. Stale entries are swept as soon as they
    outnumber the live ones, so every operation is O(log n) amortised and memory stays O(n): timers of an hour
    that are acquired and released a thousand times a second don't pile up for an hour.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._live: dict[T, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def schedule(self, item: T, when: float) -> None:
        """Gives the item a deadline, in place of the one it has."""
        self._serial += 1
        self._live[item] = self._serial
        heapq.heappush(self._heap, (when, self._serial, item))
        if len(self._heap) > 2 * len(self._live) + _SWEEP_FLOOR:
            self._sweep()

    def drop(self, item: T) -> None:
        """Takes the item's deadline away; harmless if it has none."""
        self._live.pop(item, None)

    def earliest(self) -> float | None:
        """The earliest deadline; None if there is none."""
        self._discard_stale()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> T | None:
        """Takes out the item with the earliest deadline if that is not after `now`."""
        self._discard_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        item = heapq.heappop(self._heap)[2]
        del self._live[item]
        return item

    def _discard_stale(self) -> None:
        while self._heap and self._live.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
        heapq.heapify(self._heap)
