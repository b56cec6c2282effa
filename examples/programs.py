"""Programs that run beside this one: their output as it comes, their end as it happens, no trace of them after.

Nothing here polls a clock or a file: pipes and pidfds report every event.
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

_TO_DIE = 10.0  # seconds from a SIGKILL to the death of everything below; the kernel takes milliseconds
_CHUNK = 1 << 16
# The kernel kills the program should this process die without having stopped it.
_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")


class ClusterError(Exception):
    """An expected event did not happen; one sentence, and the known cause."""


class Feed(Generic[T]):
    """Things in the order in which they came, and a way to wait for the one that matters."""

    def __init__(self) -> None:
        """Empty."""
        self.items: list[T] = []
        self._end: str | None = None
        self._news = asyncio.Event()

    def put(self, item: T) -> None:
        """Adds one."""
        self.items.append(item)
        self._wake()

    def end(self, why: str) -> None:
        """End the feed: no item follows, and every wait fails with the reason."""
        self._end = why
        self._wake()

    async def first(
        self, what: str, wanted: Callable[[T], bool], *, since: int = 0, timeout: float | None = PATIENCE
    ) -> T:
        """The first that is wanted, there already or yet to come.

        Args:
            what: the expected item, for the error.
            wanted: returns True for that item.
            since: how many of the items not to look at.
            timeout: seconds to wait.

        Raises:
            ClusterError: it did not come.
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
    """A line of a program, when it was read (Unix seconds), and its fields if it is a log record."""

    program: str
    time: float
    text: str
    event: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, program: str, text: str) -> Line:
        """Return the fields of a log record, which is a JSON object; None for any other line."""
        with contextlib.suppress(ValueError):
            record = json.loads(text)
            if isinstance(record, dict):
                return cls(program, time.time(), text, str(record.get("event", "")), record)
        return cls(program, time.time(), text)


class Deaths:
    """Waits for the deaths of processes, which need not be children. A reused process id causes no error."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Watches from now on; who is dead already counts as dead."""
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
        """Waits until all are dead; returns when the last one was (Unix seconds).

        Raises:
            ClusterError: some lived on; they are killed now.
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
    """When the process died. Takes the descriptor, and closes it then."""
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
    """A program's violent end: when it was killed, when the last of its processes was dead, and which they were."""

    at: float
    all_dead: float
    pids: frozenset[int]


class Program:
    """One program, from its start to its end. In a session of its own: Ctrl-C here is none there.

    Attributes:
        log: the lines of stderr, where logs go. Also in `<folder>/<name>.log`.
        output: the lines of stdout. Also in `<folder>/<name>.out`.
        told_to_end: True if this process requested its end.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        output: Feed[Line] | None = None,
    ) -> None:
        """Starts it. Only in the main thread of a process: when that thread ends, the program is killed.

        Args:
            name: its name, also in the names of its files.
            command: program and arguments.
            folder: for its files, to which it adds.
            environment: all of its environment.
            output: where to put its stdout; without it, in a feed of its own.
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
        """Sends a signal, unless it has ended."""
        self._process.send_signal(number)

    async def ended(self, timeout: float | None = None) -> int:
        """Waits for its end and for everything that it wrote; returns its exit code, minus N for signal N.

        Raises:
            ClusterError: it goes on.
        """
        await asyncio.wait({self._ending}, timeout=timeout)
        if self.running:
            raise ClusterError(f"{self.name} (pid {self.pid}) did not end within {timeout:g} s")
        return self._ending.result()

    async def stop(self, grace: float) -> int:
        """Asks it to end, with SIGTERM, and kills it after `grace` seconds; returns its exit code.

        Raises:
            ClusterError: something that it had started lived on; it is killed, too.
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
        """Kills it with SIGKILL; returns when everything that it had started is dead, too.

        That nothing it had started stays is its own duty, and checked.

        Raises:
            ClusterError: something of it was alive `patience` seconds later; it is killed, too.
        """
        self.told_to_end = True
        family = await self._family()
        killed = time.time()
        self.signal(signal.SIGKILL)
        all_dead = await family.all(patience)
        await self.ended(_TO_DIE)
        return Killed(killed, all_dead, frozenset(family.pids))

    async def _family(self) -> Deaths:
        """The deaths of it and all processes that it has started; empty once it has ended."""
        if self._process.poll() is not None:  # its pid may be another's by now
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
    """An exit code in words; minus N is signal N."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
