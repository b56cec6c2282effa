"""The deadlines of timers, and the effects of time on them. Pure; time is an argument."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from rallypoint.rpc.clock import ROUNDING, WatchClock
from rallypoint.timer.core.learning import Scope, ScopeBook
from rallypoint.timer.core.nodes import Nodes, Timer, TimerNode
from rallypoint.timer.core.values import Advance, Expiry, TimerSettings, TimerState, TimerView

# ---- A queue of deadlines in which entries are moved and dropped far more often than they come due.


T = TypeVar("T", bound=Hashable)

# Slots per second. A power of two, so that a slot begins at an exactly representable time. More slots cause more
# wake-ups; fewer put more items into the heap, from which dropped items can't be removed at once.
_SLOTS = 4
# With fewer stale slots a sweep costs more than it saves.
_SWEEP_FLOOR = 64


class DeadlineQueue(Generic[T]):
    """Items, each with one deadline, in the order of their deadlines; equal ones in the order of scheduling.

    A heap alone would keep dropped items until their deadlines, or need sweeps: with 100,000 items a sweep blocks the
    event loop for a tenth of a second, and delays everything that is due. So only items due within a fraction of a
    second are in the heap. Later ones are in slots by time, unsorted, from which an item is removed at once.
    Scheduling and dropping are O(1), apart from a heap of the slots' numbers; coming due is O(log n) per item. Memory
    is O(n).
    """

    def __init__(self) -> None:
        # Slots that have not begun, and a heap of their numbers; numbers of removed slots are stale.
        self._slots: dict[int, dict[T, float]] = {}
        self._order: list[int] = []
        # Items in slots, with the number of their slot.
        self._later: dict[T, int] = {}
        # The number of the last slot that has begun. Items due in it or before are in the heap.
        self._begun: float = float("-inf")
        # An entry is stale if its serial number is not the one in `_sooner`.
        self._heap: list[tuple[float, int, T]] = []
        self._sooner: dict[T, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._later) + len(self._sooner)

    def schedule(self, item: T, when: float) -> None:
        """Set the item's deadline, a finite one, in place of its current one."""
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
        """Remove the item's deadline; harmless if it has none."""
        number = self._later.pop(item, None)
        if number is None:
            self._sooner.pop(item, None)
            return
        slot = self._slots[number]
        del slot[item]
        if not slot:
            del self._slots[number]

    def earliest(self) -> float | None:
        """Return when to look for due items: at most 0.25 s before the earliest deadline, never after it; None: no
        items."""
        self._discard_stale()
        if self._heap:
            return self._heap[0][0]
        return self._order[0] / _SLOTS if self._order else None

    def pop_due(self, now: float) -> T | None:
        """Remove and return the item with the earliest deadline if that is not after `now`, else None."""
        if self._order and self._order[0] <= now * _SLOTS:
            self._begin(now)
        while self._heap and self._heap[0][0] <= now:
            _, serial, item = heapq.heappop(self._heap)
            if self._sooner.get(item) == serial:
                del self._sooner[item]
                return item
        return None

    def _begin(self, now: float) -> None:
        """Move the items of slots that have begun into the heap."""
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


# Timers examined in one call. A hundred thousand that expire in one instant would block the event loop, and delay
# releases, for a second; the rest are due at once and are examined after the loop has run.
_MOST_AT_ONCE = 2000


