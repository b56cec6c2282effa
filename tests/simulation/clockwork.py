"""Virtual time: one queue of callbacks and timers for a whole cluster, and an event loop for every process in it.

Each process has its own `asyncio` loop over the one queue. So product code runs unchanged, its clock may be skewed,
it can be stopped and continued as by SIGSTOP, and after a kill it runs nothing more: no `finally`, no callback, as with
SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from rallypoint.serving import flow

if TYPE_CHECKING:
    from simulation.cpu import Cpu

T = TypeVar("T")

# Time passes between any two timers: if the clock stood still, code that waits for it would spin for ever.
TICK = 1e-6
# The largest difference of the rate of a process's clock from the world's; real clocks differ by far less.
SKEW = 0.03
# Limit of the callbacks of one cluster. One that needs more is in an endless loop.
MOST_STEPS = 100_000


# Numbers that identify the futures of a cluster.
_NUMBERS = itertools.count()


class Stuck(Exception):
    """The cluster is in an endless loop."""


class Handle:
    """A callback that is due now or later."""

    __slots__ = ("args", "callback", "context", "process")

    def __init__(
        self,
        process: Process | None,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self.process = process
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context

    def cancel(self) -> None:
        """Cancel the callback."""
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        """Return True if it was cancelled."""
        return self.callback is None


class _Numbered:
    """An object whose place in a set does not depend on its address in memory: the product iterates over such sets."""

    number: int

    def __new__(cls, *_: Any, **__: Any) -> Self:
        numbered = super().__new__(cls)
        numbered.number = next(_NUMBERS)
        return numbered

    def __hash__(self) -> int:
        return self.number


class _Future(_Numbered, asyncio.Future[Any]):
    """A future of the simulated loop."""


class _Task(_Numbered, asyncio.Task[Any]):
    """A task of the simulated loop."""


class Clockwork:
    """The clock of the cluster: runs the callbacks that are due, then jumps to the next timer."""

    def __init__(self, ties: random.Random, most_steps: int = MOST_STEPS) -> None:
        """Create the clock.

        Args:
            ties: Decides between timers that are due at the same time.
            most_steps: Limit of the callbacks.
        """
        global _NUMBERS  # noqa: PLW0603 (one cluster at a time)
        _NUMBERS = itertools.count()
        self.now = 0.0
        self.steps = 0
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, float, int, Handle]] = []
        self._ties = ties
        self._set = 0
        self._most_steps = most_steps

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> Handle:
        """Schedule a callback that belongs to no process, at a time."""
        return self.schedule(when, Handle(None, callback, args, None))

    def after(self, seconds: float, callback: Callable[..., object], *args: Any) -> Handle:
        """Schedule a callback that belongs to no process, after a time."""
        return self.schedule(self.now + seconds, Handle(None, callback, args, None))

    def schedule(self, when: float, handle: Handle) -> Handle:
        """Schedule a callback at a time."""
        self._set += 1
        heapq.heappush(self._timers, (max(when, self.now + TICK), self._ties.random(), self._set, handle))
        return handle

    def soon(self, handle: Handle) -> None:
        """Schedule a callback to run before time passes."""
        self._ready.append(handle)

    def run(self, until: float, done: Callable[[], bool], check: Callable[[], None]) -> bool:
        """Let time pass until `done` returns True or it is `until`; return True if it was done.

        Args:
            until: Virtual seconds.
            done: Called whenever time is about to pass.
            check: Called after every step; an exception from it ends the cluster.

        Raises:
            Stuck: It needs too many steps, so it would never end.
        """
        try:
            while True:
                self._run_ready(check)
                if done():
                    return True
                if not self._timers or self._timers[0][0] > until:
                    self.now = max(self.now, until)
                    return False
                self.now, _, _, handle = heapq.heappop(self._timers)
                if handle.callback is not None:
                    self._ready.append(handle)
        finally:
            events._set_running_loop(None)

    def unwind(self, processes: Sequence[Process]) -> None:
        """Cancel every task of the processes, killed or not.

        Generators of handlers, for example, await in a `finally`, and warn if they are only dropped.
        """
        self.steps = 0
        try:
            for process in processes:
                process.alive = True
                # If the process was killed, the next step of a task may be lost, and the task would wait for ever.
                process.resume()
            # A delivered message may start a new task; a task that was cancelled twice has ended.
            for _ in range(3):
                self._timers.clear()
                for process in processes:
                    events._set_running_loop(process._loop)
                    for task in list(process._tasks):
                        task.cancel()
                self._run_ready(lambda: None)
        except Stuck:
            pass  # a task that does not end is dropped
        finally:
            events._set_running_loop(None)
            for process in processes:
                process.alive = False
            for process in processes:
                process.dispose()

    def _run_ready(self, check: Callable[[], None]) -> None:
        ready, current = self._ready, None
        while ready:
            handle = ready.popleft()
            process, callback = handle.process, handle.callback
            if callback is None:
                continue
            if process is None:
                callback(*handle.args)
            elif process.paused:
                process.parked.append(handle)
                continue
            elif process.alive:
                if process is not current:
                    events._set_running_loop(process._loop)
                    current = process
                process.run(handle)
            else:
                process.parked.append(handle)
                continue
            self.steps += 1
            check()
            if self.steps > self._most_steps:
                raise Stuck(f"whoever waits, waits: {self.steps} steps by {self.now:g} s")


class Process:
    """One process: an event loop with a clock of its own, which can be stopped, continued and killed.

    It is no subclass of `asyncio.AbstractEventLoop`. It has the methods that tasks, futures and timeouts use; product
    code that needs more (a socket, a thread, a signal) must fail in a simulation.
    """

    def __init__(
        self,
        clockwork: Clockwork,
        name: str,
        on_error: Callable[[str], None],
        *,
        rate: float = 1.0,
        offset: float = 0.0,
    ) -> None:
        """Start the process.

        Args:
            clockwork: Runs its callbacks.
            name: Shown in messages and traces.
            on_error: Called with a description of an exception that its code did not catch.
            rate: Seconds of its monotonic clock in one second of the world's clock.
            offset: The time of its clock when the world's clock shows 0, in seconds.
        """
        self.name = name
        self.alive = True
        self.paused = False
        self.paused_since = 0.0
        self.suspended = False
        # The cost of its work; None: it costs nothing.
        self.cpu: Cpu | None = None
        self.awake_since = clockwork.now
        # Callbacks that became due while it was stopped, or after it was killed.
        self.parked: list[Handle] = []
        self._clockwork = clockwork
        self._on_error = on_error
        self._rate = rate
        self._offset = offset
        self._reached = offset
        # Total seconds for which it was suspended, by its clock.
        self._slept = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = cast("asyncio.AbstractEventLoop", self)

    def run(self, handle: Handle) -> None:
        """Run a callback of the process."""
        assert handle.context is not None, "callbacks of a process have one"
        assert handle.callback is not None, "what was taken back is not run"
        try:
            handle.context.run(handle.callback, *handle.args)
        except Exception as error:
            self._on_error(f"{self.name}: a callback failed: {error!r}")

    def pause(self, *, suspended: bool = False) -> None:
        """Stop it; its clock goes on, unless it is `suspended` with its host (CLOCK_MONOTONIC stands still)."""
        self.paused, self.suspended = True, suspended
        self.paused_since = self._clockwork.now

    def resume(self) -> None:
        """Continue it, with all callbacks that became due in the meantime."""
        if self.suspended:
            slept = self._rate * (self._clockwork.now - self.paused_since)
            self._offset -= slept
            self._slept += slept
        self.paused = self.suspended = False
        self.awake_since = self._clockwork.now
        for handle in self.parked:
            self._clockwork.soon(handle)
        self.parked.clear()

    def awake_for(self, seconds: float) -> bool:
        """Return True if it has run for `seconds` without a stop."""
        return not self.paused and self._clockwork.now - self.awake_since >= seconds

    def kill(self) -> None:
        """End it; none of its code runs again."""
        self.alive = False
        self.paused = self.suspended = False

    def dispose(self) -> None:
        """Drop the tasks and callbacks that were left when it was killed."""
        self.alive = False
        self.parked.clear()
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            # A coroutine that awaits in a `finally` raises an error; it can't be awaited any more.
            with contextlib.suppress(BaseException):
                cast("Coroutine[Any, Any, Any]", coroutine).close()
        self._tasks.clear()
        # The entry there refers to its loop: a campaign of seeds would keep all loops in memory.
        flow._waits.pop(self._loop, None)

    def time(self) -> float:
        """Its monotonic clock, in seconds."""
        # Conversion to the world's time and back may lose the last bit; a timer must not fire early.
        self._reached = max(self._reached, self._offset + self._rate * self._clockwork.now)
        return self._reached

    def boot_time(self) -> float:
        """Its clock that goes on while its host is suspended (CLOCK_BOOTTIME), in seconds."""
        return self.time() + self._slept

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle(self, callback, args, context or contextvars.copy_context())
        if self.alive:
            self._clockwork.soon(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        handle = Handle(self, self._fire, (), context or contextvars.copy_context())
        handle.args = handle, when, callback, args
        if self.alive:
            self._clockwork.schedule((when - self._offset) / self._rate, handle)
        return handle

    def _fire(
        self, handle: Handle, when: float, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        if self._offset + self._rate * self._clockwork.now < when - TICK:  # it was suspended in the meantime
            self._clockwork.schedule((when - self._offset) / self._rate, handle)
            return
        self._reached = max(self._reached, when)
        callback(*args)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self._loop)

    def create_task(
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[T]:
        task = _Task(coro, loop=self._loop, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an exception that no code caught."""
        if self.alive:
            self._on_error(f"{self.name}: {context.get('message')}: {context.get('exception')!r}")

    def get_debug(self) -> bool:
        """Return False: the debug mode reads wall clocks."""
        return False

    def is_running(self) -> bool:
        """Return True until it is killed."""
        return self.alive

    def is_closed(self) -> bool:
        """Return True once it is killed."""
        return not self.alive
