"""The agent's side of torch's own timers: the named pipes that torch.distributed.elastic's FileTimerClient writes to.

A worker that uses torch's file timer needs no change. It writes a line of JSON for each start and each end of a timer,
with the process id of the writer. A pipe does not identify its writer, so each worker has a pipe of its own, and a line
counts only if it names that worker or a descendant of it: no worker can cause another one to be killed. A process in a
pid namespace of its own writes its pid in that namespace, which is translated. torch writes the wall-clock time at
which a timer expires; it becomes a duration as soon as the line is read.
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

from rallypoint.agent.sockets.timer_tables import LONGEST, Holder, Holders, HostWorkers
from rallypoint.agent.spawner.spawner import descendants, read_process
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.text import clip_start
from rallypoint.timer.worker.wire import MAX_SCOPE_BYTES, NO_SIGNAL

log = get_logger(__name__)

# Sizes of the pipe in bytes, tried in this order; the first holds some 10,000 lines and is the most that an
# unprivileged process may have by default. torch's client raises into its worker's code when the pipe is full.
_CAPACITIES = (1 << 20, 512 << 10, 256 << 10, 128 << 10)
_READ = 1 << 16
# Reads in a row before the rest of the agent can run; together they empty the pipe.
_TURN = 16
# Seconds without reading after the pipe was read, so that a busy worker doesn't wake the agent for each line.
_REST = 0.005
# torch's lines are not longer: up to this size the kernel does not mix lines that several processes write at once.
_LONGEST_LINE = 4096
# Warnings about skipped lines, in all: a worker may write any number of such lines.
_MOST_WARNINGS = 10
# Lines of processes that are not known yet, kept until they are introduced.
_MOST_WAITING = 1024
# Seconds between two scans of the host for processes with another pid in their own namespace; 10 us for each process.
_SCAN_INTERVAL = 0.5
# Seconds to which the rest of a timer is rounded up, so that logs show "60 s" and not a little less.
_GRAIN = 0.01


class MalformedRequest(Exception):
    """The line is not a request of torch's client. The message has the expected form."""


@dataclass(frozen=True, slots=True)
class TimerRequest:
    """The content of a line.

    Attributes:
        pid: of the process that wrote it, in that process's own pid namespace.
        scope: name of its timer; the last 256 bytes of a longer one.
        expires_at: when the timer expires, in seconds of the wall clock; negative: it ends.
        signal: to kill the process with; NO_SIGNAL: do not kill it.
    """

    pid: int
    scope: str
    expires_at: float
    signal: int


