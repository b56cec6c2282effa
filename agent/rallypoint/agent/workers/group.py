"""The workers of one round on this host: started together, watched, with one result."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from rallypoint.agent.addresses import is_taken_by_another
from rallypoint.agent.config.job import JobConfig
from rallypoint.agent.core.core import Assignment, NodeUnhealthy
from rallypoint.agent.events.publisher import JobEvents
from rallypoint.agent.failures.analysis import EarlierFailure, FirstFailure, LocalFailures, PostMortem
from rallypoint.agent.failures.failure import (
    WorkerFailure,
    failure_of_port,
    failure_to_end,
    failure_to_start,
    names_taken_address,
)
from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.hangs.python_stacks import StackPipe
from rallypoint.agent.hangs.reaper import HangReport, HungProcess, Reaping, describe_left, survivors_of
from rallypoint.agent.logs.follower import Console
from rallypoint.agent.logs.output import WorkerOutput
from rallypoint.agent.logs.plan import LogDirectory, WorkerLogs, remove_attempts
from rallypoint.agent.logs.streams import LogError, Streams
from rallypoint.agent.logs.terminal import Terminal
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import SpawnError, WorkerExit, WorkerSpec
from rallypoint.agent.spawner.spawner import read_process
from rallypoint.agent.workers.affinity import Cpus, NumaError, bind, read_topology
from rallypoint.agent.workers.environment import worker_command, worker_environment
from rallypoint.agent.workers.processes import StopReport, WorkerProcesses
from rallypoint.agent.workers.signals import would_end
from rallypoint.agent.workers.usage import worker_of
from rallypoint.rpc.endpoint import host_exhausted
from rallypoint.rpc.logs import get_logger
from rallypoint.timer.worker.process import STACKS_VARIABLE

# Seconds that the report of a failure waits for a worker's last output to reach its file, where logs are rotated.
_LAST_OUTPUT_TIMEOUT = 1.0

_log = get_logger("rallypoint.agent")


@dataclass(slots=True)
class Worker:
    """A worker that was started, and its exit, once it has ended."""

    local_rank: int
    rank: int
    pid: int
    start_time: float
    exit: WorkerExit | None = None


@dataclass(frozen=True, slots=True)
class AttemptBegun:
    """The log folder of a group exists; `number`: of the attempt, `base_rank`: global rank of the first worker here."""

    number: int
    base_rank: int


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """All workers of a group were started, or one has ended: `WorkerGroup.workers` shows it already."""


@dataclass(frozen=True, slots=True)
class WorkersStarted:
    """All workers of a round were started; `parts`: seconds of each part of the recovery, by name."""

    round: int
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class GroupBroken:
    """An unexpected error while a worker's exit was handled: the result of the group may never come."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class WorkersSucceeded:
    """All workers of a group have ended with exit code 0; processes that they left behind may still run."""


