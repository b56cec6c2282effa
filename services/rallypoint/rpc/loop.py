"""The event loop of every process that uses gRPC, signals and notifications on it, and a clock that advances while the
machine is suspended."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program's main coroutine under uvloop and close the loop after it. One per process.

    Ctrl-C cancels `main`; when its clean-up is done, the process ends with exit code 130 and without
    a traceback. A `main` that handles SIGINT itself, such as `Server.serve_until_signal`, continues to do so.

    Returns:
        The result of `main`.

    Raises:
        SystemExit: with code 130, after Ctrl-C.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(main)
        except KeyboardInterrupt:
            # 128 + SIGINT, as a shell reports for a program that Ctrl-C ended.
            raise SystemExit(130) from None


def boot_time() -> float:
    """Return the seconds of a monotonic clock that also advances while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and return when they have ended. Their results and errors are dropped."""
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def handling_signals(signals: Sequence[int], take: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `take` with each received signal, as long as the context lasts."""
    loop = asyncio.get_running_loop()
    # Under nohup, a closed terminal must not stop the job. (SIGINT, which a shell ignores for background programs, is
    # handled nevertheless: it is sent to an agent on purpose.)
    nohup = signal.SIGHUP in signals and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [signal.Signals(number) for number in signals if number != signal.SIGHUP or not nohup]
    for number in numbers:
        loop.add_signal_handler(number, take, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def signalled(signals: Sequence[int]) -> Iterator[asyncio.Queue[signal.Signals]]:
    """Yield a queue of received signals, as long as the context lasts."""
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    with handling_signals(signals, received.put_nowait):
        yield received


class Notifier:
    """Wakes tasks when something has changed. A busy one is woken once for all changes in the meantime: no queue grows.

    Attributes:
        count: Number of notifications.
    """

    def __init__(self) -> None:
        """Create it without watchers."""
        self._watchers: set[asyncio.Event] = set()
        self.count = 0

    def notify(self) -> None:
        """Wake all watchers."""
        self.count += 1
        for watcher in self._watchers:
            watcher.set()

    @contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        """Yield an event that each change sets; the watcher clears it before it reads the state."""
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    async def until(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        """Return True as soon as a condition holds; False after `timeout` seconds without."""
        try:
            async with asyncio.timeout(timeout):
                with self.watch() as changed:
                    while not holds():
                        await changed.wait()
                        changed.clear()
        except TimeoutError:
            return holds()
        return True

    async def since(self, seen: int, timeout: float | None) -> None:
        """Return when there was a notification after the `seen`-th, or after `timeout` seconds."""
        await self.until(lambda: self.count > seen, timeout)
