"""The agent's side of the shared-memory tables in which its workers keep their timers.

A worker sends a wake-up message when it has written and the agent does not poll. From then on the agent polls, often,
until nothing has changed for a while: a busy worker needs no system call, and an idle one costs the agent nothing.
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

from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.hangs.kernel_stacks import processor_time_of
from rallypoint.rpc.logs import get_logger
from rallypoint.timer.client.client import NodeTimers
from rallypoint.timer.worker.table import SIZE, SLOTS, MalformedTable, TableReader, TimerSlot
from rallypoint.timer.worker.wire import NO_SIGNAL

# ---- The timers that this host's workers hold, received through a table, the socket or torch's pipe.


log = get_logger(__name__)

LONGEST = 315_360_000.0
"""Seconds, ten years: the longest duration that the service accepts."""

# Number of the second timer of a scope.
_FIRST_NUMBER = 2


class HostWorkers(Protocol):
    """The workers of this host: a socket asks which of them connects, and has one reaped whose timer has expired."""

    def worker_of(self, pid: int) -> str | None:
        """Return the name of the worker that a process is or descends from; None for other processes."""

    def worker_at(self, local_rank: int) -> tuple[str, int] | None:
        """Return name and pid of the worker with this local rank; None if it does not run."""

    def rank_of(self, worker: str) -> int | None:
        """Return the global rank of the worker with this name; None if there is none."""

    async def reap(self, hang: HungWorker) -> bool | None:
        """Diagnose a worker that hangs, and kill it. Returns False if that failed: try again later."""


@dataclass(frozen=True, slots=True)
class TimerLimits:
    """Limits of the agent's resources for one worker, its child processes included."""

    # Timers at once. Default 1024. Further ones are not guarded, which is logged.
    timers: int = 1024
    # Connections at once, one per process. Default 256: data loaders of a very large host. Each costs two file
    # descriptors of the agent, one of them for its table.
    connections: int = 256
    # Seconds that an unknown process may wait to be introduced. Default 1. A worker's first timer can arrive before
    # the spawner's report of its start; a second is long for that report, and short for an unrelated process.
    introduction: float = 1.0
    # Unknown processes that may wait at once. Default 64; each costs a file descriptor.
    strangers: int = 64


@dataclass(frozen=True, slots=True)
class HeldTimer:
    """A timer that a process holds.

    Attributes:
        scope: the scope's name, as the worker gave it.
        known_as: the scope's name at the service, where a worker has one timer per scope.
        pid: of the process.
        signal: as in rallypoint.agent.hangs.hung_worker.HungWorker.
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
    # By name at the service.
    timers: dict[str, HeldTimer] = field(default_factory=dict)
    # Lowest number that may be free (default _FIRST_NUMBER), so that a thousand tasks in a scope do not try all names.
    free_from: dict[str, int] = field(default_factory=dict)
    holders: int = 0
    warned: bool = False

    def free_name(self, scope: str) -> str:
        """Return a free name for the scope at the service: several processes, threads and nested blocks of a worker
        may be in the same scope, and each has its own deadline."""
        if scope not in self.timers:
            return scope
        number = self.free_from.get(scope, _FIRST_NUMBER)
        while (name := f"{scope}~{number}") in self.timers:
            number += 1
        self.free_from[scope] = number + 1
        return name

    def drop(self, timer: HeldTimer) -> None:
        """Remove an ended timer; its name becomes free."""
        del self.timers[timer.known_as]
        lowest = self.free_from.pop(timer.scope, _FIRST_NUMBER)
        if timer.known_as != timer.scope and lowest > _FIRST_NUMBER:
            number = int(timer.known_as[len(timer.scope) + 1 :])
            if number > _FIRST_NUMBER:
                self.free_from[timer.scope] = min(number, lowest)


class Holder:
    """A process of a worker, and the timers that it reported in one way. Made by `Holders.open`."""

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
        """The worker of the process."""
        return self._worker.worker_id

    def holds(self, key: Hashable) -> bool:
        """Return true if there is a timer with this key."""
        return key in self._held

    @property
    def keys(self) -> list[Hashable]:
        """The keys of its timers."""
        return list(self._held)

    def begin_pass(self) -> None:
        """Begin to read reports of the process: the value cached from /proc for earlier reports is outdated."""
        self._reading.clear()

    def acquire(
        self, key: Hashable, scope: str, after: float, since: float, *, signal: int, learns: bool = False
    ) -> None:
        """Start a timer, or start it again.

        Args:
            key: identifies it among those of this holder.
            scope: see HeldTimer.
            after: timeout in seconds; not used if it learns.
            since: start time by CLOCK_MONOTONIC, in seconds; 0: now.
            signal: as in rallypoint.timer.worker.wire.Acquire.
            learns: true if the service learns the timeout.
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
        """End a timer; no effect if there is none."""
        timer = self._drop(key)
        if timer is not None:
            self._timers.release(self.worker_id, timer.known_as)

    def complete(self, key: Hashable) -> None:
        """End a timer because the process left its scope; no effect if there is none."""
        timer = self._drop(key)
        if timer is not None:
            self._timers.complete(self.worker_id, timer.known_as)

    def _drop(self, key: Hashable) -> HeldTimer | None:
        timer = self._held.pop(key, None)
        if timer is not None:
            self._worker.drop(timer)
        return timer

    def release_all(self) -> None:
        """End all its timers."""
        for key in self.keys:
            self.release(key)

    def observe(self, scope: str, completions: int, longest: float) -> None:
        """Report `completions` more exits from a learning scope, the longest of `longest` seconds."""
        # A duration that the service refuses would break the stream of all workers of this host.
        self._timers.observe(scope, completions, min(longest, LONGEST))

    def progress(self, step: int, when: float) -> None:
        """Report that the process reached a step; `when` as `since` of `acquire`."""
        rank = self._holders.rank_of(self.worker_id)
        if rank is not None:
            self._timers.progress(self.worker_id, rank, step, self._holders.moment(when))

    def warn(self, problem: str, limit: int) -> None:
        """Log, once per worker, that it exceeds a limit."""
        if not self._worker.warned:
            self._worker.warned = True
            log.warning(f"{problem}; those beyond are not guarded", worker_id=self.worker_id, limit=limit)

    def close(self) -> None:
        """End all its timers for good. May be called more than once."""
        if not self._closed:
            self._closed = True
            self.release_all()
            self._holders.closed(self._worker)


