"""The worker groups of this host: one for each round, one after the other, never two at a time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from rallypoint.agent.config.job import JobConfig
from rallypoint.agent.core import core
from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.hangs.reaper import describe_left, survivors_of
from rallypoint.agent.sockets.worker_sockets import WorkerSockets
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import SpawnError
from rallypoint.agent.workers.group import GroupEvent, GroupSettings, Worker, WorkerGroup, WorkersChanged
from rallypoint.rendezvous.client import HeldLease
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.loop import cancel_all

# Seconds for the spawner's last sweep where a process is already known to survive SIGKILL.
_UNKILLABLE_CLOSE_TIMEOUT = 1.0

# Seconds between two reports about workers that are being stopped. By default they are killed after 30 s.
_STOP_REPORT_INTERVAL = 10.0
_MOST_RANKS = 8

_log = get_logger("rallypoint.agent")


class WorkerGroups:
    """Starts and stops the worker groups.

    Attributes:
        group: The latest; None if there was none yet.
        spawner: The process below which all workers run; replaced when it has died.
        stop_reason: Why the latest group was stopped.
        settings: Resources that the groups share; set before the first is started.
        sockets: The agent's sockets for the workers; set likewise.
    """

    def __init__(
        self,
        config: JobConfig,
        spawner: Spawner,
        publish: Callable[[GroupEvent | core.GroupSucceeded | core.GroupStopped], None],
        begin: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """Set up.

        Args:
            spawner: Already running.
            publish: Receives the events of all groups.
            begin: Runs a coroutine in the background; an exception in it ends the job.
        """
        self.group: WorkerGroup | None = None
        self.spawner = spawner
        self.stop_reason = ""
        self.settings: GroupSettings
        self.sockets: WorkerSockets
        self._config = config
        self._publish = publish
        self._begin = begin
        self._stopped: WorkerGroup | None = None

    @property
    def workers(self) -> list[Worker]:
        """The workers that run, or ran last, by local rank."""
        return [worker for _, worker in sorted(self.group.workers.items())] if self.group is not None else []

    def start(self, assignment: core.Assignment, restart_count: int, lease: HeldLease) -> None:
        """Start a group.

        Args:
            assignment: The node's rank assignment in the round.
            lease: The node's lease, under which the workers act.
        """
        if self.spawner.dead:
            with suppress(SpawnError):  # the start of the group then fails, and is reported
                self.spawner = self.spawner.renew()
        group = self.group = WorkerGroup(
            self._config,
            assignment,
            restart_count,
            spawner=self.spawner,
            settings=self.settings,
            publish=self._publish,
        )
        first, last = assignment.base_rank, assignment.base_rank + self._config.local_world_size - 1
        _log.info(
            "starting workers",
            round=assignment.round,
            ranks=f"{first}-{last}" if last > first else str(first),
            world_size=assignment.world_size,
            restart_count=restart_count,
        )
        self._begin(self._start(group, lease))

    def sweep(self) -> None:
        """Kill what the latest group, whose workers have succeeded, left behind; GroupSucceeded follows."""
        assert self.group is not None, "workers that succeeded belong to a group"
        self._begin(self._sweep(self.group))

    def stop(
        self,
        detail: str,
        number: int,
        timeout: float,
        after: Callable[[], Awaitable[None]] | None = None,
        hint: str = "",
    ) -> None:
        """Stop the latest group; the core gets an event when no process of it is left.

        Args:
            detail: The reason, for people.
            number: The signal to send first.
            timeout: Seconds until SIGKILL.
            after: Awaited before the first signal; None: nothing to wait for.
            hint: How a person can shorten the stop; empty if it is not known.
        """
        assert self.group is not None, "running workers belong to a group"
        self.stop_reason = detail
        self._stopped = self.group
        progress = _StopProgress(self.group, detail, timeout, hint)
        self._begin(self._stop(self.group, number, timeout, after, progress))

    def kill(self) -> None:
        """Kill workers that are being stopped; the running stop reports the result."""
        self._begin(self.end())

    async def end(self) -> None:
        """Kill all workers; none is left when this returns."""
        if self.group is not None:
            await self.group.stop(signal.SIGKILL, 0.0)

    async def close(self, unfit: bool) -> None:
        """End the spawner; `unfit`: a process below it is known to survive SIGKILL."""
        if unfit:
            await self.spawner.close(_UNKILLABLE_CLOSE_TIMEOUT)
        else:
            await self.spawner.close()

    def worker_of(self, pid: int) -> str | None:
        """Return the name of the worker that a process is or descends from; None for other processes."""
        return self.group.worker_of(pid) if self.group is not None else None

    def worker_at(self, local_rank: int) -> tuple[str, int] | None:
        """Return name and pid of the worker with this local rank; None if it does not run."""
        return self.group.worker_at(local_rank) if self.group is not None else None

    def rank_of(self, worker: str) -> int | None:
        """Return the global rank of the worker with this name; None if there is none."""
        return self.group.rank_of(worker) if self.group is not None else None

    async def reap(self, hang: HungWorker) -> bool:
        """Call `WorkerGroup.reap` unless the worker is gone."""
        if self.group is not None and hang.worker_id in self.group.names:
            await self.group.reap(hang)
        return True

    async def _start(self, group: WorkerGroup, lease: HeldLease) -> None:
        sockets = self.sockets
        await sockets.act_under(lease, group.assignment.round)
        await sockets.watchdog.allows_workers()
        await group.start()
        sockets.introduce()
        self._publish(WorkersChanged())

    async def _stop(
        self,
        group: WorkerGroup,
        number: int,
        timeout: float,
        after: Callable[[], Awaitable[None]] | None,
        progress: _StopProgress,
    ) -> None:
        if after is not None:
            await after()
        progress.begin()
        reports = asyncio.create_task(progress.repeat())
        try:
            report = await group.stop(number, timeout)
        finally:
            await cancel_all((reports,))
        if report.killed:
            _log.warning(
                "workers had to be killed", local_ranks=list(report.killed), waited=round(report.seconds, 1)
            )
        for worker in group.names:
            self.sockets.clear(worker)
        if left := await survivors_of(report.left):
            self._publish(core.NodeUnhealthy(await describe_left(left)))
        self._publish(core.GroupStopped())

    async def _sweep(self, group: WorkerGroup) -> None:
        """Kill processes that workers left behind when they ended, so that none survives into the next round."""
        report = await group.stop(signal.SIGKILL, 0.0)
        left = await survivors_of(report.left)
        reason = await describe_left(left) if left else None
        # If it was stopped meanwhile, the next group may run by now, and the core would take the event for its success.
        if group is not self._stopped:
            self._publish(core.GroupSucceeded())
        if reason is not None:
            self._publish(core.NodeUnhealthy(reason))


class _StopProgress:
    """Reports about a stop: how long it may take, and which workers are still there."""

    def __init__(self, group: WorkerGroup, detail: str, timeout: float, hint: str) -> None:
        self._group, self._detail, self._timeout, self._hint = group, detail, timeout, hint
        self._clock = asyncio.get_running_loop().time
        self._deadline = 0.0

    def begin(self) -> None:
        """Report for the first time, if a worker is there; they are about to get the first signal."""
        self._deadline = self._clock() + self._timeout
        if self._ranks():
            self._log()

    def _ranks(self) -> list[int]:
        return sorted(worker.rank for worker in self._group.workers.values() if worker.exit is None)

    def _log(self) -> None:
        left, ranks = max(0.0, self._deadline - self._clock()), self._ranks()
        wait = (
            ", ".join([f"up to {left:.0f} s", *([self._hint] if self._hint else [])])
            if left
            else "killing them"
        )
        _log.info(
            "stopping workers",
            round=self._group.assignment.round,
            reason=self._detail,
            ranks=ranks,
            time_left=round(left, 1),
            sentence=f"stopping workers ({self._detail}): {wait}; still there: {_few(ranks)}",
        )

    async def repeat(self) -> None:
        """Report at intervals, until cancelled."""
        while True:
            await asyncio.sleep(_STOP_REPORT_INTERVAL)
            self._log()


def _few(ranks: Sequence[int]) -> str:
    if not ranks:
        return "their child processes"
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"
