"""The workers of one round on this host: started together, watched, and judged as one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint.agent.config import JobConfig
from rallypoint.agent.console import Console
from rallypoint.agent.core import Assignment
from rallypoint.agent.environment import worker_command, worker_environment
from rallypoint.agent.errors import WorkerFailure, describe_failure, failure_to_end, failure_to_start
from rallypoint.agent.hang import Hang
from rallypoint.agent.logs import LogDirectory, LogError, WorkerLogs, console_copies
from rallypoint.agent.processes import Spawner
from rallypoint.agent.python_stacks import StackPipe
from rallypoint.agent.reaping import Case, Reaping, Victim, describe_left, who_outlives
from rallypoint.agent.spawn_protocol import SpawnError, WorkerExit, WorkerSpec
from rallypoint.agent.spawner import look_up
from rallypoint.agent.workers import StopReport, WorkerGroup
from rallypoint.serving.logs import get_logger
from rallypoint.timer.stacks import STACKS_VARIABLE

_log = get_logger("rallypoint.agent")


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
        stacks: Path,
        on_failure: Callable[[WorkerFailure], None],
        on_success: Callable[[], None],
        on_unfit: Callable[[str], None],
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
            stacks: Folder for the pipes into which the workers write their stacks.
            on_failure: Called for the first worker that fails, or can't be started; at most once.
            on_success: Called when all workers have ended with exit code 0.
            on_unfit: Called when a worker that hangs, or a descendant of it, outlives SIGKILL, with a sentence that
                says so. What outlives `stop` is in its report.
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
        self._on_unfit = on_unfit
        self._stacks = stacks
        self._pipes: dict[int, StackPipe] = {}
        self._logs: dict[int, WorkerLogs] = {}
        self._accused: dict[int, Case] = {}
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
            self._make_pipes()
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
        report = await self._group.stop(number, timeout) if self._group is not None else StopReport()
        while self._pipes:
            self._pipes.popitem()[1].close()
        return report

    @property
    def names(self) -> dict[str, int]:
        """Local rank by name, of all workers; under one lease, a name is never another worker's."""
        round_ = self.assignment.round
        return {f"{rank}@{round_}": rank for rank in range(self._config.local_world_size)}

    def rank_of(self, name: str) -> int | None:
        """The global rank of a worker of this name; None if there is none."""
        local_rank = self.names.get(name)
        return self.assignment.base_rank + local_rank if local_rank is not None else None

    async def reap(self, hang: Hang) -> None:
        """Find out what a worker that hangs is doing, and kill it unless it is to live; its failure will say so."""
        local_rank = self.names[hang.worker_id]
        group = self._group
        pid = group.pids.get(local_rank) if group is not None else None
        if group is None or pid is None:
            return
        rank, logs = self.assignment.base_rank + local_rank, self._logs[local_rank]
        pipe = self._pipes.get(local_rank)
        victim = Victim(pid, rank, logs.stderr, logs.hang_file, pipe, self._is_ours)
        reaping = Reaping(hang, victim, self._config.evidence_timeout)
        await reaping.examine()
        worker, case = self.workers.get(local_rank), reaping.case
        if self._stopped:
            # As a rule all wait for the one that hangs. Which of them that is, only all the evidence shows.
            _log.error("a worker hangs, and is being stopped", rank=rank, pid=pid, **case.figures)
            return
        if worker is not None and worker.exit is not None:
            return  # it has ended by itself meanwhile
        if hang.signal is None:
            _log.error("a worker hangs, and lives on as its timer says", rank=rank, pid=pid, **case.figures)
            return
        _log.error("a worker hangs and is killed", rank=rank, pid=pid, **case.figures)
        self._accused[local_rank] = case
        killed = await reaping.end(lambda: group.kill_worker(local_rank))
        left = await who_outlives(killed.left)
        if left and not self._stopped:
            await self._give_up(local_rank, pid, left)

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

    async def _give_up(self, local_rank: int, pid: int, left: tuple[int, ...]) -> None:
        """Not even SIGKILL ended it: it has failed all the same, and nothing may run here any more."""
        why = await describe_left(left)
        case = self._accused[local_rank]
        case.message = f"{case.message}; {why}"
        identity = self._identity(local_rank)
        worker = self.workers.get(local_rank)
        if worker is None or worker.exit is None:
            self._fail(failure_to_end(case.message, pid=pid, local_rank=local_rank, **identity), case)
        self._on_unfit(why)

    def _is_ours(self, pid: int) -> bool:
        """Whether a process is below the spawner now: its number may be another's since we were told of it."""
        spawner, seen = self._spawner.pid, set[int]()
        while pid > 1 and pid not in seen:
            seen.add(pid)
            process = look_up(pid)
            if process is None or process.parent == spawner:
                return process is not None
            pid = process.parent
        return False

    def _make_pipes(self) -> None:
        for local_rank in range(self._config.local_world_size):
            path = self._stacks / f"{self.assignment.round}.{local_rank}.{os.urandom(4).hex()}"
            try:
                self._pipes[local_rank] = StackPipe.make(path)
            except OSError as error:
                _log.warning(
                    "workers that hang can't write their stacks", file=str(path), reason=error.strerror
                )
                return

    def _spec(self, local_rank: int) -> WorkerSpec:
        logs, sockets = self._logs[local_rank], self._sockets
        if local_rank in self._pipes:
            sockets = {**sockets, STACKS_VARIABLE: str(self._pipes[local_rank].path)}
        return WorkerSpec(
            local_rank=local_rank,
            argv=worker_command(self._config, local_rank),
            env=worker_environment(
                self._config,
                self.assignment,
                self._restart_count,
                local_rank,
                error_file=logs.error_file,
                sockets=sockets,
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
        case = self._accused.get(how.local_rank)
        if not how.succeeded or (case is not None and case.condemned):
            failure = describe_failure(how, self._logs[how.local_rank], **self._identity(how.local_rank))
            self._fail(failure, case)
        elif len(self.workers) == self._config.local_world_size and all(
            worker.exit is not None and worker.exit.succeeded for worker in self.workers.values()
        ):
            self._on_success()

    def _fail(self, failure: WorkerFailure, case: Case | None = None) -> None:
        tell, self._on_failure = self._on_failure, None
        if tell is not None:
            tell(case.charge(failure) if case is not None else failure)

    def _identity(self, local_rank: int) -> dict[str, Any]:
        return {
            "rank": self.assignment.base_rank + local_rank,
            "role": self._config.role,
            "host": socket.gethostname(),
        }
