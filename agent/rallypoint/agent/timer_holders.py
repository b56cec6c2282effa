"""Which timers this host's workers hold, by whichever way their processes told the agent of them."""

from __future__ import annotations

import signal as signals
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from rallypoint.agent.processor_time import processor_time_of
from rallypoint.rpc.logs import get_logger
from rallypoint.timer.client.client import ExpiredTimer, OnExpired, OnForgotten
from rallypoint.timer.worker.wire import NO_SIGNAL

log = get_logger(__name__)

LONGEST = 315_360_000.0
"""Seconds, ten years: the longest that the service takes for a duration."""

# Of the second timer of a scope.
_FIRST_NUMBER = 2


class Timers(Protocol):
    """What is needed of a rallypoint.timer.client.client.TimerClient."""

    def start(self, on_expired: OnExpired, on_forgotten: OnForgotten | None = None) -> None:
        """Begins to talk with the service."""

    async def close(self) -> None:
        """Ends."""

    def acquire(
        self, worker_id: str, scope: str, after: float, since: float | None = None, learned_as: str = ""
    ) -> None:
        """Starts a timer."""

    def release(self, worker_id: str, scope: str) -> None:
        """Ends a timer."""

    def complete(self, worker_id: str, scope: str) -> None:
        """Ends a timer because its worker left the scope."""

    def observe(self, scope: str, count: int, longest: float) -> None:
        """Has the service learn how long a scope takes."""

    def progress(self, worker_id: str, rank: int, step: int, since: float) -> None:
        """Tells how far a worker has come."""

    def clear(self, worker_id: str) -> None:
        """Ends all timers of a worker."""

    def holds(self, expired: ExpiredTimer) -> bool:
        """Whether the timer that ran out is still the one that the worker holds."""


@dataclass(frozen=True, slots=True)
class TimerLimits:
    """What one worker, its child processes included, may take of its agent."""

    # Timers at once. Default 1024. What is beyond is not guarded, which the log says.
    timers: int = 1024
    # Connections at once, one per process. Default 256: data loaders of a very large host. Each costs two file
    # descriptors of the agent, one of them for its table.
    connections: int = 256
    # Seconds that a process nobody knows may wait to be introduced. Default 1. A worker can be quicker with its
    # first timer than the news of its start is; a second is long for news, and short for a stranger.
    introduction: float = 1.0
    # Strangers that may wait at once. Default 64; each costs a file descriptor.
    strangers: int = 64


@dataclass(frozen=True, slots=True)
class HeldTimer:
    """A timer that a process holds.

    Attributes:
        scope: what the worker is doing, as it says.
        known_as: the name of that at the service, where a worker has one timer per scope.
        pid: the process.
        signal: as in rallypoint.agent.hang.Hang.
        cpu_seconds: processor time of the process when the agent first saw the timer; None if it was gone.
    """

    scope: str
    known_as: str
    pid: int
    signal: int | None
    cpu_seconds: float | None


@dataclass(slots=True, eq=False)
class _Worker:
    worker_id: str
    # By their names at the service.
    timers: dict[str, HeldTimer] = field(default_factory=dict)
    # The lowest number that may be free, for scopes that many are in: a thousand tasks in one must not each try a
    # thousand names. Not there: _FIRST_NUMBER.
    free_from: dict[str, int] = field(default_factory=dict)
    holders: int = 0
    warned: bool = False

    def free_name(self, scope: str) -> str:
        """The scope's name at the service: several processes, threads and nested blocks of a worker may be in the
        same one, and each has its own deadline."""
        if scope not in self.timers:
            return scope
        number = self.free_from.get(scope, _FIRST_NUMBER)
        while (name := f"{scope}~{number}") in self.timers:
            number += 1
        self.free_from[scope] = number + 1
        return name

    def drop(self, timer: HeldTimer) -> None:
        """The timer has ended; its name is free."""
        del self.timers[timer.known_as]
        lowest = self.free_from.pop(timer.scope, _FIRST_NUMBER)
        if timer.known_as != timer.scope and lowest > _FIRST_NUMBER:
            number = int(timer.known_as[len(timer.scope) + 1 :])
            if number > _FIRST_NUMBER:
                self.free_from[timer.scope] = min(number, lowest)


