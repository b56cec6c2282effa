"""A job on this host: handles the events of its parts, and carries out the decisions of the core."""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import singledispatchmethod
from pathlib import Path

from rallypoint.agent.addresses import MasterPort
from rallypoint.agent.config.job import JobConfig
from rallypoint.agent.core import core
from rallypoint.agent.events.publisher import JobEvents
from rallypoint.agent.events.recorder import JobIdentity
from rallypoint.agent.failures.analysis import EarlierFailure, FirstFailure
from rallypoint.agent.failures.failure import WorkerFailure, signal_name
from rallypoint.agent.health.monitor import HostMonitor, MaintenanceAnnounced
from rallypoint.agent.job.drain import Drain, DrainNotice
from rallypoint.agent.job.failure_file import FAILURE_FILE, failure_document, write_failure_files
from rallypoint.agent.job.rendezvous import NodeMembership
from rallypoint.agent.job.result import FAILED, SUCCEEDED, UNFIT, JobResult, judge
from rallypoint.agent.job.sync import Background, EventQueue, QueuedEvent
from rallypoint.agent.logs.follower import Console
from rallypoint.agent.logs.plan import LogDirectory
from rallypoint.agent.logs.terminal import open_terminal
from rallypoint.agent.sockets.watchdog import HostWatchdog, WatchdogChanged
from rallypoint.agent.sockets.worker_sockets import WorkerSockets
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.workers.group import (
    AttemptBegun,
    GroupBroken,
    GroupSettings,
    Worker,
    WorkerGroup,
    WorkersChanged,
    WorkersStarted,
    WorkersSucceeded,
)
from rallypoint.agent.workers.groups import WorkerGroups
from rallypoint.rendezvous.core.state import Phase
from rallypoint.rpc.endpoint import SettingError, host_exhausted
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.loop import Notifier
from rallypoint.rpc.replica_client import ReplicaClient

# Requests to stop within so many seconds count as one. Ctrl-C may arrive twice, from the terminal and from a
# wrapper around this program that forwards it; that must not cost the workers their checkpoints.
_ONE_REQUEST = 0.2
# Seconds to try to give the lease back after a request to stop at once. Without that, the other nodes would wait until
# the lease expires, which takes longer.
_HURRIED_LEAVING = 1.0

_log = get_logger("rallypoint.agent")


