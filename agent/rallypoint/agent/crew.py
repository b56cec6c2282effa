"""The workers of one round on this host: started together, watched, and judged as one."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rallypoint.agent.config import JobConfig
from rallypoint.agent.console import Console
from rallypoint.agent.core import Assignment
from rallypoint.agent.environment import worker_command, worker_environment
from rallypoint.agent.errors import WorkerFailure, describe_failure, failure_to_start
from rallypoint.agent.logs import LogDirectory, LogError, WorkerLogs, console_copies
from rallypoint.agent.processes import Spawner
from rallypoint.agent.spawn_protocol import SpawnError, WorkerExit, WorkerSpec
from rallypoint.agent.spawner import look_up
from rallypoint.agent.workers import StopReport, WorkerGroup


@dataclass(slots=True)
class Worker:
    """A worker that was started, and how it ended, once it has."""

    local_rank: int
    rank: int
    pid: int
    start_time: float
    exit: WorkerExit | None = None


class Crew:
    """Starts a round's workers; says once how it went: all succeeded, or the first failure."""

    def __init__(
        self,
        config: JobConfig,
        assignment: Assignment,
        restart_count: int,
        *,
        spawner: Spawner,
        console: Console,
        log_directory: LogDirectory,
        sockets: dict[str, str],
        on_failure: Callable[[WorkerFailure], None],
        on_success: Callable[[], None],
    ) -> None:
        """Set up; nothing is started.

        Args:
            config: The job.
            assignment: This node's place in the round.
            restart_count: Of the run.
            spawner: Starts processes.
            console: Shows their output.
            log_directory: Keeps it.
            sockets: Variables of the environment that name the agent's sockets.
            on_failure: Called for the first worker that fails, or can't be started; at most once.
            on_success: Called when all workers have ended with exit code 0.
        """
        self.assignment = assignment
        self.workers: dict[int, Worker] = {}
        self._config = config
        self._restart_count = restart_count
        self._console = console
        self._log_directory = log_directory
        self._sockets = sockets
        self._on_failure: Callable[[WorkerFailure], None] | None = on_failure
        self._on_success = on_success
        self._logs: dict[int, WorkerLogs] = {}
        self._accused: dict[int, str] = {}
        self._spawner = spawner
        self._group: WorkerGroup | None = None
        self._stopped = False

    async def start(self) -> None:
        """Start all workers, unless it was stopped before. A failure to start is reported like any other."""
        if self._stopped:
            return  # whoever stopped it has said that nothing of it is alive
        local_ranks = range(self._config.local_world_size)
        try:
            self._logs = self._log_directory.new_attempt(local_ranks)
            config = self._config
            shown = console_copies(self._logs, config.role, config.redirects, config.tee)
            copies = [self._console.follow(copy) for copy in shown]
            self._group = WorkerGroup(self._spawner, self._exited, copies)
            await self._group.start([self._spec(local_rank) for local_rank in local_ranks])
        except (SpawnError, LogError) as error:
            if not self._stopped:
                local_rank = getattr(error, "local_rank", None) or 0
                failure = failure_to_start(str(error), local_rank=local_rank, **self._identity(local_rank))
                self._fail(failure)
            return
        started = time.time()
        for local_rank, pid in self._group.pids.items():
            self._record(local_rank, pid, started)

    async def stop(self, number: int, timeout: float) -> StopReport:
        """Stop all workers and everything they have started; see `WorkerGroup.stop`."""
        self._stopped = True
        return await self._group.stop(number, timeout) if self._group is not None else StopReport()

    @property
    def names(self) -> dict[str, int]:
        """Local rank by name, of all workers; under one lease, a name is never another worker's."""
        round_ = self.assignment.round
        return {f"{rank}@{round_}": rank for rank in range(self._config.local_world_size)}

    async def reap(self, name: str, accusation: str) -> None:
        """Kill a worker that hangs; its failure will say so."""
        local_rank = self.names[name]
        if self._group is not None and local_rank in self._group.pids:
            self._accused[local_rank] = accusation
            await self._group.kill_worker(local_rank)

    def worker_of(self, pid: int) -> str | None:
        """Name of the worker that a process is, or descends from; None for a stranger."""
        if self._group is None:
            return None
        pids = self._group.pids
        by_pid = {pids[rank]: name for name, rank in self.names.items() if rank in pids}
        seen: set[int] = set()
        while pid > 1 and pid not in seen:
            if pid in by_pid:
                return by_pid[pid]
            seen.add(pid)
            process = look_up(pid)
            pid = process.parent if process is not None else 0
        return None

    def _spec(self, local_rank: int) -> WorkerSpec:
        logs = self._logs[local_rank]
        return WorkerSpec(
            local_rank=local_rank,
            argv=worker_command(self._config, local_rank),
            env=worker_environment(
                self._config,
                self.assignment,
                self._restart_count,
                local_rank,
                error_file=logs.error_file,
                sockets=self._sockets,
            ),
            cwd=self._config.working_directory,
            stdout=logs.stdout,
            stderr=logs.stderr,
        )

    def _record(self, local_rank: int, pid: int, start_time: float) -> Worker:
        rank = self.assignment.base_rank + local_rank
        return self.workers.setdefault(local_rank, Worker(local_rank, rank, pid, start_time))

    def _exited(self, how: WorkerExit) -> None:
        # A worker may be gone before the start of its neighbours has returned.
        self._record(how.local_rank, how.pid, how.time).exit = how
        if how.during_stop or self._stopped:
            return
        if not how.succeeded:
            failure = describe_failure(how, self._logs[how.local_rank], **self._identity(how.local_rank))
            self._fail(failure, self._accused.get(how.local_rank))
        elif len(self.workers) == self._config.local_world_size and all(
            worker.exit is not None and worker.exit.succeeded for worker in self.workers.values()
        ):
            self._on_success()

    def _fail(self, failure: WorkerFailure, accusation: str | None = None) -> None:
        tell, self._on_failure = self._on_failure, None
        if tell is not None:
            tell(replace(failure, message=accusation) if accusation else failure)

    def _identity(self, local_rank: int) -> dict[str, Any]:
        return {
            "rank": self.assignment.base_rank + local_rank,
            "role": self._config.role,
            "host": socket.gethostname(),
        }
