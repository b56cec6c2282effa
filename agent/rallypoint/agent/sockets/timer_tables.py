"""The agent's eyes on the tables in which its workers keep their timers.

A worker rings when it has written and nobody looks. From then on the agent looks by itself, often, until nothing
has changed for a while: what a busy worker does costs it no system call, and an idle one costs the agent nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import signal as signals
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from rallypoint.agent.hangs.kernel_stacks import processor_time_of
from rallypoint.rpc.logs import get_logger
from rallypoint.timer.client.client import ExpiredTimer, OnExpired, OnForgotten
from rallypoint.timer.worker.table import SIZE, SLOTS, MalformedTable, TableReader, TimerSlot
from rallypoint.timer.worker.wire import NO_SIGNAL

# ---- Which timers this host's workers hold, by whichever way their processes told the agent of them.


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
        signal: as in rallypoint.agent.hangs.hung_worker.Hang.
        cpu_seconds: processor time of the process when the agent first saw the timer; None if it was gone.
    """

    scope: str
    known_as: str
    pid: int
    signal: int | None
    cpu_seconds: float | None


@dataclass(slots=True, eq=False)
class _WorkerTimers:
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

    def __init__(self, holders: Holders, worker: _WorkerTimers, pid: int) -> None:
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

    def begin_pass(self) -> None:
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
        self._workers: dict[str, _WorkerTimers] = {}

    def open(self, worker_id: str, pid: int) -> Holder:
        """A process of a worker is going to tell of timers."""
        worker = self._workers.setdefault(worker_id, _WorkerTimers(worker_id))
        worker.holders += 1
        return Holder(self, worker, pid)

    def closed(self, worker: _WorkerTimers) -> None:
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


# Seconds between two looks. Half of the shortest timer for which a worker does not ring.
_PERIOD = 0.05
# Seconds that looking goes on after the last change.
_ATTENTION = 2.0
# Seconds by which the last look comes later than was promised: clocks are read as fractions, and round.
_LATER = 0.001
# F_GET_SEALS, F_SEAL_SHRINK and F_SEAL_GROW of Linux; Python has names for them from 3.13 on only.
_GET_SEALS, _FIXED_SIZE = 1034, 0x2 | 0x4
# Tables of one worker of which is known what they have told, those included whose connection is gone.
_MOST_REMEMBERED = 256
_BILLION = 1_000_000_000

Identity = tuple[int, int]


class TableRefused(Exception):
    """What a worker sent is no table, or not safe to read. One line."""


class OpenTable:
    """One process's table. Made by `Tables.open`."""

    def __init__(self, tables: Tables, holder: Holder, memory: mmap.mmap, told: dict[bytes, int]) -> None:
        self._tables = tables
        self._holder = holder
        self._memory = memory
        self._view = memoryview(memory)
        try:
            self._reader = TableReader(self._view)
        except MalformedTable:
            self._view.release()
            raise
        # Completions of which was told, by scope; the same object for all tables of one memory.
        self.reported = told
        self._step: tuple[int, int] | None = None
        self._dropped = 0
        self._until = 0.0

    def wake(self) -> None:
        """Its process has rung: looks, and goes on looking."""
        now = self._tables.clock()
        self.read_changes()
        self._promise(now)
        self._tables.watch(self)

    def poll(self) -> bool:
        """Looks, as was promised. Whether to come again; if not, the process rings."""
        now = self._tables.clock()
        last = now > self._until + _LATER
        if last:
            self._reader.listen_until(0)
        if not self.read_changes():
            return not last
        self._promise(now)
        return True

    def _promise(self, now: float) -> None:
        self._until = now + _ATTENTION
        self._reader.listen_until(int(self._until * _BILLION))

    def read_changes(self) -> bool:
        """Takes what has changed; whether anything has."""
        reader, holder = self._reader, self._holder
        if not reader.changed():
            return False
        holder.begin_pass()
        slots = {slot.token: slot for slot in reader.slots()}
        # First what ended: its name is free again for what began.
        for token in holder.keys:
            if token not in slots:
                holder.release(token)
        for token, slot in slots.items():
            if not holder.holds(token):
                self._acquire(slot)
        self._observe()
        step = reader.step()
        if step is not None and step != self._step:
            self._step = step
            holder.progress(step.step, step.when / _BILLION)
        if reader.dropped > self._dropped:
            self._dropped = reader.dropped
            holder.warn("too many timers", SLOTS)
        return True

    def _acquire(self, slot: TimerSlot) -> None:
        if not slot.after and not slot.learns:
            return  # no timer that anybody could have started
        self._holder.acquire(
            slot.token,
            _text(slot.scope),
            slot.after / _BILLION,
            slot.since / _BILLION,
            signal=slot.signal,
            learns=slot.learns,
        )

    def _observe(self) -> None:
        for seen in self._reader.observations():
            more = seen.completions - self.reported.get(seen.scope, 0)
            self.reported[seen.scope] = seen.completions
            if more > 0:
                self._holder.observe(_text(seen.scope), more, seen.longest / _BILLION)

    def forget(self, scope: str) -> None:
        """What was learned of a scope until now counts no more."""
        self.read_changes()
        for seen in self._reader.observations():
            if _text(seen.scope) == scope:
                self._reader.forget(seen.scope)

    def close(self) -> None:
        """Ends its timers and lets go of its memory. May be called more than once.

        A process that lives on rings with the next timer, and finds that it has to connect again.
        """
        if self._memory.closed:
            return
        self._reader.listen_until(0)
        self._tables.closed(self)
        self._holder.close()
        self._view.release()
        self._memory.close()


