"""Child programs: start them, follow their output, wait for their end, and leave no process of them.

This module polls no clock and no file: pipes and pidfds report every event.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds to wait for an event that takes one or two on an idle machine. It only bounds a failing wait; costs
nothing otherwise."""

_TO_DIE = 10.0  # seconds from a SIGKILL to the death of all descendants; the kernel takes milliseconds
_CHUNK = 1 << 16
# The kernel kills the program if this process dies without having stopped it.
_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")


class ClusterError(Exception):
    """An expected event did not happen; the message is one sentence, with the cause if it is known."""


class Feed(Generic[T]):
    """Items in the order of arrival, and a way to wait for a certain one."""

    def __init__(self) -> None:
        """Begin empty."""
        self.items: list[T] = []
        self._end: str | None = None
        self._news = asyncio.Event()

    def put(self, item: T) -> None:
        """Add an item."""
        self.items.append(item)
        self._wake()

    def end(self, why: str) -> None:
        """End the feed: no item follows, and every wait fails with the reason."""
        self._end = why
        self._wake()

    async def first(
        self, what: str, wanted: Callable[[T], bool], *, since: int = 0, timeout: float | None = PATIENCE
    ) -> T:
        """Return the first wanted item; wait for it if it has not come yet.

        Args:
            `what`: the expected item, for the error.
            wanted: returns True for that item.
            since: number of items to skip.
            timeout: seconds to wait.

        Raises:
            ClusterError: no such item came.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._first(what, wanted, since)
        except TimeoutError:
            raise ClusterError(f"waited {timeout:g} s in vain for {what}") from None

    async def _first(self, what: str, wanted: Callable[[T], bool], since: int) -> T:
        while True:
            news = self._news
            while since < len(self.items):
                since += 1
                if wanted(self.items[since - 1]):
                    return self.items[since - 1]
            if self._end is not None:
                raise ClusterError(f"waited for {what}, but {self._end}")
            await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a program, the time when it was read (Unix seconds), and its fields if it is a log record."""

    program: str
    time: float
    text: str
    event: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, program: str, text: str) -> Line:
        """Return the line, with event and fields if it is a log record, which is a JSON object."""
        with contextlib.suppress(ValueError):
            record = json.loads(text)
            if isinstance(record, dict):
                return cls(program, time.time(), text, str(record.get("event", "")), record)
        return cls(program, time.time(), text)


class Deaths:
    """Waits for the deaths of processes, which need not be children. A reused process id causes no error."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Begin to watch; a process that no longer exists is left out."""
        self.pids: list[int] = []
        self._pidfds: list[int] = []
        self._waits: list[asyncio.Future[float]] = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                self.pids.append(pid)
                self._pidfds.append(pidfd)
                self._waits.append(_death(pidfd))

    async def all(self, timeout: float) -> float:
        """Wait until all are dead; return the time of the last death (Unix seconds).

        Raises:
            ClusterError: some were still alive; they are killed now.
        """
        if self._waits:
            await asyncio.wait(self._waits, timeout=timeout)
        left = []
        for pid, pidfd, wait in zip(self.pids, self._pidfds, self._waits, strict=True):
            if not wait.done():
                left.append(pid)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if left:
            raise ClusterError(f"processes {left} were alive {timeout:g} s after they should have died")
        return max((wait.result() for wait in self._waits), default=time.time())


def _death(pidfd: int) -> asyncio.Future[float]:
    """Return a future for the time of the death. Owns the descriptor, and closes it then."""
    loop = asyncio.get_running_loop()
    died: asyncio.Future[float] = loop.create_future()

    def dead() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        if not died.cancelled():
            died.set_result(time.time())

    loop.add_reader(pidfd, dead)
    return died


@dataclass(frozen=True, slots=True)
class Killed:
    """The times when a program was killed and when its last process was dead, and the ids of all its processes."""

    at: float
    all_dead: float
    pids: frozenset[int]