class Countdown:
    """Running and expired timers. Deadlines are kept on a WatchClock (see rpc/clock.py)."""

    def __init__(self, now: float, settings: TimerSettings, nodes: Nodes, book: ScopeBook[Timer]) -> None:
        self._settings = settings
        self._nodes = nodes
        self._book = book
        self._clock = WatchClock(now, settings.lag)
        # A learned timeout only grows, so a learning timer may come due here too early, never too late: its present
        # timeout is looked up when it does.
        self._queue: DeadlineQueue[Timer | TimerNode] = DeadlineQueue()
        # Timers that began before the warm-up of their scope was complete and now need deadlines.
        self._ripe: deque[Timer] = deque()
        self._timers = 0
        self._last_expiry = 0

    def __len__(self) -> int:
        return self._timers

    def watch(self, now: float) -> float:
        """Return the watch clock's reading at `now`."""
        return self._clock.read(now)

    # Timers.

    def start(self, timer: Timer, former: Timer | None) -> None:
        """Add a timer to its node and its scope, in place of the former one of its name."""
        node = timer.node
        after: float | None = timer.after
        if timer.learns is not None:
            # Before the former one is dropped, which removes the scope if that was its last timer.
            timer.learns.timers.add(timer)
            after = timer.learns.after
        if former is not None:
            self.drop(former)
        scopes = node.workers.get(timer.worker_id)
        if scopes is None:
            scopes = node.workers[timer.worker_id] = {}
        scopes[timer.scope] = timer
        node.timers += 1
        self._timers += 1
        if after is not None:
            self._queue.schedule(timer, timer.start + after)

    def drop(self, timer: Timer) -> None:
        """Remove a timer, expired or not."""
        node = timer.node
        scopes = node.workers[timer.worker_id]
        del scopes[timer.scope]
        if not scopes:
            del node.workers[timer.worker_id]
        node.timers -= 1
        self._timers -= 1
        self._queue.drop(timer)
        if timer.expiry_id:
            del node.expired[timer.expiry_id]
        if timer.learns is not None:
            timer.learns.timers.discard(timer)
            self._book.tidy(timer.learns)

    def clear(self, node: TimerNode, worker_id: str) -> int:
        """Remove all timers of a worker; return how many."""
        held = list(node.workers.get(worker_id, {}).values())
        for timer in held:
            self.drop(timer)
        return len(held)

    def ripen(self, scope: Scope[Timer]) -> None:
        """Give the timers of a scope their deadlines: it has just completed its warm-up."""
        self._ripe.extend(scope.timers)

    # Nodes.

    def subscribed(self, node: TimerNode, now: float) -> None:
        """Note that a node has a new subscriber; its expired timers are due to be sent at once."""
        self._queue.drop(node)
        for timer in node.expired.values():
            self._queue.schedule(timer, self._clock.read(now))

    def unsubscribed(self, node: TimerNode, now: float) -> None:
        """Note that a node has lost its subscriber; its expired timers are kept for `retention` seconds."""
        for timer in node.expired.values():
            self._queue.schedule(timer, self._clock.read(now) + self._settings.retention)
        self.forget_if_idle(node, now)

    def forget_if_idle(self, node: TimerNode, now: float) -> None:
        """Forget a node without subscriber and timers, later if it has a lease. Call it when the node loses either."""
        if node.stream or node.timers:
            self._queue.drop(node)
        elif node.lease:
            # Its lease must still fence off a superseded agent that does not know yet.
            self._queue.schedule(node, self._clock.read(now) + self._settings.retention)
        else:
            self._queue.drop(node)
            self._nodes.remove(node, now)

    # Time.

    def next_wake(self, now: float) -> float | None:
        """See TimerTable."""
        if self._ripe:
            return now
        wake = math.inf
        earliest = self._queue.earliest()
        if earliest is not None:
            wake = earliest + self._clock.forgiven
        forget = self._book.next_forget()
        if forget is not None and forget < wake:
            wake = forget
        if self._timers:
            wake = min(wake, self._clock.next_look(now))
        return None if wake == math.inf else max(now, wake)

    def advance(self, now: float, due: float) -> Advance:
        """See TimerTable."""
        forgiven = self._clock.observe(now, due)
        watch = self._clock.read(now)
        self._book.forget_idle(now)
        self._schedule_ripe()
        expiries: list[Expiry] = []
        unclaimed = abandoned = 0
        for _ in range(_MOST_AT_ONCE):
            item = self._queue.pop_due(watch + ROUNDING)
            if item is None:
                break
            if isinstance(item, TimerNode):
                self._nodes.remove(item, now)
            elif not item.expiry_id and not self._has_run_out(item, watch):
                continue
            elif item.node.stream:
                self._expire(item)
                self._queue.schedule(item, watch + self._settings.reoffer_interval)
                expiries.append(_offer(item, now))
            elif not item.expiry_id:
                self._expire(item)
                self._queue.schedule(item, watch + self._settings.retention)
                unclaimed += 1
            else:
                self.drop(item)
                self.forget_if_idle(item.node, now)
                abandoned += 1
        return Advance(expiries, unclaimed, abandoned, forgiven)

    def state(self, timer: Timer) -> TimerState:
        """Return the state of the timer."""
        if timer.expiry_id:
            return TimerState.OFFERED if timer.node.stream else TimerState.UNCLAIMED
        learns = timer.learns is not None and timer.learns.after is None
        return TimerState.LEARNING if learns else TimerState.COUNTING

    def view(self, timer: Timer, state: TimerState, now: float) -> TimerView:
        """Return the timer, in its state, as it appears in lists."""
        scope = timer.learns
        after: float | None = timer.after
        remaining: float | None = timer.began + timer.after - now
        if not timer.expiry_id:
            after = timer.after if scope is None else scope.after
            remaining = None if after is None else timer.start + after - self._clock.read(now)
        learned_as = "" if scope is None else scope.name
        return TimerView(timer.name, after, remaining, state, timer.offers, learned_as)

    def _schedule_ripe(self) -> None:
        for _ in range(min(len(self._ripe), _MOST_AT_ONCE)):
            timer = self._ripe.popleft()
            scope = timer.learns
            # Meanwhile it may have ended or expired, or its scope may have been forgotten.
            if scope is None or scope.after is None or timer.expiry_id or timer not in scope.timers:
                continue
            self._queue.schedule(timer, timer.start + scope.after)

    def _has_run_out(self, timer: Timer, watch: float) -> bool:
        """Return True if a due timer has expired by its present timeout; else schedule its new deadline."""
        scope = timer.learns
        if scope is None:
            return True
        if scope.after is None:
            return False
        deadline = timer.start + scope.after
        if deadline > watch + ROUNDING:
            self._queue.schedule(timer, deadline)
            return False
        return True

    def _expire(self, timer: Timer) -> None:
        if timer.expiry_id:
            return
        self._last_expiry += 1
        timer.expiry_id = self._last_expiry
        timer.node.expired[timer.expiry_id] = timer
        scope = timer.learns
        if scope is not None and scope.after is not None:
            timer.after, timer.learned = scope.after, scope.learned


def _offer(timer: Timer, now: float) -> Expiry:
    timer.offers += 1
    late_by = now - timer.began - timer.after
    return Expiry(
        timer.expiry_id, timer.name, timer.after, late_by, timer.sequence, timer.offers, timer.learned
    )
