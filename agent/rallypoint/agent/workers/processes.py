"""The workers of one round on this host: started together, watched, stopped together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal as signals
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from rallypoint.agent.config.settings import SHUTDOWN_TIMEOUT
from rallypoint.agent.spawner.client import START_TIMEOUT, Spawner, WorkerProcess
from rallypoint.agent.spawner.protocol import KillResult, SpawnError, WorkerExit, WorkerSpec

DRAIN_TIMEOUT = 1.0
"""Seconds that a stop waits until the console has taken the workers' last output. A slower terminal must not delay
the restart of all hosts: the copying continues in the background, and the files have everything in any case."""


class OutputCopy(Protocol):
    """Copies a worker's output for as long as the group runs (see rallypoint.agent.logs.follower)."""

    def start(self) -> None:
        """Begin; called before any worker is started."""

    async def finish(self, timeout: float) -> bool:
        """Copy the rest, after the last writer has ended; false if that takes over `timeout` seconds."""


@dataclass(frozen=True, slots=True)
class StopReport:
    """The result of a stop.

    Attributes:
        killed: local ranks of the workers that needed SIGKILL.
        left: pids that survived SIGKILL (uninterruptible sleep): this node should not run another round.
        seconds: from the first request to stop until all were gone.
    """

    killed: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    seconds: float = 0.0


class WorkerProcesses:
    """The workers of one round on this host. Started once: a new round makes a new group.

    A spawner serves one group at a time, because stopping a group kills everything below the spawner.
    """

    def __init__(
        self, spawner: Spawner, on_exit: Callable[[WorkerExit], None], copies: Sequence[OutputCopy] = ()
    ) -> None:
        """Make a group; nothing is started.

        Args:
            on_exit: called on the loop once for each worker that was started, as soon as it has ended.
            copies: started before the workers, finished after the last process is gone.
        """
        self._spawner = spawner
        self._on_exit = on_exit
        self._copies = copies
        self._workers: dict[int, WorkerProcess] = {}
        self._sent: set[int] = set()
        # Local ranks of workers that got SIGKILL already: a stop does not wait for them.
        self._killed: set[int] = set()
        self._stop_requested_at = 0.0
        self._deadline = 0.0
        self._start_timeout: asyncio.Timeout | None = None
        self._stopping: asyncio.Task[StopReport] | None = None

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the running workers, by local rank."""
        return {
            rank: worker.pid
            for rank, worker in self._workers.items()
            if worker.pid is not None and worker.alive
        }

    async def start(self, specs: Sequence[WorkerSpec], timeout: float = START_TIMEOUT) -> None:
        """Start all workers in one request; return when each is past exec.

        If one can't be started, the others are killed before this raises. After a cancellation, call `stop`.

        Args:
            specs: one for each worker, local ranks distinct.
            timeout: seconds until each must be past exec.

        Raises:
            SpawnError: a start failed, the spawner is dead or has another group, or this group was started or stopped.
        """
        if self._workers or self._stopping is not None:
            raise SpawnError(
                "a worker group can be started only once; this one was started or stopped before"
            )
        self._spawner.occupy(self)
        for copy in self._copies:
            copy.start()
        try:
            workers = self._spawner.submit(specs, self._exited)
            self._workers = {worker.spec.local_rank: worker for worker in workers}
            await self._spawner.wait_started(workers, timeout)
        except SpawnError:
            await self.stop(signals.SIGKILL, 0.0)
            raise

    async def stop(self, signal: int = signals.SIGTERM, timeout: float = SHUTDOWN_TIMEOUT) -> StopReport:
        """Stop all workers and their descendants; return when no process is left.

        Every living worker's process group gets the signal (and SIGCONT, so that a suspended one can handle it).
        Once all are gone, or after the timeout, the rest of the workers' trees is killed. This waits for all members
        of a process group: the worker may be only a shell around the trainer, which is writing its checkpoint.

        May be called at any time, repeatedly and concurrently: all callers get the same report. A later call can
        only shorten the stop (the earliest deadline counts); its signal is sent if it was not sent before.
        Cancelling a caller does not cancel the stop.

        Args:
            timeout: seconds until SIGKILL; 0: at once.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        if self._stopping is None:
            self._stop_requested_at = time.monotonic()
            self._deadline = deadline
            self._stopping = asyncio.create_task(self._stop())
        elif deadline < self._deadline:
            self._deadline = deadline
            if self._start_timeout is not None:
                self._start_timeout.reschedule(deadline)
        if signal not in self._sent:
            self._sent.add(signal)
            self.send_signal(signal, group=True)
            self.send_signal(signals.SIGCONT, group=True)
        return await asyncio.shield(self._stopping)

    def send_signal(self, signal: int, *, group: bool = False, only: Collection[int] | None = None) -> None:
        """Send a signal to every living worker.

        Args:
            group: also to the rest of their process groups, such as data loaders, which often do not expect it.
            only: local ranks of the receivers; None: all.
        """
        chosen = [worker for rank, worker in self._workers.items() if only is None or rank in only]
        self._spawner.signal(chosen, signal, group=group)

    async def kill_worker(self, local_rank: int) -> KillResult:
        """Kill one worker and all its descendants; the other workers continue.

        Returns when its tree is dead, or after `SWEEP_TIMEOUT`. `on_exit` is called as for any other exit.

        Raises:
            KeyError: there is no worker with that local rank.
        """
        worker = self._workers[local_rank]
        self._killed.add(local_rank)
        return await self._spawner.kill(worker)

    def _exited(self, exited: WorkerExit) -> None:
        self._on_exit(dataclasses.replace(exited, during_stop=self._stopping is not None))

    async def _stop(self) -> StopReport:
        if not self._workers:
            await self._finish_copies()
            self._spawner.vacate(self)
            return StopReport()
        # Wait only for those that get the signal, not for processes that a dead worker left behind.
        waiting = [
            worker.cleared
            for rank, worker in self._workers.items()
            if worker.alive and rank not in self._killed
        ]
        if waiting:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._deadline) as self._start_timeout:
                    await asyncio.wait(waiting)
            self._start_timeout = None
        killed = tuple(rank for rank, worker in self._workers.items() if worker.alive)
        swept = await self._spawner.sweep()
        await self._finish_copies()
        self._spawner.vacate(self)
        return StopReport(killed=killed, left=swept.left, seconds=time.monotonic() - self._stop_requested_at)

    async def _finish_copies(self) -> None:
        await asyncio.gather(*(copy.finish(DRAIN_TIMEOUT) for copy in self._copies))