class Program:
    """One program, from its start to its end. It has a session of its own: Ctrl-C does not reach it.

    Attributes:
        log: the lines of stderr, where logs go. Also in `<folder>/<name>.log`.
        output: the lines of stdout. Also in `<folder>/<name>.out`.
        `told_to_end`: True if this process requested its end.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        output: Feed[Line] | None = None,
    ) -> None:
        """Start it. Only in the main thread of a process: when that thread ends, the program is killed.

        Args:
            name: its name, also in the names of its files.
            command: program and arguments.
            folder: for its files, to which output is appended.
            environment: all of its environment.
            output: the feed for its stdout; None: one of its own.
        """
        self.name = name
        self.command = tuple(command)
        self.log: Feed[Line] = Feed()
        self.output = Feed[Line]() if output is None else output
        self.told_to_end = False
        self._process = subprocess.Popen(
            [*_WITH_US, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._death = _death(os.pidfd_open(self.pid))
        self._copies = [
            asyncio.create_task(self._copy(self._process.stdout, folder / f"{name}.out", self.output)),
            asyncio.create_task(self._copy(self._process.stderr, folder / f"{name}.log", self.log)),
        ]
        self._ending = asyncio.create_task(self._end())

    @property
    def running(self) -> bool:
        """True until it has ended."""
        return not self._ending.done()

    @property
    def report(self) -> str:
        """Errors for people: lines of stderr that are no log records, and the report in the last record of an agent."""
        texts = (line.fields.get("report", "") if line.event else line.text for line in self.log.items)
        return "\n".join(text for text in texts if text)

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    async def ended(self, timeout: float | None = None) -> int:
        """Wait for its end and for all its output; return its exit code, minus N for signal N.

        Raises:
            ClusterError: it still runs.
        """
        await asyncio.wait({self._ending}, timeout=timeout)
        if self.running:
            raise ClusterError(f"{self.name} (pid {self.pid}) did not end within {timeout:g} s")
        return self._ending.result()

    async def stop(self, grace: float) -> int:
        """Send SIGTERM, and SIGKILL after `grace` seconds; return the exit code.

        Raises:
            ClusterError: a process that it had started was still alive; it is killed, too.
        """
        self.told_to_end = True
        family = await self._family()
        self.signal(signal.SIGTERM)
        with contextlib.suppress(ClusterError):
            await self.ended(grace)
        if self.running:
            await self.kill()
        await family.all(_TO_DIE)
        return await self.ended()

    async def kill(self, patience: float = _TO_DIE) -> Killed:
        """Send SIGKILL; return when all processes that it had started are dead, too.

        The program itself must ensure that they die; this is checked.

        Raises:
            ClusterError: one of them was alive `patience` seconds later; it is killed, too.
        """
        self.told_to_end = True
        family = await self._family()
        killed = time.time()
        self.signal(signal.SIGKILL)
        all_dead = await family.all(patience)
        await self.ended(_TO_DIE)
        return Killed(killed, all_dead, frozenset(family.pids))

    async def _family(self) -> Deaths:
        """Return the deaths of it and of all processes that it has started; empty once it has ended."""
        if self._process.poll() is not None:  # its pid may be reused by now
            return Deaths([])
        # In a thread: on a machine with ten thousand processes it takes a second to find a few.
        return Deaths(await asyncio.to_thread(_family_of, self.pid))

    async def _end(self) -> int:
        await asyncio.wait({self._death})
        code = self._process.wait()
        # A process that inherited its streams may hold them open a little longer.
        await asyncio.wait(self._copies, timeout=_TO_DIE)
        self.log.end(
            f"{self.name} ended with {how_it_ended(code)}" + (f": {self.report}" if self.report else "")
        )
        return code

    async def _copy(self, stream: Any, path: Path, feed: Feed[Line]) -> None:
        reader, unfinished = asyncio.StreamReader(), b""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stream)
        try:
            with open(path, "ab", buffering=0) as file:  # noqa: ASYNC230  # a log file: no wait
                while chunk := await reader.read(_CHUNK):
                    file.write(chunk)
                    *lines, unfinished = (unfinished + chunk).split(b"\n")
                    for line in lines:
                        feed.put(Line.parse(self.name, line.decode("utf-8", "replace")))
                if unfinished:
                    feed.put(Line.parse(self.name, unfinished.decode("utf-8", "replace")))
        finally:
            transport.close()


def _family_of(pid: int) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def how_it_ended(code: int) -> str:
    """Return an exit code in words; minus N is signal N."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
