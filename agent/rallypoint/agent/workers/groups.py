"""The groups of workers that this host runs, round by round: one after the other, never two at a time."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint.agent.config.job import JobConfig
from rallypoint.agent.core import core
from rallypoint.agent.events.publisher import JobEvents
from rallypoint.agent.failures.failure import WorkerFailure
from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.hangs.reaper import describe_left, survivors_of
from rallypoint.agent.logs.follower import Console
from rallypoint.agent.logs.plan import LogDirectory
from rallypoint.agent.sockets.worker_sockets import WorkerSockets
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import SpawnError
from rallypoint.agent.workers.group import Worker, WorkerGroup
from rallypoint.rpc.logs import get_logger

# Seconds that the spawner gets to kill what is left, where it is known that something can't be killed.
_VAIN_KILLING = 1.0

_log = get_logger("rallypoint.agent")


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What the workers of every round are given.

    Attributes:
        console: Shows their output.
        log_directory: Keeps it.
        sockets: Where they reach the agent.
        environment: Variables that name what is not among the sockets.
        stacks: Folder for the pipes into which they write their stacks.
        history: Records what becomes of them.
    """

    console: Console
    log_directory: LogDirectory
    sockets: WorkerSockets
    environment: dict[str, str]
    stacks: Path
    history: JobEvents


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Whom to tell; all on the event loop.

    Attributes:
        tell: What the core must know.
        on_failure: The first worker of a group that fails.
        on_earlier: A failure that was before that one, or before the group was stopped for another reason, and came
            to light only then.
        on_unfit: Why no other group may run here.
        on_change: Something about a worker can be seen that could not before.
        begin: Runs work in the background; what goes wrong in it ends the job.
    """

    publish: Callable[[core.Event], None]
    on_failure: Callable[[WorkerFailure], None]
    on_earlier: Callable[[WorkerFailure], None]
    on_unhealthy: Callable[[str], None]
    on_change: Callable[[], None]
    begin: Callable[[Coroutine[Any, Any, None]], object]


class WorkerGroups:
    """Starts and stops them.

    Attributes:
        crew: The latest; None if there was none yet.
        spawner: The process below which all workers are; replaced when it has died.
        base_ranks: Global rank of the first worker here, by the number of the attempt in the log directory.
        stop_reason: Why the latest was stopped.
        equipment: What they are given; set before the first is started.
    """

    def __init__(self, config: JobConfig, spawner: Spawner, callbacks: Callbacks) -> None:
        """Set up; `spawner` runs already."""
        self.group: WorkerGroup | None = None
        self.spawner = spawner
        self.base_ranks: dict[int, int] = {}
        self.stop_reason = ""
        self.equipment: GroupSettings
        self._config = config
        self._callbacks = callbacks
        self._stopped: WorkerGroup | None = None

    @property
    def workers(self) -> list[Worker]:
        """The workers that run, or ran last, by local rank."""
        return [worker for _, worker in sorted(self.group.workers.items())] if self.group is not None else []

    def start(self, seat: core.Assignment, restart_count: int, lease: int, incarnation: str) -> None:
        """Start a group.

        Args:
            seat: The node's place in the round.
            restart_count: Of the run.
            lease: The node's, under which the workers act.
            incarnation: Of the run, whose lease it is.
        """
        if self.spawner.dead:
            with suppress(SpawnError):  # the crew fails for want of one, and says so
                self.spawner = self.spawner.renew()
        equipment, callbacks = self.equipment, self._callbacks

        def succeeded() -> None:
            callbacks.begin(self._sweep(crew))

        crew = self.group = WorkerGroup(
            self._config,
            seat,
            restart_count,
            spawner=self.spawner,
            console=equipment.console,
            log_directory=equipment.log_directory,
            sockets={**equipment.sockets.environment, **equipment.environment},
            stacks=equipment.stacks,
            events=equipment.history,
            on_failure=callbacks.on_failure,
            on_success=succeeded,
            on_unfit=callbacks.on_unhealthy,
            on_earlier=callbacks.on_earlier,
            on_change=self._changed,
        )
        first, last = seat.base_rank, seat.base_rank + self._config.local_world_size - 1
        _log.info(
            "starting workers",
            round=seat.round,
            ranks=f"{first}-{last}" if last > first else str(first),
            world_size=seat.world_size,
            restart_count=restart_count,
        )
        callbacks.begin(self._start(crew, lease, incarnation))

    def stop(
        self, detail: str, number: int, timeout: float, after: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Stop the latest group; the core is told when nothing of it is left.

        Args:
            detail: Why, for people.
            number: What to send first.
            timeout: Seconds until SIGKILL.
            after: What to wait for before that; None: nothing.
        """
        assert self.group is not None, "workers that run are a crew's"
        self.stop_reason = detail
        self._stopped = self.group
        self._callbacks.begin(self._stop(self.group, detail, number, timeout, after))

    def kill(self) -> None:
        """Kill workers that are being stopped; who stops them says what became of them."""
        if self.group is not None:
            self._callbacks.begin(_kill(self.group))

    async def end(self) -> None:
        """No worker is left when this returns."""
        if self.group is not None:
            await self.group.stop(signal.SIGKILL, 0.0)

    async def close(self, unfit: bool) -> None:
        """End the spawner; `unfit`: it is known that something below it can't be killed."""
        if unfit:
            await self.spawner.close(_VAIN_KILLING)
        else:
            await self.spawner.close()

    def worker_of(self, pid: int) -> str | None:
        """Name of the worker that a process is, or descends from; None for a stranger."""
        return self.group.worker_of(pid) if self.group is not None else None

    def worker_at(self, local_rank: int) -> tuple[str, int] | None:
        """The name and the process of the worker with this local rank; None if it does not run."""
        return self.group.worker_at(local_rank) if self.group is not None else None

    def rank_of(self, worker: str) -> int | None:
        """The global rank of a worker of this name; None if there is none."""
        return self.group.rank_of(worker) if self.group is not None else None

    async def reap(self, hang: HungWorker) -> bool:
        """See `WorkerGroup.reap`. A worker that is gone needs it no more."""
        if self.group is not None and hang.worker_id in self.group.names:
            await self.group.reap(hang)
        return True

    async def _start(self, crew: WorkerGroup, lease: int, incarnation: str) -> None:
        sockets = self.equipment.sockets
        await sockets.act_under(lease, incarnation)
        await sockets.watchdog.allows_workers()
        await crew.start()
        sockets.introduce()
        self._callbacks.on_change()

    async def _stop(
        self,
        crew: WorkerGroup,
        detail: str,
        number: int,
        timeout: float,
        after: Callable[[], Awaitable[None]] | None,
    ) -> None:
        if after is not None:
            await after()
        _log.info("stopping workers", round=crew.assignment.round, reason=detail)
        report = await crew.stop(number, timeout)
        if report.killed:
            _log.warning(
                "workers had to be killed",
                local_ranks=list(report.killed),
                waited=round(report.seconds, 1),
            )
        for worker in crew.names:
            self.equipment.sockets.clear(worker)
        if left := await survivors_of(report.left):
            self._callbacks.on_unhealthy(await describe_left(left))
        self._callbacks.publish(core.GroupStopped())

    async def _sweep(self, crew: WorkerGroup) -> None:
        """What workers left behind when they ended must not live into the next round."""
        report = await crew.stop(signal.SIGKILL, 0.0)
        left = await survivors_of(report.left)
        unfit = await describe_left(left) if left else None
        if crew is not self._stopped:  # or else the next may run by now, which this would be taken for
            self._callbacks.publish(core.GroupSucceeded())
        if unfit is not None:
            self._callbacks.on_unhealthy(unfit)

    def _changed(self) -> None:
        if self.group is not None and self.group.attempt is not None:
            self.base_ranks[self.group.attempt] = self.group.assignment.base_rank
        self._callbacks.on_change()


async def _kill(crew: WorkerGroup) -> None:
    await crew.stop(signal.SIGKILL, 0.0)