class Holders:
    """All holders of timers on this host."""

    def __init__(
        self,
        timers: NodeTimers,
        *,
        rank_of: Callable[[str], int | None],
        limits: TimerLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up without holders.

        Args:
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
        """Make a holder for a process of a worker."""
        worker = self._workers.setdefault(worker_id, _WorkerTimers(worker_id))
        worker.holders += 1
        return Holder(self, worker, pid)

    def closed(self, worker: _WorkerTimers) -> None:
        """Remove a closed holder; called by `Holder.close`."""
        worker.holders -= 1
        if not worker.holders:
            self._workers.pop(worker.worker_id, None)

    def find(self, worker_id: str, known_as: str) -> HeldTimer | None:
        """Return the timer with this name at the service; None if there is none."""
        worker = self._workers.get(worker_id)
        return worker.timers.get(known_as) if worker is not None else None

    def moment(self, reported: float) -> float:
        """Return the start time that a process reported, but not later than now; now if it reported 0."""
        now = self.clock()
        return min(reported, now) if reported else now


def _to_send(requested: int) -> int | None:
    """Return the signal for a HungWorker; None: do not kill. An invalid number counts as 0: SIGKILL at once."""
    if requested == NO_SIGNAL:
        return None
    return requested if requested < signals.NSIG else 0


# Seconds between two polls. Half of the shortest timer for which a worker sends no wake-up.
_PERIOD = 0.05
# Seconds that polling continues after the last change.
_ATTENTION = 2.0
# Seconds by which the last poll comes after the promised end: clock values are converted to floats, which rounds.
_LATER = 0.001
# F_GET_SEALS, F_SEAL_SHRINK and F_SEAL_GROW of Linux; Python has names for them from 3.13 on only.
_GET_SEALS, _FIXED_SIZE = 1034, 0x2 | 0x4
# Tables of one worker whose reported completions are remembered, including tables without a connection.
_MOST_REMEMBERED = 256
_BILLION = 1_000_000_000

Identity = tuple[int, int]


class TableRefused(Exception):
    """A worker sent something that is not a table, or not safe to read. One line."""


class OpenTable:
    """One process's table. Made by `Tables.open`."""

    def __init__(self, tables: Tables, holder: Holder, memory: mmap.mmap, reported: dict[bytes, int]) -> None:
        self._tables = tables
        self._holder = holder
        self._memory = memory
        self._view = memoryview(memory)
        try:
            self._reader = TableReader(self._view)
        except MalformedTable:
            self._view.release()
            raise
        # Completions already reported, by scope; the same object for all tables of one memory.
        self.reported = reported
        self._step: tuple[int, int] | None = None
        self._dropped = 0
        self._until = 0.0

    def wake(self) -> None:
        """Read the table after a wake-up of its process, and begin to poll it."""
        now = self._tables.clock()
        self.read_changes()
        self._promise(now)
        self._tables.watch(self)

    def poll(self) -> bool:
        """Read the table, as promised. True: poll again; false: the process sends a wake-up next time."""
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
        """Read the changes of the table; false if there are none."""
        reader, holder = self._reader, self._holder
        if not reader.changed():
            return False
        holder.begin_pass()
        slots = {slot.token: slot for slot in reader.slots()}
        # Ended timers first: their names become free for new ones.
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
            return  # an invalid slot: a timer has a timeout or learns it
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
        """Discard the durations of a scope recorded until now."""
        self.read_changes()
        for seen in self._reader.observations():
            if _text(seen.scope) == scope:
                self._reader.forget(seen.scope)

    def close(self) -> None:
        """End its timers and unmap its memory. May be called more than once.

        A process that is still alive sends a wake-up with its next timer, which fails, and then connects again.
        """
        if self._memory.closed:
            return
        self._reader.listen_until(0)
        self._tables.closed(self)
        self._holder.close()
        self._view.release()
        self._memory.close()


class Tables:
    """All tables of this host's workers: polled together, by one timer of the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Set up without tables. `clock`: CLOCK_MONOTONIC, in seconds."""
        self.clock = clock
        self._open: dict[OpenTable, None] = {}
        self._watched: dict[OpenTable, None] = {}
        self._alarm: asyncio.TimerHandle | None = None
        # A process whose connection broke sends the same table with the next one: its completions must not be
        # reported twice. By worker and identity of the memory.
        self._reported: dict[str, dict[Identity, dict[bytes, int]]] = {}

    def open(self, holder: Holder, descriptor: int) -> OpenTable:
        """Map the table of a process, and read it.

        Args:
            holder: its timers; closed with the table.
            descriptor: its memory; stays the caller's to close.

        Raises:
            TableRefused: it is not a table, or could be shrunk while it is read, which would kill the reader (SIGBUS).
        """
        try:
            memory = _map(descriptor)
        except OSError as error:
            raise TableRefused(f"its memory can't be mapped: {error.strerror}") from None
        status = os.fstat(descriptor)
        reported = self._remember(holder.worker_id, (status.st_dev, status.st_ino))
        try:
            table = OpenTable(self, holder, memory, reported)
        except MalformedTable as error:
            memory.close()
            raise TableRefused(str(error)) from None
        self._open[table] = None
        table.wake()
        return table

    def _remember(self, worker_id: str, identity: Identity) -> dict[bytes, int]:
        tables = self._reported.setdefault(worker_id, {})
        reported = tables.pop(identity, {})
        if len(tables) >= _MOST_REMEMBERED:
            del tables[next(iter(tables))]
        tables[identity] = reported
        return reported

    def watch(self, table: OpenTable) -> None:
        """Poll a table regularly, until its `poll` returns false."""
        self._watched[table] = None
        self._arm()

    def forget(self, scope: str) -> None:
        """Discard the recorded durations of a scope in all tables: the service learns it again."""
        for table in list(self._open):
            table.forget(scope)

    def clear(self, worker_id: str) -> None:
        """Forget the reported completions of a worker that is gone."""
        self._reported.pop(worker_id, None)

    def closed(self, table: OpenTable) -> None:
        """Remove a closed table; called by `OpenTable.close`."""
        self._open.pop(table, None)
        self._watched.pop(table, None)
        for other in self._open:
            # Its process has connected again with the same memory, in which the closed table promised polls.
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
            # Also after an exception: polls were promised to the other tables.
            self._arm()


def _map(descriptor: int) -> mmap.mmap:
    """Map a table's memory. Raises OSError, TableRefused."""
    expected = f"expected a memfd of {SIZE} bytes, sealed against shrinking and growing"
    try:
        seals = fcntl.fcntl(descriptor, _GET_SEALS)
    except OSError:
        raise TableRefused(f"its descriptor is not a memfd; {expected}") from None
    if seals & _FIXED_SIZE != _FIXED_SIZE:
        raise TableRefused(f"its memory has the seals {seals:#x}; {expected}")
    if (size := os.fstat(descriptor).st_size) != SIZE:
        raise TableRefused(f"its memory has {size} bytes; {expected}")
    return mmap.mmap(descriptor, SIZE)


def _text(scope: bytes) -> str:
    """Decode a scope's name. Workers write UTF-8; invalid bytes are ignored, so that the service accepts the name."""
    return scope.decode("utf-8", "ignore") or "?"
