"""Run a job under the signals of its process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rallypoint.agent.job.job import Job
from rallypoint.agent.job.result import JobResult

_USERS = (signal.SIGUSR1, signal.SIGUSR2)


async def run_until_signalled(job: Job, signals: Sequence[int]) -> JobResult:
    """Run a job to its end; a first signal makes it leave its run, a second one leave at once.

    SIGUSR1 and SIGUSR2 are passed to the workers, unless they are among `signals`.

    Args:
        job: Not started yet.
        signals: The signals to handle, until this returns. Empty: the caller handles signals.
    """

    def leave(number: signal.Signals) -> None:
        job.request_stop(f"got {number.name}", number)

    passed_on = [number for number in _USERS if signals and number not in signals]
    with _handled(signals, leave), _handled(passed_on, job.pass_on):
        return await job.run()


@contextmanager
def signalled(signals: Sequence[int]) -> Iterator[asyncio.Queue[signal.Signals]]:
    """Yield a queue of received signals, as long as the context lasts."""
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    with _handled(signals, received.put_nowait):
        yield received


@contextmanager
def _handled(signals: Sequence[int], take: Callable[[signal.Signals], None]) -> Iterator[None]:
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