def parse(line: bytes) -> TimerRequest:
    """Parse a line, as torch 2.13 writes it.

    Raises:
        MalformedRequest: it is not such a line.
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
    number = _integer(request, "signal")
    if number >= signal.NSIG:
        raise MalformedRequest(f"signal: expected less than {signal.NSIG}, not {number}")
    return TimerRequest(
        pid=_integer(request, "pid"),
        scope=clip_start(scope, MAX_SCOPE_BYTES) or "?",
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
    """Receives timers from torch's client in one of this host's workers. Belongs to one event loop.

    There is one timer per process and scope. It ends with a release, with its process, and with its worker.
    """

    def __init__(
        self,
        path: Path,
        holders: Holders,
        workers: HostWorkers,
        local_rank: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Set up; `start` makes the pipe.

        Args:
            path: of the pipe; the worker gets it as TORCHELASTIC_TIMER_FILE.
            wall_clock: the clock that torch's client uses.
        """
        self._path = path
        self._holders = holders
        self._workers = workers
        self._local_rank = local_rank
        self._wall_clock = wall_clock
        self._pipe = -1
        self._resting: asyncio.TimerHandle | None = None
        # The beginning of a line whose end is still in the pipe.
        self._partial = b""
        self._skipping = False
        # By pid in their own namespaces.
        self._processes: dict[int, _ClientProcess] = {}
        # Processes of the worker in other pid namespaces, by their pids there, and the time of the last scan.
        self._foreign_pids: dict[int, list[int]] = {}
        self._scanned_at = -math.inf
        # Requests of processes that are not known yet, with the end of their waiting time.
        self._waiting: list[tuple[float, TimerRequest]] = []
        self._line_timeout: asyncio.TimerHandle | None = None
        self._skipped_lines = 0

    def start(self) -> None:
        """Make the pipe and begin to read it.

        Raises:
            OSError: it can't be made; names the file.
        """
        os.mkfifo(self._path, 0o600)
        # Open for writing too, so that reads get no end of file when the last worker process closes it.
        self._pipe = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        for capacity in _CAPACITIES:
            with suppress(OSError):
                fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, capacity)
                break
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    def stop(self) -> None:
        """End all timers and remove the pipe."""
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
        """Check the waiting requests of unknown processes again, after new workers have become known."""
        waiting, self._waiting = self._waiting, []
        for until, request in waiting:
            self._act(request, until)

    def clear(self, worker_id: str) -> None:
        """End the timers of a worker that is gone."""
        for process in list(self._processes.values()):
            if process.holder.worker_id == worker_id:
                self._end(process)

    def read_requests(self) -> None:
        """Read all requests and end the timers of processes that are gone; called before an expiry is acted on."""
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
                self._warn_skipped(f"a line has more than {_LONGEST_LINE} bytes")
            self._skipping = True

    def _take(self, line: bytes) -> None:
        try:
            request = parse(line)
        except MalformedRequest as error:
            self._warn_skipped(str(error), line=line[:200].decode("utf-8", "replace"))
            return
        self._act(request, self._holders.clock() + self._holders.limits.introduction)

    def _act(self, request: TimerRequest, until: float) -> None:
        process = self._processes.get(request.pid) or self._add_process(request.pid)
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
            # SIGKILL is sent last in any case.
            signal=0 if request.signal == signal.SIGKILL else request.signal,
        )

    def _add_process(self, number: int) -> _ClientProcess | None:
        """Add the process with pid `number` in its own namespace, if it belongs to the worker."""
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
        # Requests from before it was known come before its present one.
        earlier = [request for _, request in self._waiting if request.pid == number]
        self._waiting = [each for each in self._waiting if each[1].pid != number]
        for request in earlier:
            self._apply(request, process)
        return process

    def _find(self, number: int) -> tuple[str, int] | None:
        """Return the worker's name, and the pid on this host of its process that has pid `number` in its namespace."""
        worker = self._workers.worker_at(self._local_rank)
        if worker is None:
            return None
        worker_id, root = worker
        if self._is(number, number, worker_id):
            return worker_id, number
        now = self._holders.clock()
        if now >= self._scanned_at + _SCAN_INTERVAL:
            self._scanned_at, self._foreign_pids = now, _foreign_pids_of(root)
        # If two processes have the same pid in two namespaces, the writer of a line is unknown.
        pids = self._foreign_pids.get(number, [])
        if len(pids) != 1:
            return None
        return (worker_id, pids[0]) if self._is(pids[0], number, worker_id) else None

    def _is(self, pid: int, number: int, worker_id: str) -> bool:
        """True if a process belongs to the worker, and has pid `number` in its own namespace."""
        return _own_number(pid) == number and self._workers.worker_of(pid) == worker_id

    def _end(self, process: _ClientProcess) -> None:
        self._processes.pop(process.number, None)
        process.close()

    def _hold(self, request: TimerRequest, until: float) -> None:
        """Keep a request until its process is introduced; skip it with a warning after `until`."""
        now = self._holders.clock()
        if now >= until or len(self._waiting) >= _MOST_WAITING:
            worker_id, _ = self._workers.worker_at(self._local_rank) or ("", 0)
            reason = "it names a process that is neither this worker nor a descendant of it"
            self._warn_skipped(reason, worker_id=worker_id, pid=request.pid)
            return
        self._waiting.append((until, request))
        if self._line_timeout is None:
            self._line_timeout = asyncio.get_running_loop().call_later(until - now, self._forget)

    def _forget(self) -> None:
        self._line_timeout = None
        self.introduce()

    def _warn_skipped(self, reason: str, **about: object) -> None:
        self._skipped_lines += 1
        if self._skipped_lines <= _MOST_WARNINGS:
            log.warning("skipped a line of torch's timer file", reason=reason, **about)
        if self._skipped_lines == _MOST_WARNINGS:
            log.warning("further skipped lines of torch's timer file will not be logged")


class _ClientProcess:
    """A process that uses torch's client, with its pid in its own namespace. Its timers end with it."""

    def __init__(self, number: int, holder: Holder, on_end: Callable[[_ClientProcess], None]) -> None:
        self.number = number
        self.holder = holder
        try:
            self._descriptor = os.pidfd_open(holder.pid)
        except OSError:
            # Gone already, or too many files are open. `read_requests` checks it before an expiry is acted on.
            self._descriptor = -1
        else:
            asyncio.get_running_loop().add_reader(self._descriptor, on_end, self)

    def gone(self) -> bool:
        """True if it has ended."""
        process = read_process(self.holder.pid)
        return process is None or process.dead

    def close(self) -> None:
        """End its timers."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
        self.holder.close()


def _own_number(pid: int) -> int | None:
    """Return the pid of a process in its own (innermost) pid namespace; None if it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            status = file.read()
    except OSError:
        return None
    _, found, rest = status.partition(b"\nNSpid:")
    return int(rest.split(b"\n", 1)[0].split()[-1]) if found else pid


def _foreign_pids_of(root: int) -> dict[int, list[int]]:
    """Return a worker's processes with another pid in their own namespace than on this host, by that pid."""
    found: dict[int, list[int]] = {}
    for process in descendants(root):
        number = _own_number(process.pid)
        if number is not None and number != process.pid:
            found.setdefault(number, []).append(process.pid)
    return found