GroupEvent: TypeAlias = (
    AttemptBegun
    | WorkersChanged
    | WorkersStarted
    | FirstFailure
    | EarlierFailure
    | WorkersSucceeded
    | GroupBroken
    | NodeUnhealthy
)


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Resources that the workers of every round share.

    Attributes:
        console: Shows their output.
        log_directory: Holds their log files.
        environment: Environment variables beside the job's and torchrun's.
        stacks: Folder for the pipes into which they write their stacks.
        history: Records their starts and ends.
        terminal: Of one of them; None: none has one.
    """

    console: Console
    log_directory: LogDirectory
    environment: Mapping[str, str]
    stacks: Path
    history: JobEvents
    terminal: Terminal | None = None


class WorkerGroup:
    """Starts a round's workers and publishes one result: the success of all, or the first failure."""

    def __init__(
        self,
        config: JobConfig,
        assignment: Assignment,
        restart_count: int,
        *,
        spawner: Spawner,
        settings: GroupSettings,
        publish: Callable[[GroupEvent], None],
    ) -> None:
        """Set up; nothing is started.

        Args:
            assignment: This node's rank assignment in the round.
            publish: Receives the events. NodeUnhealthy: a worker that hangs, or a descendant of it, survives SIGKILL;
                processes that survive `stop` are in its report.
        """
        self.assignment = assignment
        self.workers: dict[int, Worker] = {}
        # The number of its attempt in the log directory, once the folder exists.
        self.attempt: int | None = None
        self._config = config
        self._restart_count = restart_count
        self._settings = settings
        self._post_mortem = PostMortem(
            LocalFailures(publish),
            self._identity,
            self._explain,
            cwd=config.working_directory,
            rlimits=config.rlimits,
            # Python programs and functions choose their exit codes: `sys.exit(138)` is not a signal.
            own_codes=config.call or Path(config.command[0]).name.startswith(("python", "pypy")),
        )
        self._publish = publish
        self._pipes: dict[int, StackPipe] = {}
        self._logs: Mapping[int, WorkerLogs] = {}
        self._output: WorkerOutput
        self._background: set[asyncio.Task[None]] = set()
        self._hang_reports: dict[int, HangReport] = {}
        # A diagnosis requests the worker's stacks, and the worker can serve only one request at a time.
        self._diagnoses: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._spawner = spawner
        self._cpus: list[Cpus] | None = None
        self._group: WorkerProcesses | None = None
        self._stopped = False
        self._started_at = 0.0  # monotonic seconds
        # Users' signals that arrived before all workers had started; None: all have started.
        self._early_signals: list[int] | None = []

    async def start(self) -> None:
        """Start all workers, unless the group was stopped before. A failed start is reported like any failure."""
        if self._stopped:
            return  # the stop has already reported that no worker is alive
        local_ranks = range(self._config.local_world_size)
        try:
            if self._config.numa_binding is not None:
                # In a thread: on a large host the topology is thousands of small files.
                self._cpus = await asyncio.to_thread(_processors, self._config)
                if self._stopped:
                    return
            terminal = self._settings.terminal
            attempt = self._settings.log_directory.new_attempt(
                local_ranks, self.assignment.base_rank, terminal.one_file if terminal is not None else None
            )
            self._logs, self.attempt = attempt.workers, attempt.number
            self._publish(AttemptBegun(attempt.number, self.assignment.base_rank))
            self._make_pipes()
            self._post_mortem.begin(self._logs)
            self._output = WorkerOutput(
                self._config.output, attempt, self._settings.console, self._settings.stacks, terminal
            )
            self._group = WorkerProcesses(self._spawner, self._exited, [self._output])
            self._output.open()
            self._started_at = time.monotonic()
            await self._group.start([self._spec(local_rank) for local_rank in local_ranks])
        except (SpawnError, LogError, NumaError) as error:
            if self._stopped:
                return  # the stop has already reported that no worker is alive
            if host_exhausted(error):  # other hosts may run this round, and this one none
                self._publish(NodeUnhealthy(str(error)))
            else:
                local_rank = getattr(error, "local_rank", None) or 0
                failure = failure_to_start(str(error), local_rank=local_rank, **self._identity(local_rank))
                self._fail(failure)
            return
        if superfluous := self._settings.log_directory.superfluous():
            self._begin(asyncio.to_thread(remove_attempts, superfluous))
        started = time.time()
        for local_rank, pid in self._group.pids.items():
            self._record(local_rank, pid, started)
        early, self._early_signals = self._early_signals or [], None
        for number in early:
            self.pass_on(number)
        if not self._stopped:
            workers = {each.local_rank: (each.rank, each.pid) for each in self.workers.values()}
            if (parts := self._settings.history.workers_started(workers)) is not None:
                self._publish(WorkersStarted(self.assignment.round, parts))

    async def stop(self, number: int, timeout: float) -> StopReport:
        """Stop all workers and everything they have started; see `WorkerProcesses.stop`."""
        self._stopped = True
        self._post_mortem.stopping(self._unfinished())
        if self._group is not None:
            self._output.stopping()
        report = await self._group.stop(number, timeout) if self._group is not None else StopReport()
        await asyncio.gather(*self._background)
        self._post_mortem.stopping(self._unfinished())
        self._post_mortem.close()
        while self._pipes:
            self._pipes.popitem()[1].close()
        return report

    @property
    def failures(self) -> list[WorkerFailure]:
        """The failures of workers, the first first; without workers that were stopped before they failed."""
        return self._post_mortem.failures

    def collect_failures(self) -> None:
        """Report workers that have raised but not exited yet as failed; called when another host reports a failure."""
        if not self._stopped:
            self._post_mortem.examine(self._unfinished())

    def pass_on(self, number: int) -> None:
        """Send a signal to the workers that it would not kill, once all have started; not to their children."""
        if self._early_signals is not None:
            if number not in self._early_signals:
                self._early_signals.append(number)
            return
        assert self._group is not None, "workers that have started belong to a group"
        pids = self._group.pids
        if unprepared := [local_rank for local_rank, pid in pids.items() if would_end(pid, number)]:
            _log.warning(
                "a signal is not passed on to workers that it would kill, since they don't handle it",
                signal=signal.Signals(number).name,
                local_ranks=unprepared,
            )
        self._group.send_signal(number, only=pids.keys() - unprepared)

    @property
    def names(self) -> dict[str, int]:
        """Local rank of each worker by its name; under one lease, no other worker gets the same name."""
        return {self.name_of(local_rank): local_rank for local_rank in range(self._config.local_world_size)}

    def name_of(self, local_rank: int) -> str:
        """Return the name of the worker with this local rank."""
        return f"{local_rank}@{self.assignment.round}"

    def rank_of(self, name: str) -> int | None:
        """Return the global rank of the worker with this name; None if there is none."""
        local_rank = self.names.get(name)
        return self.assignment.base_rank + local_rank if local_rank is not None else None

    async def diagnose(self, local_rank: int, timeout: float) -> str:
        """Return a description, for people, of a worker's present activity; empty if it is gone.

        A suspended worker stays suspended.

        Args:
            timeout: Seconds that the diagnosis may take.
        """
        process = self._hung_process(local_rank)
        if process is None:
            return ""
        hang = HungWorker(
            self.name_of(local_rank), "", 0.0, 0.0, signal=None, requested="an operator requested its stacks"
        )
        async with self._diagnoses[local_rank]:
            diagnostics = await Reaping(hang, process, timeout).diagnose()
        return diagnostics.text if diagnostics.process_looks else ""

    def _hung_process(self, local_rank: int) -> HungProcess | None:
        pid = self._group.pids.get(local_rank) if self._group is not None else None
        if pid is None:
            return None
        rank, logs = self.assignment.base_rank + local_rank, self._logs[local_rank]
        return HungProcess(pid, rank, logs.stderr, logs.hang_file, self._pipes.get(local_rank), self._is_ours)

    async def reap(self, hang: HungWorker) -> HangReport | None:
        """Diagnose a worker that hangs, and kill it unless its timer forbids that; its failure contains the report.

        Returns:
            The report; None if the worker was gone before the diagnosis began.
        """
        local_rank = self.names[hang.worker_id]
        async with self._diagnoses[local_rank]:
            return await self._reap(local_rank, hang)

    async def _reap(self, local_rank: int, hang: HungWorker) -> HangReport | None:
        group, process = self._group, self._hung_process(local_rank)
        if group is None or process is None:
            return None
        rank, pid = process.rank, process.pid
        reaping = Reaping(hang, process, self._config.evidence_timeout)
        await reaping.examine()
        worker, report = self.workers.get(local_rank), reaping.case
        if self._stopped:
            # Usually all workers wait for the one that hangs; only the diagnostics of all show which one that is.
            _log.error("a worker hangs, and is being stopped", rank=rank, pid=pid, **report.figures)
            return report
        if worker is not None and worker.exit is not None:
            return report  # it has ended by itself meanwhile
        if hang.signal is None:
            _log.error("a worker hangs; its timer does not kill it", rank=rank, pid=pid, **report.figures)
            return report
        message = "a worker is killed" if hang.requested else "a worker hangs and is killed"
        _log.error(message, rank=rank, pid=pid, **report.figures)
        self._hang_reports[local_rank] = report
        killed = await reaping.end(lambda: group.kill_worker(local_rank))
        left = await survivors_of(killed.left)
        if left and not self._stopped:
            await self._fail_unkillable(local_rank, pid, left)
        return report

    def worker_of(self, pid: int) -> str | None:
        """Return the name of the worker that a process is or descends from (daemons too); None for other processes."""
        if self._group is None:
            return None
        pids = self._group.pids
        by_pid = {pids[rank]: name for name, rank in self.names.items() if rank in pids}
        worker = worker_of(pid, self._spawner.pid or 0, frozenset(by_pid))
        return by_pid[worker] if worker is not None else None

    def worker_at(self, local_rank: int) -> tuple[str, int] | None:
        """Return name and pid of the worker with this local rank; None if it does not run."""
        pid = self._group.pids.get(local_rank) if self._group is not None else None
        return (self.name_of(local_rank), pid) if pid is not None else None

    async def _fail_unkillable(self, local_rank: int, pid: int, left: tuple[int, ...]) -> None:
        """Report a worker that survived SIGKILL as failed, and this host as unable to run further workers."""
        why = await describe_left(left)
        report = self._hang_reports[local_rank]
        report.message = f"{report.message}; {why}"
        identity = self._identity(local_rank)
        worker = self.workers.get(local_rank)
        if worker is None or worker.exit is None:
            self._fail(failure_to_end(report.message, pid=pid, local_rank=local_rank, **identity), report)
        self._publish(NodeUnhealthy(why))

    def _is_ours(self, pid: int) -> bool:
        """True if a process is below the spawner now: its pid may have been reused since it was reported."""
        spawner, seen = self._spawner.pid, set[int]()
        while pid > 1 and pid not in seen:
            seen.add(pid)
            process = read_process(pid)
            if process is None or process.parent == spawner:
                return process is not None
            pid = process.parent
        return False

    def _make_pipes(self) -> None:
        for local_rank in range(self._config.local_world_size):
            path = self._settings.stacks / f"{self.assignment.round}.{local_rank}.{os.urandom(4).hex()}"
            try:
                self._pipes[local_rank] = StackPipe.make(path)
            except OSError as error:
                _log.warning(
                    "workers that hang can't write their stacks", file=str(path), reason=error.strerror
                )
                return

    def _spec(self, local_rank: int) -> WorkerSpec:
        logs = self._logs[local_rank]
        console = self._output.environment(local_rank, self._config.environment)
        sockets = {**self._settings.environment, **console}
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
            stdin=self._output.source(local_rank),
            stdout=self._output.target(local_rank, Streams.STDOUT),
            stderr=self._output.target(local_rank, Streams.STDERR),
            cpus=self._cpus[local_rank] if self._cpus is not None else None,
            rlimits=self._config.rlimits,
            call=self._config.call,
        )

    def _record(self, local_rank: int, pid: int, start_time: float) -> Worker:
        rank = self.assignment.base_rank + local_rank
        return self.workers.setdefault(local_rank, Worker(local_rank, rank, pid, start_time))

    def _exited(self, exited: WorkerExit) -> None:
        with self._publishing_errors():
            self._note_exit(exited)

    @contextmanager
    def _publishing_errors(self) -> Iterator[None]:
        """End the job if the block raises: the spawner's client would only log it, and the job wait for ever."""
        try:
            yield
        except Exception as error:
            self._publish(GroupBroken(error))

    def _note_exit(self, exited: WorkerExit) -> None:
        # A worker may exit before `start` has returned for the others.
        worker = self._record(exited.local_rank, exited.pid, exited.time)
        worker.exit = exited
        self._publish(WorkersChanged())
        if (exited.during_stop or self._stopped) and not self._post_mortem.failed_before_stop(exited):
            self._settings.history.worker_ended(worker.rank, exited)
            return
        report = self._hang_reports.get(exited.local_rank)
        if not exited.succeeded or (report is not None and report.to_be_killed):
            if self._output.delayed:
                self._begin(self._fail_when_logged(exited, report))
            else:
                self._fail(self._post_mortem.describe(exited), report)
            return
        self._settings.history.worker_ended(worker.rank, exited)
        if len(self.workers) == self._config.local_world_size and all(
            worker.exit is not None and worker.exit.succeeded for worker in self.workers.values()
        ):
            self._publish(WorkersSucceeded())

    async def _fail_when_logged(self, exited: WorkerExit, report: HangReport | None) -> None:
        """Report a failure after the worker's last output, which shows the cause, has reached its file."""
        with self._publishing_errors():
            await self._output.flush(exited.local_rank, _LAST_OUTPUT_TIMEOUT)
            failure = self._post_mortem.describe(exited)
            if not self._output.is_complete(exited.local_rank):
                failure = replace(
                    failure, message=f"{failure.message}; part of its output could not be written"
                )
            self._fail(failure, report)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _fail(self, failure: WorkerFailure, report: HangReport | None = None) -> None:
        self._settings.log_directory.note_failure()
        if report is not None:
            failure = report.complete_failure(failure)
        worker = self.workers.get(failure.local_rank)
        self._settings.history.worker_failed(failure, worker.exit if worker is not None else None)
        self._post_mortem.note(failure, self._unfinished())

    def _explain(self, failure: WorkerFailure) -> WorkerFailure:
        """Return the failure, or that another program has taken the master port, if this agent chose that port."""
        port, chosen = self.assignment.master_port, self._config.master_port is None
        if not (chosen and self.assignment.group_rank == 0 and names_taken_address(failure)):
            return failure
        if not is_taken_by_another(port, self._spawner.pid or 0):
            return failure
        return failure_of_port(failure, port, self._started_at)

    def _unfinished(self) -> dict[int, int]:
        """Return process ids, by local rank, of the workers that have not ended by themselves."""
        pids = {each.local_rank: each.pid for each in self.workers.values()}
        if self._group is not None:
            pids.update(self._group.pids)
        exits = {each.local_rank: each.exit for each in self.workers.values() if each.exit is not None}
        return {
            local_rank: pid
            for local_rank, pid in pids.items()
            if local_rank not in exits or (exits[local_rank].during_stop and not exits[local_rank].succeeded)
        }

    def _identity(self, local_rank: int) -> dict[str, Any]:
        return {
            "rank": self.assignment.base_rank + local_rank,
            "role": self._config.role,
            "host": socket.gethostname(),
        }


def _processors(config: JobConfig) -> list[Cpus]:
    assert config.numa_binding is not None, "the caller checks it"
    topology = read_topology(config.environment)
    return bind(config.numa_binding, topology, os.sched_getaffinity(0), config.local_world_size)