class Job:
    """One job on this host, from joining the run to its end. Can be run once."""

    def __init__(self, config: JobConfig, spawner: Spawner) -> None:
        """`spawner`: already running; no other job uses it, and this one replaces it if it dies."""
        self._config = config
        self._state = core.AgentState(checks=bool(config.health_checks))
        self._events = EventQueue()
        publish = self._events.put_nowait
        self._background = Background(self._break)
        self._groups = WorkerGroups(config, spawner, publish, self._background.begin)
        self._drain = Drain(publish)
        self._master_port = MasterPort()
        self._failure: WorkerFailure | None = None
        self._broken: JobResult | None = None
        self._stop_signal: int | None = None
        self._stop_requested_at: float | None = None
        self._hurried = False
        self.result: JobResult | None = None
        # Global rank of the first worker here, by the number of the attempt in the log directory.
        self.base_ranks: dict[int, int] = {}
        self.changed = Notifier()
        self.start_time = time.time()
        self.end_time: float | None = None
        # Set by `run`: operators may already stop the job, and may still do so if it ended before that.
        self._membership: NodeMembership
        self._joins = False
        self._log_directory: LogDirectory | None = None
        self._sockets: WorkerSockets
        self._history: JobEvents
        self._host_monitor: HostMonitor
        most = config.watchdog_timeout if config.require_watchdog else None
        self._watchdog = HostWatchdog(most, publish)

    @property
    def config(self) -> JobConfig:
        """Its configuration."""
        return self._config

    @property
    def state(self) -> core.AgentState:
        """State of the core."""
        return self._state

    @property
    def group(self) -> WorkerGroup | None:
        """The workers of the latest round; None if there was none yet."""
        return self._groups.group

    @property
    def spawner_pid(self) -> int:
        """Process id of the spawner, the ancestor of all workers; 0: none."""
        return self._groups.spawner.pid or 0

    @property
    def workers(self) -> list[Worker]:
        """The workers of the latest round, running or ended, by local rank."""
        return self._groups.workers

    @property
    def stop_reason(self) -> str:
        """Reason of the latest stop of workers; empty if there was none."""
        return self._groups.stop_reason

    @property
    def draining(self) -> DrainNotice | None:
        """The drain in progress; None if there is none."""
        return self._drain.now

    @property
    def watchdog_trouble(self) -> str:
        """Reason for which no watchdog guards the workers here; empty: one does, or it is not known yet."""
        return self._watchdog.trouble if self.result is None else ""

    @property
    def log_dir(self) -> Path | None:
        """Folder of the workers' output; None until it is made."""
        return self._log_directory.path if self._log_directory is not None else None

    @property
    def stopping(self) -> bool:
        """True if a stop was requested, or the node is no longer a member of the run."""
        return self._stop_requested_at is not None or self._state.out

    async def run(self) -> JobResult:
        """Run the job to its end. In any case, none of its processes is left when this returns.

        Raises:
            LogError: Its logs can't be written to the configured folder; nothing was joined or started.
            SettingError: Temporary files or the event log can't be written, or a health check or the maintenance
                command is not available on this host; nothing was joined or started.
        """
        config = self._config
        async with AsyncExitStack() as stack:
            stack.callback(self._master_port.close)
            stack.push_async_callback(lambda: self._groups.close(unfit=self._state.unhealthy is not None))
            subject = JobIdentity(config.run_id, config.node_id, config.role, config.max_restarts)
            self._history = JobEvents(subject, event_log=config.event_log, sinks=config.event_sinks)
            stack.push_async_callback(self._history.close)
            logs = self._log_directory = LogDirectory.create(
                config.log_dir, config.run_id, config.keep_attempts
            )
            stack.callback(logs.close)
            console = Console()
            stack.push_async_callback(console.close, 5.0)
            rendezvous = ReplicaClient(config.rendezvous.endpoint, config.rendezvous.security)
            stack.push_async_callback(rendezvous.close)
            self._sockets = await stack.enter_async_context(
                WorkerSockets(
                    config, rendezvous, self._watchdog, self._groups, self._groups.spawner.register_cleanup
                )
            )
            environment = {**self._sockets.environment, **await self._listen_for_measurements(stack)}
            folder = Path(stack.enter_context(_temporary_folder()))
            self._groups.spawner.register_cleanup(folder)
            environment |= self._drain.set_up(folder)
            stack.callback(self._drain.close)
            self._host_monitor = HostMonitor(config, folder, logs.path, self._pids, self._events.put_nowait)
            stack.push_async_callback(self._host_monitor.close)
            if (terminal := open_terminal(config.output)) is not None:
                stack.callback(terminal.close)
            self._groups.settings = GroupSettings(console, logs, environment, folder, self._history, terminal)
            self._groups.sockets = self._sockets
            self._membership = NodeMembership(config, rendezvous, self._events.put_nowait)
            self._joins = True
            stack.callback(self._watchdog.close)
            self._membership.join(self._background.begin)
            stack.push_async_callback(self._end_all)
            self._host_monitor.start(self._background.begin)
            _log.info("joining", run_id=config.run_id, node_id=config.node_id, logs=str(logs.path))
            while not self._state.finished and self._broken is None:
                self._take(await self._events.get())
        result = self._result()
        self._leave_failure_file(result)
        return self.conclude(result)

    async def _listen_for_measurements(self, stack: AsyncExitStack) -> dict[str, str]:
        """Open the socket for measurements of workers; return its environment variables. None without event sinks."""
        if not self._history.has_sinks:
            return {}
        from rallypoint.agent.sockets.metrics import MeasurementSocket  # noqa: PLC0415 (for some jobs only)

        opened = await stack.enter_async_context(MeasurementSocket(self._history.measured))
        for path in opened.environment.values():
            self._groups.spawner.register_cleanup(Path(path).parent)
        return opened.environment

    def conclude(self, result: JobResult) -> JobResult:
        """Set the result of the job, and return it. Called by `run`, or by the caller of `run` if that raised."""
        self.result, self.end_time = result, time.time()
        self.changed.notify()
        return result

    def progress_of(self, worker: Worker) -> tuple[int, float] | None:
        """The last step that a worker reported, and the seconds since; None if it reported none."""
        name = self.group.name_of(worker.local_rank) if self.group is not None else ""
        return self._sockets.progress_of(name)

    def request_stop(self, detail: str, received: int = signal.SIGTERM, *, at_once: bool = False) -> None:
        """Leave the run in good order. After a second request, more than 0.2 s later, kill the workers at once.

        Args:
            detail: Source of the request, for people.
            received: The signal that requested it, or an equivalent one; the exit code names it. Workers get SIGINT
                for Ctrl-C and the job's stop signal otherwise: they may have handlers for these.
            at_once: Kill the workers without another signal first.
        """
        now = asyncio.get_running_loop().time()
        if not self.stopping:
            _log.warning("leaving the run", reason=detail)
            self._stop_signal, self._stop_requested_at = received, now
            self._hurried = at_once
            self._events.put_nowait(core.StopRequested(detail))
        elif not self._hurried and (
            at_once or self._stop_requested_at is None or now >= self._stop_requested_at + _ONE_REQUEST
        ):
            _log.warning("stopping at once", reason=detail)
            self._hurried = True
            self._groups.kill()
            if self._joins:
                self._membership.hurry()
                if self._state.left:
                    self._membership.abandon()

    def drain(self, grace: float | None, reason: str) -> None:
        """Warn the workers, and leave the run once they are done or have saved their state.

        During a drain, a second call can only make the deadline earlier. On a host that is leaving, it has no effect.

        Args:
            grace: Seconds after which it leaves in any case; None: the setting of the job.
            reason: For people; workers can read it.
        """
        if self.stopping or self._state.leaving is not None or self.result is not None:
            return
        self._drain.begin(self._config.drain_grace if grace is None else grace, reason)
        self.changed.notify()

    def pass_on(self, number: int) -> None:
        """Send a user's signal to the workers, but not to their child processes; see `WorkerGroup.pass_on`."""
        if self.group is not None:
            self.group.pass_on(number)

    def _take(self, event: QueuedEvent) -> None:
        """Handle an event of the queue."""
        match event:
            case JobResult():
                self._broken = event
            case AttemptBegun() | WorkersStarted() | WorkersChanged() | WorkersSucceeded() | GroupBroken():
                self._take_from_group(event)
            case FirstFailure(failure):
                _log.error("worker failed", rank=failure.rank, pid=failure.pid, reason=failure.message)
                self._failure = failure
                self._decide(core.GroupFailed())
            case EarlierFailure(failure):
                self._take_earlier_failure(failure)
            case WatchdogChanged(trouble):
                self._membership.report_watchdog(trouble)
                self._history.watchdog(not trouble, trouble)
            case MaintenanceAnnounced():
                self.drain(None, event.reason)
            case core.NodeUnhealthy(reason):
                # An eviction is not logged here: the result of the job contains the refusal.
                if self._state.unhealthy is None and reason != self._membership.refusal:
                    _log.error("this host can't run another round", reason=reason)
                self._decide(event)
            case _:
                self._decide(event)
        self.changed.notify()

    def _take_from_group(
        self, event: AttemptBegun | WorkersStarted | WorkersChanged | WorkersSucceeded | GroupBroken
    ) -> None:
        match event:
            case AttemptBegun():
                self.base_ranks[event.number] = event.base_rank
            case WorkersStarted(round_, parts):
                self._membership.report_start(round_, parts)
            case WorkersChanged():
                self._drain.check_workers()
            case WorkersSucceeded():
                if not self._state.finished:  # otherwise the end of the job has left no process
                    self._groups.sweep()
            case GroupBroken(error):
                self._break(error)

    def _take_earlier_failure(self, failure: WorkerFailure) -> None:
        _log.error(
            "an earlier worker failure was found", rank=failure.rank, pid=failure.pid, reason=failure.message
        )
        self._failure = failure
        # A node that leaves on request stops its workers without a failure, and must not cost the others a restart.
        if self.group is not None and not self.stopping and self.draining is None:
            self._membership.report_failure(failure, self.group.assignment.round)

    def _decide(self, event: core.Event) -> None:
        """Have the core decide about an event, and carry out the effects."""
        before = self._state
        if before.finished:
            return
        self._state, effects = core.decide(before, event)
        self._history.decided(event, before, self._state, effects)
        for effect in effects:
            self._carry_out(effect)

    @singledispatchmethod
    def _carry_out(self, effect: object) -> None:
        raise TypeError(f"not an effect: {effect!r}")

    @_carry_out.register
    def _start_workers(self, effect: core.StartWorkers) -> None:
        self._master_port.hand_over()
        lease = self._membership.lease
        assert lease is not None, "who has an assignment holds a lease"
        self._membership.ran = True
        self._groups.start(effect.assignment, effect.restart_count, lease)

    @_carry_out.register
    def _stop_workers(self, effect: core.StopWorkers) -> None:
        number = signal.SIGINT if self._stop_signal == signal.SIGINT else self._config.stop_signal
        timeout = self._config.shutdown_timeout
        if self._hurried:
            number, timeout = signal.SIGKILL, 0.0
        leaving = self._state.leaving is not None and not self._hurried
        hint = ""
        if self._stop_signal is not None and not self._hurried:
            again = (
                "Ctrl-C again" if number == signal.SIGINT else f"a second {signal_name(self._stop_signal)}"
            )
            hint = f"{again} kills them"
        after = self._membership.round_over if leaving else None
        self._groups.stop(effect.detail, number, timeout, after, hint)

    @_carry_out.register
    def _collect_failures(self, effect: core.CollectFailures) -> None:
        if self.group is not None:
            self.group.collect_failures()

    @_carry_out.register
    def _warn_workers(self, effect: core.WarnWorkers) -> None:
        all_here = self._config.local_world_size
        self._drain.warn(lambda: workers if len(workers := self.workers) == all_here else [])
        if self._config.warn_signal is not None:
            self.pass_on(self._config.warn_signal)

    @_carry_out.register
    def _examine(self, effect: core.CheckHealth) -> None:
        self._background.begin(self._host_monitor.examine(effect.fresh))

    @_carry_out.register
    def _confirm(self, effect: core.SendConfirm) -> None:
        self._membership.confirm(effect.round, self._config.master_port or self._master_port.reserve())

    @_carry_out.register
    def _report_failure(self, effect: core.SendFailure) -> None:
        assert self.group is not None, "workers that fail belong to a group"
        # The earliest by now, not the one of the event: if several exits arrive at once, the first may be another's.
        self._membership.report_failure(self.group.failures[0], effect.round)

    @_carry_out.register
    def _report_success(self, effect: core.SendSuccess) -> None:
        assignment = self._state.assignment
        others = assignment is not None and assignment.group_world_size > 1
        _log.info("workers succeeded" + ", waiting for those of other hosts" * others, round=effect.round)
        self._membership.report_success(effect.round)

    @_carry_out.register
    def _depart(self, effect: core.SendDeparture) -> None:
        self._membership.depart(effect.detail)

    @_carry_out.register
    def _leave(self, effect: core.SendLeave) -> None:
        timeout = self._config.close_timeout
        # A service that ended with the run must not delay the exit: no other job can reopen the run there.
        if self._hurried or self._state.phase is Phase.CLOSED:
            timeout = min(timeout, _HURRIED_LEAVING)
        self._background.begin(self._leave_run(effect.detail, timeout))

    async def _leave_run(self, detail: str, timeout: float) -> None:
        await self._membership.leave(detail, timeout)

    @_carry_out.register
    def _finish(self, effect: core.Finish) -> None:
        """Do nothing: the loop in `run` reads the state."""

    def _pids(self) -> dict[int, int]:
        """Process ids of the running workers, by rank."""
        running = self._state.workers is core.Workers.RUNNING
        return {worker.rank: worker.pid for worker in self.workers if running and worker.exit is None}

    def _break(self, error: BaseException) -> None:
        """End the job after an error in the background: a job that hangs is the worst failure."""
        if host_exhausted(error):
            self._events.put_nowait(JobResult(UNFIT, f"this host is not fit to run workers: {error}"))
            return
        _log.exception("internal error", error=error)
        detail = f"internal error: {error!r}; please report it with the log above"
        self._events.put_nowait(JobResult(FAILED, detail))

    async def _end_all(self) -> None:
        """Stop everything: when this returns, no worker is left."""
        self._membership.abandon()
        await self._groups.end()
        await self._background.end()
        # Failures that this brought to light count for the result; the core decides nothing any more.
        self._state = replace(self._state, finished=True)
        while not self._events.empty():
            self._take(self._events.get_nowait())
        result = self._result()
        self._history.ended(result.exit_code, result.detail)

    def _result(self) -> JobResult:
        return self._broken or judge(
            self._state,
            run_end=self._membership.run_end,
            failure=self._failure,
            refusal=self._membership.refusal,
            had_succeeded=self._membership.had_succeeded,
            stop_signal=self._stop_signal,
            ran=self.group is not None,
            local_failures=self.group.failures if self.group is not None else (),
        )

    def _leave_failure_file(self, result: JobResult) -> None:
        if result.exit_code == SUCCEEDED:
            return
        document = failure_document(
            self._config,
            result,
            round_=self.group.assignment.round if self.group is not None else 0,
            restart_count=self._state.restart_count,
            run_end=self._membership.run_end,
            local_failures=self.group.failures if self.group is not None else (),
            host=socket.gethostname(),
            log_dir=self.log_dir,
            time=time.time(),
        )
        paths = [self.log_dir / FAILURE_FILE] if self.log_dir is not None else []
        if self._config.failure_file is not None:
            paths.append(self._config.failure_file)
        write_failure_files(document, paths)


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="rallypoint_stacks_")
    except OSError as error:
        raise SettingError(f"can't make a temporary folder: {error}; set TMPDIR to another one") from None
