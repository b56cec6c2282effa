"""What time does to timers: which deadline each has, which ran out, who is to be told. Pure; time is an argument."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from rallypoint.rpc.clock import WatchClock
from rallypoint.timer.core.learning import Scope, ScopeBook
from rallypoint.timer.core.nodes import Nodes, Timer, TimerNode
from rallypoint.timer.core.values import Advance, Expiry, TimerSettings, TimerState, TimerView

# ---- A queue of deadlines in which entries are moved and dropped far more often than they come due.


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


# A deadline this close, in seconds, has come. Deadlines are moved between two clocks, and a sum of floats that
# rounds the wrong way must not have the caller wake at the same instant for ever.
_ROUNDING = 1e-6
# Timers judged in one go. A hundred thousand that run out in one instant must not hold up the event loop for a
# second, in which releases would wait; the rest are due at once and get their turn after the loop had its own.
_MOST_AT_ONCE = 2000


class Countdown:
    """The timers that run, and those that ran out. Deadlines are kept on a WatchClock (see lag.py)."""

    def __init__(self, now: float, settings: TimerSettings, nodes: Nodes, book: ScopeBook[Timer]) -> None:
        self._settings = settings
        self._nodes = nodes
        self._book = book
        self._clock = WatchClock(now, settings.lag)
        # What was learned only grows, so a timer that learns may come due here too early, never too late: how long
        # it may really take is looked up when it does.
        self._queue: DeadlineQueue[Timer | TimerNode] = DeadlineQueue()
        # Timers that began before enough was seen of their scope, to be given their deadlines now that it was.
        self._ripe: deque[Timer] = deque()
        self._timers = 0
        self._last_expiry = 0

    def __len__(self) -> int:
        return self._timers

    def watch(self, now: float) -> float:
        """What the watch clock shows."""
        return self._clock.read(now)

    # What is done to timers.

    def start(self, timer: Timer, former: Timer | None) -> None:
        """Adds a timer to its node and its scope, in place of the former one of its name."""
        node = timer.node
        after: float | None = timer.after
        if timer.learns is not None:
            # Before the former one goes, and takes the scope with it if it was the last that went by it.
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
        """Removes a timer, run out or not."""
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
        """Removes all timers of a worker; says how many."""
        held = list(node.workers.get(worker_id, {}).values())
        for timer in held:
            self.drop(timer)
        return len(held)

    def ripen(self, scope: Scope[Timer]) -> None:
        """Has the timers of a scope get their deadlines, since enough has been seen of it just now."""
        self._ripe.extend(scope.timers)

    # What becomes of nodes.

    def subscribed(self, node: TimerNode, now: float) -> None:
        """A node has a new subscriber, to be told at once what ran out."""
        self._queue.drop(node)
        for timer in node.expired.values():
            self._queue.schedule(timer, self._clock.read(now))

    def unsubscribed(self, node: TimerNode, now: float) -> None:
        """A node has no subscriber any more: what ran out is kept for a while."""
        for timer in node.expired.values():
            self._queue.schedule(timer, self._clock.read(now) + self._settings.retention)
        self.forget_if_idle(node, now)

    def forget_if_idle(self, node: TimerNode, now: float) -> None:
        """To be called when a node has lost a timer or its subscriber: it may not have to be known any more."""
        if node.stream or node.timers:
            self._queue.drop(node)
        elif node.lease:
            # Its lease must still fence an agent that was superseded and doesn't know yet.
            self._queue.schedule(node, self._clock.read(now) + self._settings.retention)
        else:
            self._queue.drop(node)
            self._nodes.remove(node, now)

    # What time does.

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
            item = self._queue.pop_due(watch + _ROUNDING)
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
        """How far the timer has come."""
        if timer.expiry_id:
            return TimerState.OFFERED if timer.node.stream else TimerState.UNCLAIMED
        learns = timer.learns is not None and timer.learns.after is None
        return TimerState.LEARNING if learns else TimerState.COUNTING

    def view(self, timer: Timer, state: TimerState, now: float) -> TimerView:
        """The timer, in its state, as people see it."""
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
            # It may have ended or run out, and its scope have been forgotten, in the meantime.
            if scope is None or scope.after is None or timer.expiry_id or timer not in scope.timers:
                continue
            self._queue.schedule(timer, timer.start + scope.after)

    def _has_run_out(self, timer: Timer, watch: float) -> bool:
        """Whether a timer that came due is due by what has been learned since; else it gets its new deadline."""
        scope = timer.learns
        if scope is None:
            return True
        if scope.after is None:
            return False
        deadline = timer.start + scope.after
        if deadline > watch + _ROUNDING:
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
