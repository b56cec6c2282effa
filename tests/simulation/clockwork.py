"""Virtual time: one queue of callbacks and timers for a whole cluster, and an event loop for every process in it.

Each process has its own `asyncio` loop over the one queue. So product code runs unchanged, its clock may be skewed,
it can be stopped and continued as by SIGSTOP, and when it is killed nothing of it runs any more: no `finally`, no
callback, as with SIGKILL.
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

# No two timers fire without time passing: a clock that stood still would let code that waits for it spin for ever.
TICK = 1e-6
# How much faster or slower than the world's a process's clock may go; real ones err by far less.
SKEW = 0.03
# Callbacks that a cluster may need in its life. Past it, it is going round in circles.
MOST_STEPS = 100_000


# What tells the futures of a cluster apart.
_NUMBERS = itertools.count()


class Stuck(Exception):
    """The cluster goes round in circles."""


class Handle:
    """A callback that is due, or will be."""

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
        """Take it back."""
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        """Whether it was taken back."""
        return self.callback is None


class _Numbered:
    """Has a place in a set that doesn't depend on its address in memory: the product goes through such sets."""

    number: int

    def __new__(cls, *_: Any, **__: Any) -> Self:
        numbered = super().__new__(cls)
        numbered.number = next(_NUMBERS)
        return numbered

    def __hash__(self) -> int:
        return self.number


class _Future(_Numbered, asyncio.Future[Any]):
    """One of the simulated loop."""


class _Task(_Numbered, asyncio.Task[Any]):
    """One of the simulated loop."""


class Clockwork:
    """Makes time pass: runs what is due, then jumps to the next timer."""

    def __init__(self, ties: random.Random, most_steps: int = MOST_STEPS) -> None:
        """Set up.

        Args:
            ties: Decides between timers that are due at the same time.
            most_steps: Callbacks that the cluster may need.
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
        """Have something of the world outside all processes happen at a time."""
        return self.schedule(when, Handle(None, callback, args, None))

    def after(self, seconds: float, callback: Callable[..., object], *args: Any) -> Handle:
        """Have something of the world outside all processes happen after a time."""
        return self.schedule(self.now + seconds, Handle(None, callback, args, None))

    def schedule(self, when: float, handle: Handle) -> Handle:
        """Have a callback run at a time."""
        self._set += 1
        heapq.heappush(self._timers, (max(when, self.now + TICK), self._ties.random(), self._set, handle))
        return handle

    def soon(self, handle: Handle) -> None:
        """Have a callback run before time passes."""
        self._ready.append(handle)

    def run(self, until: float, done: Callable[[], bool], check: Callable[[], None]) -> bool:
        """Let time pass until something is done, or it is `until`; returns whether it was done.

        Args:
            until: Virtual seconds.
            done: Asked whenever time is about to pass.
            check: Called after every step; what it raises ends the cluster.

        Raises:
            Stuck: It would never end.
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
        """Let go of all that processes were doing, killed or not, by having every task cancelled.

        For what awaits in a `finally`, as generators of handlers do, and complains when it is merely dropped.
        """
        self.steps = 0
        try:
            for process in processes:
                process.alive = True
                # A task whose next step was dropped, since it was killed, would wait for it for ever.
                process.resume()
            # What has arrived may begin something new; who has been cancelled twice, has ended.
            for _ in range(3):
                self._timers.clear()
                for process in processes:
                    events._set_running_loop(process._loop)
                    for task in list(process._tasks):
                        task.cancel()
                self._run_ready(lambda: None)
        except Stuck:
            pass  # who doesn't end, is dropped
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

    It is no subclass of `asyncio.AbstractEventLoop`: of that, tasks, futures and timeouts use what is here, and
    product code that asks for more (a socket, a thread, a signal) must fail in a simulation.
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
        """Start it.

        Args:
            clockwork: What makes it go.
            name: For people.
            on_error: Called with what no code of it has caught.
            rate: Seconds of its monotonic clock in one of the world.
            offset: What its clock shows when the world's shows 0.
        """
        self.name = name
        self.alive = True
        self.paused = False
        self.paused_since = 0.0
        self.suspended = False
        # What its work costs; None: nothing.
        self.cpu: Cpu | None = None
        self.awake_since = clockwork.now
        # What falls due while it is stopped, or has been killed.
        self.parked: list[Handle] = []
        self._clockwork = clockwork
        self._on_error = on_error
        self._rate = rate
        self._offset = offset
        self._reached = offset
        # For how long it was suspended, by its clock.
        self._slept = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = cast("asyncio.AbstractEventLoop", self)

    def run(self, handle: Handle) -> None:
        """Run one of its callbacks."""
        assert handle.context is not None, "callbacks of a process have one"
        assert handle.callback is not None, "what was taken back is not run"
        try:
            handle.context.run(handle.callback, *handle.args)
        except Exception as error:
            self._on_error(f"{self.name}: a callback failed: {error!r}")

    def pause(self, *, suspended: bool = False) -> None:
        """Stop it where it is; its clock goes on, unless it is `suspended`, as with its host (CLOCK_MONOTONIC)."""
        self.paused, self.suspended = True, suspended
        self.paused_since = self._clockwork.now

    def resume(self) -> None:
        """Let it go on, with all that came meanwhile."""
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
        """Whether it has run for so long without being stopped."""
        return not self.paused and self._clockwork.now - self.awake_since >= seconds

    def kill(self) -> None:
        """End it, with nothing of it ever run again."""
        self.alive = False
        self.paused = self.suspended = False

    def dispose(self) -> None:
        """Let go of what it was doing when it was killed."""
        self.alive = False
        self.parked.clear()
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            # What awaits something in a `finally` complains; nobody is there to wait for that.
            with contextlib.suppress(BaseException):
                cast("Coroutine[Any, Any, Any]", coroutine).close()
        self._tasks.clear()
        # What a loop keeps there refers to it: a campaign of seeds would never let go of any.
        flow._waits.pop(self._loop, None)

    def time(self) -> float:
        """Its monotonic clock."""
        # The way to the world's time and back may lose the last bit: a timer that fired is never early.
        self._reached = max(self._reached, self._offset + self._rate * self._clockwork.now)
        return self._reached

    def boot_time(self) -> float:
        """Its clock that counts on while its host is suspended (CLOCK_BOOTTIME)."""
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
        if self._offset + self._rate * self._clockwork.now < when - TICK:  # it was suspended meanwhile
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
        """Something went wrong that nobody caught."""
        if self.alive:
            self._on_error(f"{self.name}: {context.get('message')}: {context.get('exception')!r}")

    def get_debug(self) -> bool:
        """Never: it would look at wall clocks."""
        return False

    def is_running(self) -> bool:
        """As long as it is not killed."""
        return self.alive

    def is_closed(self) -> bool:
        """Once it is killed."""
        return not self.alive
