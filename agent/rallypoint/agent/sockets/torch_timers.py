"""The agent's end of torch's own timers: the named pipes that torch.distributed.elastic's FileTimerClient writes to.

A worker that uses torch's file timer needs no change. It writes a line of JSON for each start and each end of a
timer, with the process id of the writer. A pipe does not show who writes. So each worker has a pipe of its own, and a
line counts only if it names that worker or a descendant of it: no worker can have another one killed. A process in a
pid namespace of its own writes the number that it has there, which is translated. torch writes the wall-clock time at
which a timer ends; here that becomes a duration as soon as the line is read.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint.agent.sockets.timer_tables import LONGEST, Holder, Holders
from rallypoint.agent.spawner.spawner import descendants, read_process
from rallypoint.rpc.logs import get_logger
from rallypoint.timer.worker.wire import MAX_SCOPE_BYTES, NO_SIGNAL

log = get_logger(__name__)

# Bytes that the pipe is to hold: some 10,000 lines. torch's client raises into its worker's code when it is full,
# so as much as an unprivileged process is allowed by default is asked for, and then less.
_CAPACITIES = (1 << 20, 512 << 10, 256 << 10, 128 << 10)
_READ = 1 << 16
# Reads in a row before the rest of the agent gets its turn; together they empty the pipe.
_TURN = 16
# Seconds that the pipe is left alone after it was read, so that a busy worker doesn't wake the agent per line.
_REST = 0.005
# torch writes no longer lines: the kernel keeps those apart that several processes write at once.
_LONGEST_LINE = 4096
# Lines that are complained of, in all: a worker may write as many as it likes.
_MOST_COMPLAINTS = 10
# Lines of processes that nobody knows yet, kept until they are introduced.
_MOST_WAITING = 1024
# Seconds between two looks at all processes of the host, for one that has another number in a namespace of its own.
# A look takes some 10 us for each.
_BETWEEN_LOOKS = 0.5
# Seconds to which what is left of a timer is rounded up, so that people read "60 s" and not what is left of them.
_GRAIN = 0.01


class MalformedRequest(Exception):
    """The line is no request of torch's client. Says what was expected."""


@dataclass(frozen=True, slots=True)
class TimerRequest:
    """What a line says.

    Attributes:
        pid: the process that wrote it, by the number that it knows itself by.
        scope: names its timer; of more than 256 bytes, the last.
        expires_at: when the timer runs out, in seconds of the wall clock; negative: it ends.
        signal: to kill the process with; NO_SIGNAL: it is not to be killed.
    """

    pid: int
    scope: str
    expires_at: float
    signal: int


def parse(line: bytes) -> TimerRequest:
    """Reads a line, as torch 2.13 writes it.

    Raises:
        MalformedRequest: it is none.
    """
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise MalformedRequest("expected a JSON object on each line") from None
    if not isinstance(request, dict):
        raise MalformedRequest(f"expected a JSON object on each line, not {type(request).__name__}")
    scope = request.get("scope_id")
    if not isinstance(scope, str):
        raise MalformedRequest("scope_id: expected a string")
    encoded = scope.encode("utf-8", "replace")[-MAX_SCOPE_BYTES:]
    number = _integer(request, "signal")
    if number >= signal.NSIG:
        raise MalformedRequest(f"signal: expected less than {signal.NSIG}, not {number}")
    return TimerRequest(
        pid=_integer(request, "pid"),
        scope=encoded.decode("utf-8", "ignore") or "?",
        expires_at=_seconds(request, "expiration_time"),
        signal=number if number > 0 else NO_SIGNAL,
    )


