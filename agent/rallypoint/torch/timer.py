"""torch's own `timer.expires`, watched by Rallypoint's timer service, or by a server in a program of your own.

Only the line with `configure` changes in a program:

    from torch.distributed.elastic import timer
    from rallypoint.torch.timer import RallypointTimerClient

    timer.configure(RallypointTimerClient())
    with timer.expires(after=60):
        loss = step(batch)

Without an agent, the process that starts the others makes a queue and a server, and passes the queue on:

    queue = multiprocessing.get_context("spawn").Queue()
    RallypointTimerServer(queue, max_interval=0.1).start()    # where the processes are started
    timer.configure(RallypointTimerClient(queue))             # in each of them

The same program under an agent has its timers watched by the timer service, and the server reaps no process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal as signals
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from queue import Empty
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch.distributed.elastic.timer import TimerClient, TimerRequest, TimerServer, api
from torch.distributed.elastic.timer.api import RequestQueue

from rallypoint.rpc.logs import get_logger
from rallypoint.timer import expires
from rallypoint.timer.worker.process import SOCKET_VARIABLE
from rallypoint.timer.worker.scopes import encode

if TYPE_CHECKING:
    from rallypoint.timer.worker.expires import Guard

__all__ = ["RallypointRequestQueue", "RallypointTimerClient", "RallypointTimerServer"]

log = get_logger(__name__)

# Ten years: the longest time of a timer. torch accepts any later time, infinity too.
_LONGEST = 315_360_000.0
# A timer whose time has passed already expires at once.
_SHORTEST = 1e-9
# torch 2.13 looks one frame too near for its default scope, which is then a line of contextlib for all blocks.
_DEFAULT_SCOPE = f"{contextlib.__file__}#"
_NOT_THE_CALLER = (contextlib.__file__, api.__file__)
# The time of a request that ends a timer; any negative one does.
_RELEASE = -1.0
# A jump of the wall clock by so many seconds is a correction of it; less is its drift beside the monotonic clock.
_JUMP = 0.1
# Seconds that a request may take from one process to another; after that it counts as lost.
_ARRIVAL = 0.1


class Queue(Protocol):
    """The part of `multiprocessing.Queue` that timers use; a manager's queue has it as well."""

    def put(self, obj: Any) -> None:
        """Append an object."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the first object, or raise `queue.Empty` after `timeout` seconds."""

    def qsize(self) -> int:
        """Return the number of objects, of which some may not have arrived yet."""


