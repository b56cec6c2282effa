"""The agent's eyes on the tables in which its workers keep their timers.

A worker rings when it has written and nobody looks. From then on the agent looks by itself, often, until nothing
has changed for a while: what a busy worker does costs it no system call, and an idle one costs the agent nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from collections.abc import Callable

from rallypoint.agent.timer_holders import Holder
from rallypoint.timer.worker.table import SIZE, SLOTS, MalformedTable, Slot, TableReader

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


class Table:
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
        self.told = told
        self._step: tuple[int, int] | None = None
        self._dropped = 0
        self._until = 0.0

    def wake(self) -> None:
        """Its process has rung: looks, and goes on looking."""
        now = self._tables.clock()
        self.look()
        self._promise(now)
        self._tables.watch(self)

    def attend(self) -> bool:
        """Looks, as was promised. Whether to come again; if not, the process rings."""
        now = self._tables.clock()
        last = now > self._until + _LATER
        if last:
            self._reader.listen_until(0)
        if not self.look():
            return not last
        self._promise(now)
        return True

    def _promise(self, now: float) -> None:
        self._until = now + _ATTENTION
        self._reader.listen_until(int(self._until * _BILLION))

    def look(self) -> bool:
        """Takes what has changed; whether anything has."""
        reader, holder = self._reader, self._holder
        if not reader.changed():
            return False
        holder.begin_look()
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

    def _acquire(self, slot: Slot) -> None:
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
            more = seen.completions - self.told.get(seen.scope, 0)
            self.told[seen.scope] = seen.completions
            if more > 0:
                self._holder.observe(_text(seen.scope), more, seen.longest / _BILLION)

    def forget(self, scope: str) -> None:
        """What was learned of a scope until now counts no more."""
        self.look()
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
        self._open: dict[Table, None] = {}
        self._watched: dict[Table, None] = {}
        self._alarm: asyncio.TimerHandle | None = None
        # A process whose connection broke brings the same table with the next: what it has told must not be told
        # twice. By worker and identity of the memory.
        self._told: dict[str, dict[Identity, dict[bytes, int]]] = {}

    def open(self, holder: Holder, descriptor: int) -> Table:
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
            table = Table(self, holder, memory, told)
        except MalformedTable as error:
            memory.close()
            raise TableRefused(str(error)) from None
        self._open[table] = None
        table.wake()
        return table

    def _remember(self, worker_id: str, identity: Identity) -> dict[bytes, int]:
        tables = self._told.setdefault(worker_id, {})
        told = tables.pop(identity, {})
        if len(tables) >= _MOST_REMEMBERED:
            del tables[next(iter(tables))]
        tables[identity] = told
        return told

    def watch(self, table: Table) -> None:
        """Looks at a table regularly, for as long as that says so."""
        self._watched[table] = None
        self._arm()

    def forget(self, scope: str) -> None:
        """A scope is learned anew: what tables say of it until now counts no more."""
        for table in list(self._open):
            table.forget(scope)

    def clear(self, worker_id: str) -> None:
        """A worker is gone."""
        self._told.pop(worker_id, None)

    def closed(self, table: Table) -> None:
        """What Table.close does."""
        self._open.pop(table, None)
        self._watched.pop(table, None)
        for other in self._open:
            # Its process has connected again with the same memory, where the one who left has promised to look.
            if other.told is table.told:
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
            self._watched = {table: None for table in list(self._watched) if table.attend()}
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
