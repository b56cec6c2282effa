"""A queue of deadlines in which entries are moved and dropped far more often than they come due."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

# Slots per second. A power of two, so that a slot begins at an exact moment. More of them are woken for more
# often; fewer put more items into the heap, from which what is dropped can't be taken at once.
_SLOTS = 4
# Below this many stale slots a sweep isn't worth its while.
_SWEEP_FLOOR = 64


class DeadlineQueue(Generic[T]):
    """Items, each with one deadline, in the order of their deadlines; equal ones in the order of scheduling.

    A heap alone would keep what is dropped until its deadline, or be swept: with 100,000 items that holds up the
    event loop for a tenth of a second every so often, and with it whatever is due. So only items that are due
    within a fraction of a second are in the heap. Those of later are in slots by time, unsorted, from which an
    item is taken at once. Scheduling and dropping are O(1), beside a heap of the slots' numbers; coming due is
    O(log n) for an item. Memory is O(n).
    """

    def __init__(self) -> None:
        # Slots that have not begun, and their numbers as a heap; those of slots that went away are stale.
        self._slots: dict[int, dict[T, float]] = {}
        self._order: list[int] = []
        # The number of the slot that each item in a slot is in.
        self._later: dict[T, int] = {}
        # The number of the last slot that has begun. Whatever is due in it or before is in the heap.
        self._begun: float = float("-inf")
        # An entry is stale if the item doesn't have its serial number, or isn't here at all.
        self._heap: list[tuple[float, int, T]] = []
        self._sooner: dict[T, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._later) + len(self._sooner)

    def schedule(self, item: T, when: float) -> None:
        """Gives the item a deadline, a finite one, in place of the one it has."""
        self.drop(item)
        number = math.floor(when * _SLOTS)
        if number <= self._begun:
            self._put_in_heap(item, when)
            return
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = {}
            heapq.heappush(self._order, number)
            if len(self._order) > 2 * len(self._slots) + _SWEEP_FLOOR:
                self._order = sorted(self._slots)
        slot[item] = when
        self._later[item] = number

    def drop(self, item: T) -> None:
        """Takes the item's deadline away; harmless if it has none."""
        number = self._later.pop(item, None)
        if number is None:
            self._sooner.pop(item, None)
            return
        slot = self._slots[number]
        del slot[item]
        if not slot:
            del self._slots[number]

    def earliest(self) -> float | None:
        """When to look for what is due: a quarter of a second before the earliest deadline or less, and not after
        it, so that looking twice is in time. None if there is none."""
        self._discard_stale()
        if self._heap:
            return self._heap[0][0]
        return self._order[0] / _SLOTS if self._order else None

    def pop_due(self, now: float) -> T | None:
        """Takes out the item with the earliest deadline if that is not after `now`."""
        if self._order and self._order[0] <= now * _SLOTS:
            self._begin(now)
        while self._heap and self._heap[0][0] <= now:
            _, serial, item = heapq.heappop(self._heap)
            if self._sooner.get(item) == serial:
                del self._sooner[item]
                return item
        return None

    def _begin(self, now: float) -> None:
        """Puts what is in slots that have begun into the heap."""
        while self._order and self._order[0] <= now * _SLOTS:
            number = heapq.heappop(self._order)
            self._begun = number
            for item, when in self._slots.pop(number, {}).items():
                del self._later[item]
                self._put_in_heap(item, when)

    def _put_in_heap(self, item: T, when: float) -> None:
        self._serial += 1
        self._sooner[item] = self._serial
        heapq.heappush(self._heap, (when, self._serial, item))

    def _discard_stale(self) -> None:
        while self._heap and self._sooner.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        while self._order and self._order[0] not in self._slots:
            heapq.heappop(self._order)