class RallypointTimerClient(TimerClient):  # type: ignore[misc]  # torch has no types here
    """Timers of this process, at the same agent that `rallypoint.timer.expires` uses, or at a server behind a queue.

    As in torch, a process has one timer per scope: a second `acquire` replaces its deadline, also from another
    thread. A forked child starts without timers. If threads or nested blocks share a scope, use
    `rallypoint.timer.expires`: each of its blocks has its own timer. To torch 2.13 all blocks without a named scope
    have the same one; here they are shown with the line that they are in.
    """

    def __init__(self, queue: Queue | None = None, *, signal: int | None = None) -> None:
        """Make a client without timers.

        Args:
            queue: The `multiprocessing.Queue` of a `RallypointTimerServer`, or of torch's LocalTimerServer, used where
                RALLYPOINT_TIMER_SOCKET names no agent. Such a server kills by SIGKILL alone. A process that is killed
                while it writes to a queue may block it for all others: an agent's workers don't have that risk.
            signal: Signal sent to a hung worker before SIGKILL, 1 to 64; 0: the hang is only reported. Default: SIGKILL
                at once.

        Raises:
            ValueError: A signal is given, and only the server behind the queue is there.
        """
        self._queue = None if os.environ.get(SOCKET_VARIABLE) else queue
        self._signal = signal
        if self._queue is not None and signal is not None:
            raise ValueError(
                f"signal is {signal!r}: only an agent sends it, and {SOCKET_VARIABLE} names none"
            )
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        # A signal handler may interrupt the thread that holds the lock, and use a timer itself.
        self._changing = threading.RLock()
        self._held: dict[str, Guard] = {}

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Start a timer, in place of the scope's present one.

        Args:
            scope_id: Name of the code that runs under the timer.
            expiration_time: Seconds since the epoch by `time.time()`. That clock may be set, so only the distance from
                now counts. Less than zero: release.

        Raises:
            RuntimeError: There is neither an agent nor a queue; see `rallypoint.timer.configure`.
            ValueError: `expiration_time` or the client's signal is invalid.
        """
        after = expiration_time - time.time()
        if after != after:  # noqa: PLR0124 - not a number
            raise ValueError(f"expiration_time is {expiration_time}; expected seconds since the epoch")
        if self._queue is not None:
            self._queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))
            return
        if expiration_time < 0:
            self.release(scope_id)
            return
        guard = expires(after=_within_bounds(after), scope=_shown(scope_id), signal=self._signal)
        self._own()
        with self._changing:
            former = self._held.get(scope_id)
            # Stored first: if a signal handler raises, the scope's next acquire or release finds it.
            self._held[scope_id] = guard
            if former is not None:
                former.__exit__(None, None, None)
            guard.__enter__()

    def release(self, scope_id: str) -> None:
        """End a timer. A timer that this process does not hold is ignored."""
        if self._queue is not None:
            self._queue.put(TimerRequest(os.getpid(), scope_id, _RELEASE))
            return
        self._own()
        with self._changing:
            guard = self._held.pop(scope_id, None)
            if guard is not None:
                guard.__exit__(None, None, None)

    def _own(self) -> None:
        """Start without timers after a fork: they are the parent's, and so may be the lock's holder."""
        if os.getpid() != self._pid:
            self._begin()


def _within_bounds(after: float) -> float:
    return min(max(after, _SHORTEST), _LONGEST)


def _shown(scope_id: str) -> str:
    """Return the name under which a scope is shown to people."""
    if not scope_id.startswith(_DEFAULT_SCOPE):
        # An empty name would count as not given.
        return scope_id or "unnamed"
    frame = sys._getframe(2)
    while frame.f_code.co_filename in _NOT_THE_CALLER:
        if frame.f_back is None:
            return scope_id
        frame = frame.f_back
    return f"{frame.f_code.co_filename}#{frame.f_lineno}"


class RallypointRequestQueue(RequestQueue):  # type: ignore[misc]  # torch has no types here
    """Requests that processes of this host have put into a queue; one process reads them.

    torch's own queue returns one request where `size` was larger and the timeout is 0; this one returns as many as
    `size` promised.
    """

    def __init__(self, queue: Queue) -> None:
        """Read from `queue`, a `multiprocessing.Queue` that holds torch's TimerRequests."""
        self._queue = queue
        self._read: deque[TimerRequest] = deque()
        self._reading = threading.Lock()
        self._lost = 0

    def size(self) -> int:
        """Return the number of requests that `get` returns without waiting."""
        with self._reading:
            # The queue also counts requests that are on their way, or were lost with the process that sent them.
            coming, until = self._queue.qsize(), time.monotonic() + _ARRIVAL
            while coming and self._read_one(until - time.monotonic() if coming > self._lost else 0):
                coming -= 1
            self._lost = coming
            return len(self._read)

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return up to `size` requests, in their order; fewer if no more arrive within `timeout` seconds."""
        until = time.monotonic() + timeout
        with self._reading:
            while len(self._read) < size and self._read_one(until - time.monotonic()):
                pass
            return [self._read.popleft() for _ in range(min(size, len(self._read)))]

    def _read_one(self, timeout: float) -> bool:
        try:
            self._read.append(self._queue.get(timeout=max(timeout, 0)))
        except Empty:
            return False
        return True


class RallypointTimerServer(TimerServer):  # type: ignore[misc]  # torch has no types here
    """Kills processes of this host by SIGKILL if they do not leave a block in time; they send requests by a queue.

    In a worker of a Rallypoint agent it only passes the requests on: the agent's watchdog counts down, reports the hang
    with its stacks, and ends the worker with all its processes. The senders must be that worker's processes.

    A process is killed only if it is the one that sent the request, not a later one with its pid. Corrections of the
    wall clock move no deadline. `start` after `stop` starts it again.
    """

    def __init__(self, queue: Queue, max_interval: float = 1.0, daemon: bool = True) -> None:
        """Make a server that `start` starts.

        Args:
            queue: A `multiprocessing.Queue`, for the clients as well.
            max_interval: Most seconds between two looks at the timers, so the most that an expired one waits; torch's
                default is 60.
            daemon: Let the interpreter end while the server runs.
        """
        super().__init__(RallypointRequestQueue(queue), max_interval, daemon)
        # torch sets the variable as well, so it names an agent's pipe only beside an agent's socket.
        self._agent_pipe = (
            os.environ.get("TORCHELASTIC_TIMER_FILE") if os.environ.get(SOCKET_VARIABLE) else None
        )
        self._timers: dict[tuple[int, str], _RunningTimer] = {}
        self._processes: weakref.WeakValueDictionary[int, _Process] = weakref.WeakValueDictionary()
        self._running = threading.Lock()

    def start(self) -> None:
        """Start the thread that reads requests and reaps."""
        self._stop_signaled = False
        super().start()

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Start, replace and end timers, in the order of the requests; a negative time ends one."""
        for request in timer_requests:
            key = (request.worker_id, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                self._timers[key] = _RunningTimer(
                    request, _clock_difference(), self._process(request.worker_id)
                )
        if self._agent_pipe and timer_requests:
            _pass_on(timer_requests, self._agent_pipe)

    def clear_timers(self, worker_ids: set[int]) -> None:
        """End all timers of these processes."""
        ended = [TimerRequest(*key, _RELEASE) for key in self._timers if key[0] in worker_ids]
        self.register_timers(ended)

    def get_expired_timers(self, deadline: float) -> dict[int, list[TimerRequest]]:
        """Return the timers to reap for, by pid: those that expire at `deadline` or before. Under an agent: none.

        `deadline` is in seconds since the epoch by the present wall clock.
        """
        now = _clock_difference()
        expired: dict[int, list[TimerRequest]] = {}
        for key, timer in list(self._timers.items()):
            if timer.expires_at(now) > deadline:
                continue
            if self._agent_pipe:
                # The agent has it, and does not need it to be released.
                del self._timers[key]
            else:
                expired.setdefault(key[0], []).append(timer.request)
        return expired

    def _watchdog_loop(self) -> None:
        # One thread at a time, also after a second `start`: two would register requests in another order.
        with self._running:
            super()._watchdog_loop()

    def _reap_worker(self, worker_id: int) -> bool:
        process = self._processes.get(worker_id)
        if process is not None and process.has_ended():
            return True
        try:
            os.kill(worker_id, signals.SIGKILL)
        except ProcessLookupError:
            return True
        except OSError as error:
            log.error("could not kill a process with an expired timer", pid=worker_id, reason=str(error))
            return False
        return True

    def _process(self, pid: int) -> _Process:
        process = self._processes.get(pid)
        if process is not None and process.has_ended():
            # The pid belongs to another process now.
            self.clear_timers({pid})
            process = None
        if process is None:
            process = self._processes[pid] = _Process(pid)
        return process


class _Process:
    """A process with timers, which a later one with the same pid is not."""

    def __init__(self, pid: int) -> None:
        self._descriptor = -1
        # It has ended already, or there is no descriptor left.
        with contextlib.suppress(OSError):
            self._descriptor = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Return True if it is known to have ended."""
        if self._descriptor < 0:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class _RunningTimer(NamedTuple):
    request: TimerRequest
    # Between wall clock and monotonic clock, when the request came.
    clock_difference: float
    process: _Process

    def expires_at(self, clock_difference: float) -> float:
        """Return the time of expiry by a wall clock that is now so far from the monotonic one."""
        corrected = clock_difference - self.clock_difference
        return float(self.request.expiration_time) + (corrected if abs(corrected) > _JUMP else 0.0)


def _clock_difference() -> float:
    return time.time() - time.monotonic()


def _pass_on(requests: Iterable[TimerRequest], path: str) -> None:
    """Write requests into the pipe that the agent reads, in the form of torch's FileTimerClient.

    Raises:
        OSError: No agent reads the pipe.
    """
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        # Wait for the agent while the pipe is full: a lost release would cost a process its life.
        os.set_blocking(pipe, True)
        for request in requests:
            line = {
                "pid": request.worker_id,
                "scope_id": encode(request.scope_id).decode(errors="replace"),
                "expiration_time": min(request.expiration_time, time.time() + _LONGEST),
                "signal": int(signals.SIGKILL),
            }
            os.write(pipe, json.dumps(line).encode() + b"\n")
    finally:
        os.close(pipe)