class Holder:
    """A process of a worker, and the timers that it told of in one way. Made by `Holders.open`."""

    def __init__(self, holders: Holders, worker: _Worker, pid: int) -> None:
        self.pid = pid
        self._holders = holders
        self._timers = holders.timers
        self._worker = worker
        self._held: dict[Hashable, HeldTimer] = {}
        self._reading: list[float | None] = []
        self._closed = False

    @property
    def worker_id(self) -> str:
        """The worker to whom the process belongs."""
        return self._worker.worker_id

    def holds(self, key: Hashable) -> bool:
        """Whether there is a timer of this key."""
        return key in self._held

    @property
    def keys(self) -> list[Hashable]:
        """The keys of its timers."""
        return list(self._held)

    def begin_look(self) -> None:
        """News of the process are about to be taken: what was read in /proc for earlier ones is outdated."""
        self._reading.clear()

    def acquire(
        self, key: Hashable, scope: str, after: float, since: float, *, signal: int, learns: bool = False
    ) -> None:
        """A timer starts, or starts anew.

        Args:
            key: names it among those of this holder.
            scope: see HeldTimer.
            after: seconds that it may take; any if it learns.
            since: when it began, by CLOCK_MONOTONIC, in seconds; 0: now.
            signal: as in rallypoint.timer.worker.wire.Acquire.
            learns: whether how long it may take is learned.
        """
        former, worker = self._held.get(key), self._worker
        if former is not None and former.scope != scope:
            self.release(key)
            former = None
        if former is not None:
            known_as = former.known_as
        elif len(worker.timers) >= self._holders.limits.timers:
            self.warn("too many timers", self._holders.limits.timers)
            return
        else:
            known_as = worker.free_name(scope)
        if not self._reading:
            self._reading.append(processor_time_of(self.pid))
        timer = HeldTimer(scope, known_as, self.pid, _to_send(signal), self._reading[0])
        self._held[key] = worker.timers[known_as] = timer
        self._timers.acquire(
            worker.worker_id, known_as, after, self._holders.moment(since), scope if learns else ""
        )

    def release(self, key: Hashable) -> None:
        """A timer ends; harmless if there is none."""
        timer = self._drop(key)
        if timer is not None:
            self._timers.release(self.worker_id, timer.known_as)

    def complete(self, key: Hashable) -> None:
        """A timer ends because the process left its scope; harmless if there is none."""
        timer = self._drop(key)
        if timer is not None:
            self._timers.complete(self.worker_id, timer.known_as)

    def _drop(self, key: Hashable) -> HeldTimer | None:
        timer = self._held.pop(key, None)
        if timer is not None:
            self._worker.drop(timer)
        return timer

    def release_all(self) -> None:
        """All its timers end."""
        for key in self.keys:
            self.release(key)

    def observe(self, scope: str, completions: int, longest: float) -> None:
        """The process left a scope that learns so many times more; seconds."""
        # What the service would refuse would cost the stream, and with it all workers of this host.
        self._timers.observe(scope, completions, min(longest, LONGEST))

    def progress(self, step: int, when: float) -> None:
        """The process came to a step; `when` as `since` of `acquire`."""
        rank = self._holders.rank_of(self.worker_id)
        if rank is not None:
            self._timers.progress(self.worker_id, rank, step, self._holders.moment(when))

    def warn(self, what: str, limit: int) -> None:
        """Says, once per worker, that it takes more than it may."""
        if not self._worker.warned:
            self._worker.warned = True
            log.warning(f"{what}; those beyond are not guarded", worker_id=self.worker_id, limit=limit)

    def close(self) -> None:
        """All its timers end, and there will be no others. May be called more than once."""
        if not self._closed:
            self._closed = True
            self.release_all()
            self._holders.closed(self._worker)


class Holders:
    """All that hold timers on this host."""

    def __init__(
        self,
        timers: Timers,
        *,
        rank_of: Callable[[str], int | None],
        limits: TimerLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nobody holds any yet.

        Args:
            timers: is told of them.
            rank_of: global rank of a worker; None if there is no such worker.
            limits: see TimerLimits.
            clock: CLOCK_MONOTONIC, in seconds.
        """
        self.timers = timers
        self.rank_of = rank_of
        self.limits = limits
        self.clock = clock
        self._workers: dict[str, _Worker] = {}

    def open(self, worker_id: str, pid: int) -> Holder:
        """A process of a worker is going to tell of timers."""
        worker = self._workers.setdefault(worker_id, _Worker(worker_id))
        worker.holders += 1
        return Holder(self, worker, pid)

    def closed(self, worker: _Worker) -> None:
        """What Holder.close does."""
        worker.holders -= 1
        if not worker.holders:
            self._workers.pop(worker.worker_id, None)

    def find(self, worker_id: str, known_as: str) -> HeldTimer | None:
        """The timer that has this name at the service."""
        worker = self._workers.get(worker_id)
        return worker.timers.get(known_as) if worker is not None else None

    def moment(self, told: float) -> float:
        """What a process says of when something began: not later than now, and now if it says 0."""
        now = self.clock()
        return min(told, now) if told else now


def _to_send(asked: int) -> int | None:
    """The signal of a Hang. What is no signal is as good as none asked for: the worker is killed all the same."""
    if asked == NO_SIGNAL:
        return None
    return asked if asked < signals.NSIG else 0
