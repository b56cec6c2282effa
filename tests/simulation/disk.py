"""The disk, which outlives every server, and its journal: commits are slow, fail, or are lost with the process."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.journal.journal import (
    Checkpoint,
    Dropped,
    Entry,
    Forgotten,
    JournalError,
    Record,
    Recovered,
)
from simulation.clockwork import TICK, Clockwork, Process


@dataclass(slots=True)
class Disk:
    """The durable entries, and the present speed and failure rate of the disk."""

    clockwork: Clockwork
    random: random.Random
    # Called with every record at the moment at which it is durable, and with the time of its append.
    on_durable: Callable[[Record, float], None]
    on_forgotten: Callable[[Forgotten], None]
    on_stored: Callable[[StoreChange], None]
    note: Callable[..., None]
    # Mean seconds of a commit.
    latency: float = 0.002
    # Chance that a commit fails.
    failing: float = 0.0
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    records: dict[str, list[Record]] = field(default_factory=dict)
    values: dict[tuple[str, int, str], StoreChange] = field(default_factory=dict)

    def keep(self, entries: Sequence[Entry], given_at: float) -> None:
        """Make entries durable, atomically."""
        for entry in entries:
            match entry:
                case Record():
                    self.records.setdefault(entry.run_id, []).append(entry)
                    self.on_durable(entry, given_at)
                case Checkpoint():
                    self.note("checkpoint", entry.revision, entry.keep_from)
                    self.checkpoints[entry.run_id] = entry
                    kept = self.records.get(entry.run_id, [])
                    if not kept:  # the run begins with this checkpoint
                        self.on_forgotten(Forgotten(entry.run_id, entry.revision, entry.content))
                    self.records[entry.run_id] = [each for each in kept if each.revision >= entry.keep_from]
                case Forgotten():
                    self.on_forgotten(entry)
                    rest = Checkpoint(entry.run_id, entry.revision, entry.content, entry.revision + 1)
                    self.checkpoints[entry.run_id] = rest
                    self.records.pop(entry.run_id, None)
                    for key in [key for key in self.values if key[0] == entry.run_id]:
                        del self.values[key]
                case Dropped():
                    del self.checkpoints[entry.run_id]
                case StoreChange():
                    self._set(entry)

    def _set(self, change: StoreChange) -> None:
        self.on_stored(change)
        key = change.run_id, change.round, change.key
        if change.value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = change

    def recovered(self) -> Recovered:
        """Return all durable entries."""
        records = [record for kept in self.records.values() for record in kept]
        return Recovered(list(self.checkpoints.values()), records, list(self.values.values()))


@dataclass(slots=True, eq=False)
class _Commit:
    entries: Sequence[Entry]
    given_at: float
    done: asyncio.Future[None]


class DiskJournal:
    """The journal of one process of the server."""

    def __init__(self, disk: Disk, process: Process) -> None:
        self._disk = disk
        self._process = process
        self._under_way: deque[_Commit] = deque()
        self._last = 0.0
        self._broken = False

    @property
    def busy(self) -> bool:
        """True if a commit is in flight."""
        return bool(self._under_way)

    async def open(self) -> Recovered:
        """Return the durable entries."""
        return self._disk.recovered()

    async def append(self, entries: Sequence[Entry]) -> None:
        """Write entries; return when they are durable."""
        if self._broken:
            raise JournalError("the journal failed before; start again from what is durable")
        commit = _Commit(list(entries), self._disk.clockwork.now, self._process.create_future())
        self._under_way.append(commit)
        clockwork = self._disk.clockwork
        took = self._disk.random.expovariate(1 / self._disk.latency)
        self._last = max(self._last + TICK, clockwork.now + took)  # in the order of the appends
        clockwork.at(self._last, self._commit, commit)
        await commit.done

    def _commit(self, commit: _Commit) -> None:
        if commit not in self._under_way:
            return
        if self._disk.random.random() < self._disk.failing:
            self._break()
            return
        self._under_way.remove(commit)
        self._disk.keep(commit.entries, commit.given_at)
        self._process.call_soon(_settle, commit.done, None)

    def _break(self) -> None:
        """Fail; commits in flight may be durable or not, in order."""
        self._broken = True
        error = JournalError("the disk is full")
        waiting = [commit.done for commit in self._under_way]
        self.lose()
        for done in waiting:
            self._process.call_soon(_settle, done, error)

    def lose(self) -> None:
        """End with the process: of the commits in flight, the first few are durable, the others are lost."""
        kept = self._disk.random.randint(0, len(self._under_way))
        for commit in list(self._under_way)[:kept]:
            self._disk.keep(commit.entries, commit.given_at)
        self._under_way.clear()

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _settle(done: asyncio.Future[None], error: JournalError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
