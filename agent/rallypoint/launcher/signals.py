"""A job's run under the signals of its process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rallypoint.agent.job.job import Job
from rallypoint.agent.job.result import JobResult

_USERS = (signal.SIGUSR1, signal.SIGUSR2)


async def run_until_signalled(job: Job, signals: Sequence[int]) -> JobResult:
    """Run a job to its end; a signal has it leave its run, and a second one at once.

    SIGUSR1 and SIGUSR2 go on to the workers, unless they are among the signals.

    Args:
        job: Not run yet.
        signals: Which ones. None: signals are somebody else's. None of them is handled after the return.
    """

    def leave(number: signal.Signals) -> None:
        job.request_stop(f"got {number.name}", number)

    passed_on = [number for number in _USERS if signals and number not in signals]
    with _handled(signals, leave), _handled(passed_on, job.pass_on):
        return await job.run()


@contextmanager
def signalled(signals: Sequence[int]) -> Iterator[asyncio.Queue[signal.Signals]]:
    """Signals as they come, for as long as the context lasts."""
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    with _handled(signals, received.put_nowait):
        yield received


@contextmanager
def _handled(signals: Sequence[int], take: Callable[[signal.Signals], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    # Under nohup a terminal that closes is to stop nothing. (SIGINT, which a shell ignores for what it starts in the
    # background, is handled nevertheless: whoever sends it to an agent means it.)
    nohup = signal.SIGHUP in signals and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [signal.Signals(number) for number in signals if number != signal.SIGHUP or not nohup]
    for number in numbers:
        loop.add_signal_handler(number, take, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