class Tables:
    """All tables of this host's workers: looked at in one go, by one alarm."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """There are none yet. `clock`: CLOCK_MONOTONIC, in seconds."""
        self.clock = clock
        self._open: dict[OpenTable, None] = {}
        self._watched: dict[OpenTable, None] = {}
        self._alarm: asyncio.TimerHandle | None = None
        # A process whose connection broke brings the same table with the next: what it has told must not be told
        # twice. By worker and identity of the memory.
        self._reported: dict[str, dict[Identity, dict[bytes, int]]] = {}

    def open(self, holder: Holder, descriptor: int) -> OpenTable:
        """Takes the table of a process, and looks at it.

        Args:
            holder: its timers; closed with the table.
            descriptor: its memory; stays the caller's.

        Raises:
            TableRefused: it is no table, or could be made smaller while it is read, which would kill the reader.
        """
        try:
            memory = _map(descriptor)
        except OSError as error:
            raise TableRefused(f"its memory can't be mapped: {error.strerror}") from None
        status = os.fstat(descriptor)
        told = self._remember(holder.worker_id, (status.st_dev, status.st_ino))
        try:
            table = OpenTable(self, holder, memory, told)
        except MalformedTable as error:
            memory.close()
            raise TableRefused(str(error)) from None
        self._open[table] = None
        table.wake()
        return table

    def _remember(self, worker_id: str, identity: Identity) -> dict[bytes, int]:
        tables = self._reported.setdefault(worker_id, {})
        told = tables.pop(identity, {})
        if len(tables) >= _MOST_REMEMBERED:
            del tables[next(iter(tables))]
        tables[identity] = told
        return told

    def watch(self, table: OpenTable) -> None:
        """Looks at a table regularly, for as long as that says so."""
        self._watched[table] = None
        self._arm()

    def forget(self, scope: str) -> None:
        """A scope is learned anew: what tables say of it until now counts no more."""
        for table in list(self._open):
            table.forget(scope)

    def clear(self, worker_id: str) -> None:
        """A worker is gone."""
        self._reported.pop(worker_id, None)

    def closed(self, table: OpenTable) -> None:
        """What Table.close does."""
        self._open.pop(table, None)
        self._watched.pop(table, None)
        for other in self._open:
            # Its process has connected again with the same memory, where the one who left has promised to look.
            if other.reported is table.reported:
                other.wake()
        if not self._watched and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _arm(self) -> None:
        if self._alarm is None and self._watched:
            self._alarm = asyncio.get_running_loop().call_later(_PERIOD, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        try:
            self._watched = {table: None for table in list(self._watched) if table.poll()}
        finally:
            # Whatever goes wrong: what was promised to the others holds.
            self._arm()


def _map(descriptor: int) -> mmap.mmap:
    """Maps a table's memory. Raises OSError, TableRefused."""
    expected = f"expected a memfd of {SIZE} bytes, sealed against shrinking and growing"
    try:
        seals = fcntl.fcntl(descriptor, _GET_SEALS)
    except OSError:
        raise TableRefused(f"its descriptor is none of a memfd; {expected}") from None
    if seals & _FIXED_SIZE != _FIXED_SIZE:
        raise TableRefused(f"its memory has the seals {seals:#x}; {expected}")
    if (size := os.fstat(descriptor).st_size) != SIZE:
        raise TableRefused(f"its memory has {size} bytes; {expected}")
    return mmap.mmap(descriptor, SIZE)


def _text(scope: bytes) -> str:
    """A scope's name. A worker writes UTF-8; whatever else stands there must not upset who is told."""
    return scope.decode("utf-8", "ignore") or "?"