def _integer(request: dict[str, Any], field: str) -> int:
    value = request.get(field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedRequest(f"{field}: expected an integer")
    return value


def _seconds(request: dict[str, Any], field: str) -> float:
    value = request.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            if math.isfinite(value):
                return float(value)
    raise MalformedRequest(f"{field}: expected a finite number of seconds")


class TimerFifo:
    """Takes timers from torch's client in one of this host's workers. Belongs to one event loop.

    There is one timer per process and scope. It ends with a release, with its process, and with its worker.
    """

    def __init__(
        self,
        path: Path,
        holders: Holders,
        *,
        worker: Callable[[], tuple[str, int] | None],
        worker_of: Callable[[int], str | None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Makes one to which nobody can write yet.

        Args:
            path: where the pipe is to be; what the worker gets as TORCHELASTIC_TIMER_FILE.
            holders: gets the timers.
            worker: the name and the process of the worker; None while there is none.
            worker_of: as for rallypoint.agent.sockets.timers.TimerSocket.
            wall_clock: the clock that torch's client tells its time by.
        """
        self._path = path
        self._holders = holders
        self._worker = worker
        self._worker_of = worker_of
        self._wall_clock = wall_clock
        self._pipe = -1
        self._resting: asyncio.TimerHandle | None = None
        # The beginning of a line whose end is still in the pipe.
        self._partial = b""
        self._skipping = False
        # By the numbers that they know themselves by.
        self._processes: dict[int, _ClientProcess] = {}
        # Processes of the worker in other pid namespaces, by their numbers there, and when that was last looked up.
        self._foreign_pids: dict[int, list[int]] = {}
        self._looked_at = -math.inf
        # What processes that nobody knows yet have written, with the end of its waiting.
        self._waiting: list[tuple[float, TimerRequest]] = []
        self._line_timeout: asyncio.TimerHandle | None = None
        self._complaints = 0

    def start(self) -> None:
        """Makes the pipe and reads it.

        Raises:
            OSError: it can't be made; names the file.
        """
        os.mkfifo(self._path, 0o600)
        # For writing too: so it never comes to an end when the last of its writers closes it.
        self._pipe = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        for capacity in _CAPACITIES:
            with suppress(OSError):
                fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, capacity)
                break
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    def stop(self) -> None:
        """Ends all timers and removes the pipe."""
        for process in list(self._processes.values()):
            self._end(process)
        if self._line_timeout is not None:
            self._line_timeout.cancel()
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        if self._pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1
            self._path.unlink(missing_ok=True)

    def introduce(self) -> None:
        """More workers have become known: looks again at what was written by processes that were unknown."""
        waiting, self._waiting = self._waiting, []
        for until, request in waiting:
            self._act(request, until)

    def clear(self, worker_id: str) -> None:
        """A worker is gone."""
        for process in list(self._processes.values()):
            if process.holder.worker_id == worker_id:
                self._end(process)

    def read_requests(self) -> None:
        """Takes all that was written and ends the timers of processes that are gone, before anybody is judged."""
        if self._pipe >= 0:
            self._drain()
        for process in list(self._processes.values()):
            if process.gone():
                self._end(process)

    def _read(self) -> None:
        self._drain()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pipe)
        self._resting = loop.call_later(_REST, self._wake)

    def _wake(self) -> None:
        self._resting = None
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    def _drain(self) -> None:
        for process in self._processes.values():
            process.holder.begin_pass()
        for _ in range(_TURN):
            try:
                read = os.read(self._pipe, _READ)
            except BlockingIOError:
                return
            self._split(read)

    def _split(self, read: bytes) -> None:
        *lines, self._partial = (self._partial + read).split(b"\n")
        for line in lines:
            if self._skipping:
                self._skipping = False
            elif line:
                self._take(line)
        if len(self._partial) > _LONGEST_LINE:
            self._partial = b""
            if not self._skipping:
                self._complain(f"a line has more than {_LONGEST_LINE} bytes")
            self._skipping = True

    def _take(self, line: bytes) -> None:
        try:
            request = parse(line)
        except MalformedRequest as error:
            self._complain(str(error), line=line[:200].decode("utf-8", "replace"))
            return
        self._act(request, self._holders.clock() + self._holders.limits.introduction)

    def _act(self, request: TimerRequest, until: float) -> None:
        process = self._processes.get(request.pid) or self._meet(request.pid)
        if process is None:
            self._hold(request, until)
        else:
            self._apply(request, process)

    def _apply(self, request: TimerRequest, process: _ClientProcess) -> None:
        if request.expires_at < 0:
            process.holder.release(request.scope)
            return
        after = min(request.expires_at - self._wall_clock(), LONGEST)
        process.holder.acquire(
            request.scope,
            request.scope,
            max(math.ceil(after / _GRAIN) * _GRAIN, _GRAIN),
            0.0,
            # SIGKILL comes last in any case.
            signal=0 if request.signal == signal.SIGKILL else request.signal,
        )

    def _meet(self, number: int) -> _ClientProcess | None:
        """The process that knows itself by a number, if it is the worker's."""
        try:
            found = self._find(number)
        except Exception:
            log.exception("could not find the process of a timer", pid=number)
            return None
        if found is None:
            return None
        worker_id, pid = found
        holder = self._holders.open(worker_id, pid)
        if len(self._processes) >= self._holders.limits.connections:
            holder.warn("too many processes with timers", self._holders.limits.connections)
            holder.close()
            return None
        process = self._processes[number] = _ClientProcess(number, holder, self._end)
        # What it wrote before it was known comes before what it writes now.
        earlier = [request for _, request in self._waiting if request.pid == number]
        self._waiting = [each for each in self._waiting if each[1].pid != number]
        for request in earlier:
            self._apply(request, process)
        return process

    def _find(self, number: int) -> tuple[str, int] | None:
        """The worker's name, and the process of it that knows itself by a number, by its number here."""
        worker = self._worker()
        if worker is None:
            return None
        worker_id, root = worker
        if self._is(number, number, worker_id):
            return worker_id, number
        now = self._holders.clock()
        if now >= self._looked_at + _BETWEEN_LOOKS:
            self._looked_at, self._foreign_pids = now, _foreign_pids_of(root)
        # Of two that have the same number, in two namespaces, it can't be known which of them wrote.
        pids = self._foreign_pids.get(number, [])
        if len(pids) != 1:
            return None
        return (worker_id, pids[0]) if self._is(pids[0], number, worker_id) else None

    def _is(self, pid: int, number: int, worker_id: str) -> bool:
        """Whether a process is the worker's, and knows itself by that number."""
        return _own_number(pid) == number and self._worker_of(pid) == worker_id

    def _end(self, process: _ClientProcess) -> None:
        self._processes.pop(process.number, None)
        process.close()

    def _hold(self, request: TimerRequest, until: float) -> None:
        """Keeps a line until its process is introduced, or it is time to forget it."""
        now = self._holders.clock()
        if now >= until or len(self._waiting) >= _MOST_WAITING:
            worker_id, _ = self._worker() or ("", 0)
            reason = "it names a process that is neither this worker nor a descendant of it"
            self._complain(reason, worker_id=worker_id, pid=request.pid)
            return
        self._waiting.append((until, request))
        if self._line_timeout is None:
            self._line_timeout = asyncio.get_running_loop().call_later(until - now, self._forget)

    def _forget(self) -> None:
        self._line_timeout = None
        self.introduce()

    def _complain(self, reason: str, **about: object) -> None:
        self._complaints += 1
        if self._complaints <= _MOST_COMPLAINTS:
            log.warning("skipped a line of torch's timer file", reason=reason, **about)
        if self._complaints == _MOST_COMPLAINTS:
            log.warning("more lines of torch's timer file that are skipped will not be told of")


class _ClientProcess:
    """A process that uses torch's client, and the number that it knows itself by. Its timers end with it."""

    def __init__(self, number: int, holder: Holder, on_end: Callable[[_ClientProcess], None]) -> None:
        self.number = number
        self.holder = holder
        try:
            self._descriptor = os.pidfd_open(holder.pid)
        except OSError:
            # Gone already, or too many files are open. It is looked for before anybody is judged.
            self._descriptor = -1
        else:
            asyncio.get_running_loop().add_reader(self._descriptor, on_end, self)

    def gone(self) -> bool:
        """Whether it has ended."""
        process = read_process(self.holder.pid)
        return process is None or process.dead

    def close(self) -> None:
        """Ends its timers."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
        self.holder.close()


def _own_number(pid: int) -> int | None:
    """The number that a process knows itself by: that of the innermost pid namespace it is in. None: it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            status = file.read()
    except OSError:
        return None
    _, found, rest = status.partition(b"\nNSpid:")
    return int(rest.split(b"\n", 1)[0].split()[-1]) if found else pid


def _foreign_pids_of(root: int) -> dict[int, list[int]]:
    """The processes of a worker that know themselves by another number than this host has for them, by that."""
    found: dict[int, list[int]] = {}
    for process in descendants(root):
        number = _own_number(process.pid)
        if number is not None and number != process.pid:
            found.setdefault(number, []).append(process.pid)
    return found
