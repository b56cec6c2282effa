"""Resource use of workers, each with all its descendants: read from /proc, without their help."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from rallypoint.agent.hangs.diagnostics import in_background
from rallypoint.agent.spawner.spawner import SPAWN_MARK, ProcessStat, descendants, read_process

READ_TIMEOUT = 1.0
"""Seconds that reading may take. Usually milliseconds; but the kernel blocks a reader of a process's memory figures
while the process changes its memory map, and one in uninterruptible sleep may do that for ever."""

_SHORTEST_SPAN = 0.5  # seconds; a shorter span has too few ticks of 10 ms to compute a load
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resource use of a worker with all its descendants.

    Attributes:
        processor_seconds: processor time spent so far, including ended descendants that their parent waited for.
        processors: processors kept busy on average, since the last measurement or else since its start.
        memory_bytes: private memory, plus its proportional share of shared memory where the kernel shows that.
        processes: number of processes, itself included.
        threads: number of threads of all of them.
    """

    processor_seconds: float
    processors: float
    memory_bytes: int
    processes: int
    threads: int


@dataclass(frozen=True, slots=True)
class _Times:
    """Sums over a process tree, from /proc/PID/stat."""

    processor_seconds: float
    threads: int
    age: float


class UsageMeter:
    """Measures the workers of one job; keeps the last measurements to compute their load since then."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, monotonic."""
        self._clock = clock
        # By the worker's pid: time and processor time of the last two measurements, so that two callers in quick
        # succession both get a span that is long enough.
        self._seen: dict[int, list[tuple[float, float]]] = {}
        self._reading: set[int] = set()

    async def measure(self, spawner: int, workers: Collection[int]) -> dict[int, Usage]:
        """Return the use of each worker by pid; without workers that are gone or can't be read in time.

        Args:
            spawner: pid of the process below which all workers are.
        """
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                trees = await in_background(partial(trees_of, spawner, frozenset(workers)))
                times = await in_background(lambda: {pid: _times_of(pid, trees[pid]) for pid in trees})
        except TimeoutError:
            return {}
        memory = await asyncio.gather(*(self._memory_of(pid, trees[pid]) for pid in trees))
        now, found = self._clock(), {}
        for (pid, tree), size in zip(trees.items(), memory, strict=True):
            if (seen := times[pid]) is not None:
                busy = self._busy(pid, now, seen)
                found[pid] = Usage(seen.processor_seconds, busy, size, len(tree), seen.threads)
        self._seen = {pid: samples for pid, samples in self._seen.items() if pid in found}
        return found

    def _busy(self, pid: int, now: float, seen: _Times) -> float:
        samples = self._seen.setdefault(pid, [])
        fitting = [sample for sample in samples if now - sample[0] >= _SHORTEST_SPAN]
        if not samples or fitting:
            self._seen[pid] = [*fitting[-1:], (now, seen.processor_seconds)]
        since, spent = fitting[-1] if fitting else (now - seen.age, 0.0)
        # The time of descendants that ended unwaited is lost, so the sum may shrink: count that as zero.
        return max(0.0, seen.processor_seconds - spent) / max(now - since, 1 / _TICKS)

    async def _memory_of(self, pid: int, tree: Iterable[int]) -> int:
        if pid not in self._reading:  # else each measurement would add one more blocked thread
            self._reading.add(pid)
            try:
                async with asyncio.timeout(READ_TIMEOUT):
                    return await in_background(partial(self._read_memory, pid, tuple(tree)))
            except TimeoutError:
                pass
        return sum(map(_private_bytes, tree))

    def _read_memory(self, pid: int, tree: tuple[int, ...]) -> int:
        try:
            return sum(_proportional_bytes(each) or _private_bytes(each) for each in tree)
        finally:
            self._reading.discard(pid)


def trees_of(spawner: int, workers: frozenset[int]) -> dict[int, list[int]]:
    """Return the living processes of each worker, itself first, including orphans."""
    owner: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    for process in descendants(spawner):  # parents come before children
        worker = _owner(process, spawner, workers, owner)
        if worker is not None:
            owner[process.pid] = worker
            if not process.dead:
                found.setdefault(worker, []).append(process.pid)
    return {worker: sorted(tree, key=lambda pid: pid != worker) for worker, tree in found.items()}


def worker_of(pid: int, spawner: int, workers: frozenset[int]) -> int | None:
    """Return the worker that a process is or descends from, orphans included; None for other processes."""
    seen: set[int] = set()
    while pid > 1 and pid not in seen and (process := read_process(pid)) is not None:
        if (worker := _owner(process, spawner, workers, {})) is not None:
            return worker
        seen.add(pid)
        pid = process.parent
    return None


def _owner(process: ProcessStat, spawner: int, workers: frozenset[int], owner: dict[int, int]) -> int | None:
    if process.pid in workers:
        return process.pid
    if process.parent != spawner:
        return owner.get(process.parent)
    if process.session in workers:
        return process.session
    mark = _mark(process.pid)
    return next((worker for worker in workers if mark and _mark(worker) == mark), None)


def _mark(pid: int) -> bytes:
    """Return the mark that the spawner wrote into the worker's environment and every descendant inherits."""
    begin = f"{SPAWN_MARK}=".encode()
    entries = _read(f"/proc/{pid}/environ", 1 << 20).split(b"\0")
    return next((entry for entry in entries if entry.startswith(begin)), b"")


def _times_of(worker: int, tree: Iterable[int]) -> _Times | None:
    spent, threads, begun = 0.0, 0, None
    for pid in tree:
        line = _read(f"/proc/{pid}/stat", 4096)
        # The command name, in parentheses, may hold anything: count from its end.
        fields = line[line.rfind(b")") + 2 :].split()
        if len(fields) < 20:
            continue
        # User and kernel time of itself, and of children that it waited for.
        spent += sum(map(int, fields[11:15])) / _TICKS
        threads += int(fields[17])
        if pid == worker:
            begun = int(fields[19]) / _TICKS
    if begun is None:
        return None
    return _Times(spent, threads, max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun))


def _proportional_bytes(pid: int) -> int:
    """Return private memory plus the proportional share of shared memory; 0 where the kernel does not show it."""
    for line in _read(f"/proc/{pid}/smaps_rollup", 16_384).splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _private_bytes(pid: int) -> int:
    """Return memory without shared pages. Reading it never blocks."""
    fields = _read(f"/proc/{pid}/statm", 4096).split()
    return (int(fields[1]) - int(fields[2])) * _PAGE if len(fields) > 2 else 0


def _read(path: str, most: int) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(most)
    except OSError:
        return b""
