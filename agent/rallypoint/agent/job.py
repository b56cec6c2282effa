"""A job on this host: carries out what the core decides, and tells the core what happens."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from functools import singledispatchmethod
from pathlib import Path
from typing import Any

from rallypoint.agent import core
from rallypoint.agent.addresses import free_port
from rallypoint.agent.config import JobConfig
from rallypoint.agent.console import Console
from rallypoint.agent.crew import Crew, Worker
from rallypoint.agent.errors import WorkerFailure
from rallypoint.agent.hang import Hang
from rallypoint.agent.job_result import FAILED, JobResult, refusal_of, verdict
from rallypoint.agent.logs import LogDirectory
from rallypoint.agent.messages import assignment_value, failure_message, phase_value
from rallypoint.agent.processes import Spawner
from rallypoint.agent.reaping import describe_left, who_outlives
from rallypoint.agent.spawn_protocol import SpawnError
from rallypoint.agent.worker_sockets import WorkerSockets
from rallypoint.rendezvous.client import Admitted, Event, LeaseEnded, Membership, RendezvousUnreachable
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.serving.advice import tls_advice
from rallypoint.serving.channel import open_channel
from rallypoint.serving.errors import ServiceError
from rallypoint.serving.logs import get_logger
from rallypoint.serving.settings import SettingError

# Requests to stop that come within so many seconds are one. Ctrl-C may arrive twice, from the terminal and from a
# wrapper around this program that passes it on; that must not cost the workers their checkpoints.
_ONE_REQUEST = 0.2
# Seconds to try to give the lease back when asked to stop at once. Without that, the others would wait for the lease
# to end, which takes longer.
_HURRIED_LEAVING = 1.0
# Seconds that the spawner gets to kill what is left, where it is known that something can't be killed.
_VAIN_KILLING = 1.0

_log = get_logger("rallypoint.agent")


class Job:
    """One job on this host, from joining the run to its end. Lives once."""

    def __init__(self, config: JobConfig, spawner: Spawner) -> None:
        """`spawner`: running already; the job uses it alone, and replaces it if it dies."""
        self._config = config
        self._spawner = spawner
        self._state = core.AgentState()
        # What the core is to hear; a result is for the loop in `run`, and ends the job whatever the core thinks.
        self._events: asyncio.Queue[core.Event | JobResult] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._crew: Crew | None = None
        self._failure: WorkerFailure | None = None
        self._run_end: pb.RunEnd | None = None
        self._refusal: str | None = None
        self._broken: JobResult | None = None
        self._lease = 0
        self._stop_signal: int | None = None
        self._asked_at: float | None = None
        self._hurried = False
        self.result: JobResult | None = None
        self._membership: Membership
        self._membership_task: asyncio.Task[None] | None = None
        self._console: Console
        self._log_directory: LogDirectory | None = None
        self._stacks: Path
        self._sockets: WorkerSockets

    @property
    def config(self) -> JobConfig:
        """What it runs."""
        return self._config

    @property
    def state(self) -> core.AgentState:
        """What the core knows and has done."""
        return self._state

    @property
    def workers(self) -> list[Worker]:
        """The workers that run, or ran last, by local rank."""
        return [worker for _, worker in sorted(self._crew.workers.items())] if self._crew is not None else []

    @property
    def log_dir(self) -> Path | None:
        """Folder of the workers' output, once there is one."""
        return self._log_directory.path if self._log_directory is not None else None

    @property
    def stopping(self) -> bool:
        """Whether it was asked to leave, or is out of its run."""
        return self._asked_at is not None or self._state.out

    async def run(self) -> JobResult:
        """Run the job to its end. Whatever happens, no process of it is left then.

        Raises:
            LogError: Its logs can't be written where they were asked for; nothing was joined or started.
            SettingError: There is no place for temporary files; likewise.
        """
        config = self._config
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._close_spawner)
            logs = self._log_directory = LogDirectory.create(config.log_dir, config.run_id)
            self._console = Console()
            stack.push_async_callback(self._console.close, 5.0)
            channel = open_channel(config.rendezvous.endpoint, config.rendezvous.tls)
            stack.push_async_callback(channel.close)
            self._sockets = await stack.enter_async_context(
                WorkerSockets(
                    config,
                    channel,
                    worker_of=self._worker_of,
                    rank_of=self._rank_of,
                    on_hung=self._reap,
                )
            )
            self._stacks = Path(stack.enter_context(_temporary_folder()))
            self._membership = Membership(
                channel,
                config.rendezvous.endpoint,
                _join_request(config),
                self._on_membership,
                connect_timeout=config.connect_timeout,
            )
            self._membership_task = asyncio.create_task(self._be_member())
            self._membership_task.add_done_callback(self._task_ended)
            stack.push_async_callback(self._end_tasks)
            _log.info("joining", run_id=config.run_id, node_id=config.node_id, logs=str(logs.path))
            while not self._state.finished:
                event = await self._events.get()
                if isinstance(event, JobResult):
                    break
                self._take(event)
        self.result = self._verdict()
        return self.result

    def request_stop(self, detail: str, received: int = signal.SIGTERM) -> None:
        """Leave the run in good order. Asked again, after a moment: at once, workers are killed.

        Args:
            detail: Who asked, for people.
            received: The signal that asked, or that stands for who did; the exit code names it. Workers get SIGINT
                for Ctrl-C and SIGTERM for everything else: those two they may be prepared for.
        """
        now = asyncio.get_running_loop().time()
        if not self.stopping:
            _log.warning("leaving the run", reason=detail)
            self._stop_signal, self._asked_at = received, now
            self._events.put_nowait(core.StopRequested(detail))
        elif not self._hurried and (self._asked_at is None or now >= self._asked_at + _ONE_REQUEST):
            _log.warning("stopping at once", reason=detail)
            self._hurried = True
            if self._crew is not None:
                self._spawn(self._hurry(self._crew))
            if self._state.left:
                self._abandon_membership()

    def _take(self, event: core.Event) -> None:
        self._state, effects = core.decide(self._state, event)
        for effect in effects:
            self._carry_out(effect)

    @singledispatchmethod
    def _carry_out(self, effect: object) -> None:
        raise TypeError(f"not an effect: {effect!r}")

    @_carry_out.register
    def _start_workers(self, effect: core.StartWorkers) -> None:
        if self._spawner.dead:
            with suppress(SpawnError):  # the crew fails for want of one, and says so
                self._spawner = Spawner.start()
        assert self._log_directory is not None, "run made it"
        seat = effect.assignment
        crew = self._crew = Crew(
            self._config,
            seat,
            effect.restart_count,
            spawner=self._spawner,
            console=self._console,
            log_directory=self._log_directory,
            sockets=self._sockets.environment,
            stacks=self._stacks,
            on_failure=self._on_failure,
            on_success=self._on_success,
            on_unfit=self._on_unfit,
        )
        first, last = seat.base_rank, seat.base_rank + self._config.local_world_size - 1
        _log.info(
            "starting workers",
            round=seat.round,
            ranks=f"{first}-{last}" if last > first else str(first),
            world_size=seat.world_size,
            restart_count=effect.restart_count,
        )
        self._spawn(self._start_crew(crew))

    @_carry_out.register
    def _stop_workers(self, effect: core.StopWorkers) -> None:
        assert self._crew is not None, "workers that run are a crew's"
        self._spawn(self._stop_crew(self._crew, effect.detail))

    @_carry_out.register
    def _confirm(self, effect: core.Confirm) -> None:
        self._membership.confirm(effect.round, free_port(self._config.address))

    @_carry_out.register
    def _report_failure(self, effect: core.ReportFailure) -> None:
        assert self._failure is not None, "a failure was noted before it is reported"
        self._membership.report_failure(failure_message(self._failure, effect.round))

    @_carry_out.register
    def _report_success(self, effect: core.ReportSuccess) -> None:
        seat = self._state.assignment
        others = seat is not None and seat.group_world_size > 1
        _log.info("workers succeeded" + ", waiting for those of other hosts" * others, round=effect.round)
        self._membership.report_success(effect.round)

    @_carry_out.register
    def _depart(self, effect: core.Depart) -> None:
        self._membership.depart(effect.detail)

    @_carry_out.register
    def _leave(self, effect: core.Leave) -> None:
        if self._membership.lease:
            self._membership.leave(effect.detail)
            self._spawn(self._bound_leaving())
        else:
            self._abandon_membership()

    @_carry_out.register
    def _finish(self, effect: core.Finish) -> None:
        """The loop in `run` sees the state."""

    async def _start_crew(self, crew: Crew) -> None:
        await self._sockets.act_under(self._lease)
        await crew.start()
        self._sockets.introduce()

    async def _stop_crew(self, crew: Crew, detail: str) -> None:
        number = signal.SIGINT if self._stop_signal == signal.SIGINT else signal.SIGTERM
        timeout = self._config.shutdown_timeout
        if self._hurried:
            number, timeout = signal.SIGKILL, 0.0
        _log.info("stopping workers", round=crew.assignment.round, reason=detail)
        report = await crew.stop(number, timeout)
        if report.killed:
            _log.warning(
                "workers had to be killed",
                local_ranks=list(report.killed),
                waited=round(report.seconds, 1),
            )
        for worker in crew.names:
            self._sockets.clear(worker)
        if left := await who_outlives(report.left):
            self._on_unfit(await describe_left(left))
        self._events.put_nowait(core.WorkersGone())

    async def _hurry(self, crew: Crew) -> None:
        """Kill workers that are being stopped; who stops them says what became of them."""
        await crew.stop(signal.SIGKILL, 0.0)

    async def _bound_leaving(self) -> None:
        """A rendezvous service that is away must not keep this node from going: its lease ends by itself."""
        assert self._membership_task is not None, "who leaves was in"
        timeout = self._config.close_timeout
        if self._hurried:
            timeout = min(timeout, _HURRIED_LEAVING)
        done, _ = await asyncio.wait({self._membership_task}, timeout=timeout)
        if not done:
            _log.warning("the rendezvous service did not take the lease back", timeout=timeout)
            self._abandon_membership()

    def _abandon_membership(self) -> None:
        if self._membership_task is not None:
            self._membership_task.cancel()

    async def _be_member(self) -> None:
        try:
            await self._membership.run()
        except RendezvousUnreachable as error:
            advice = tls_advice(str(error), self._config.rendezvous.tls)
            self._refusal = f"{error}; {advice or 'is it running, and is --rdzv-endpoint right?'}"
        except ServiceError as error:
            if error.reason == "RUN_CLOSED" and self._crew is not None:
                # It was closed while this node was away for so long that it lost its lease.
                outcome = pb.Outcome.Value(f"OUTCOME_{error.metadata['outcome']}")
                self._run_end = pb.RunEnd(outcome=outcome, detail=error.message)
            else:
                self._refusal = refusal_of(self._config.rendezvous.endpoint, error)
        finally:
            self._events.put_nowait(core.MembershipEnded(self._refusal or ""))

    def _on_membership(self, event: Event) -> None:
        match event:
            case Admitted():
                if event.resumed:
                    _log.info("resumed", lease=event.lease)
                else:
                    _log.info("joined", lease=event.lease, **self._nodes_wanted())
                self._lease = event.lease
            case LeaseEnded():
                _log.warning("lease lost, joining anew", reason=event.reason)
                self._events.put_nowait(core.LeaseEnded(event.reason))
            case _:
                self._on_update(event.update)

    def _nodes_wanted(self) -> dict[str, int]:
        settings = self._config.settings
        return {"min_nodes": settings.min_nodes, "max_nodes": settings.max_nodes}

    def _on_update(self, update: pb.NodeUpdate) -> None:
        if update.HasField("run_end"):
            self._run_end = update.run_end
        # Where no worker runs, whoever looks must find out what for.
        elif update.phase == pb.PHASE_JOINABLE and not self.stopping:
            _log.info("waiting for nodes", **self._nodes_wanted())
        elif update.phase == pb.PHASE_FINAL and not update.HasField("assignment"):
            _log.info("waiting for a place in the next round")
        self._events.put_nowait(
            core.Updated(
                phase=phase_value(update.phase),
                assignment=assignment_value(update.assignment) if update.HasField("assignment") else None,
                restart_count=update.restart_count,
                detail=update.last_round_end.detail,
                exit_barrier_passed=update.exit_barrier_passed,
            )
        )

    def _on_failure(self, failure: WorkerFailure) -> None:
        _log.error("worker failed", rank=failure.rank, pid=failure.pid, reason=failure.message)
        self._failure = failure
        self._events.put_nowait(core.WorkerFailed())

    def _on_unfit(self, detail: str) -> None:
        if self._state.unfit is None:
            _log.error("this host can't run another round", reason=detail)
        self._events.put_nowait(core.NodeUnfit(detail))

    def _on_success(self) -> None:
        assert self._crew is not None, "a crew succeeded"
        self._spawn(self._sweep(self._crew))

    async def _sweep(self, crew: Crew) -> None:
        """What workers left behind when they ended must not live into the next round."""
        report = await crew.stop(signal.SIGKILL, 0.0)
        left = await who_outlives(report.left)
        unfit = await describe_left(left) if left else None
        self._events.put_nowait(core.WorkersSucceeded())
        if unfit is not None:
            self._on_unfit(unfit)

    def _worker_of(self, pid: int) -> str | None:
        return self._crew.worker_of(pid) if self._crew is not None else None

    def _rank_of(self, worker: str) -> int | None:
        return self._crew.rank_of(worker) if self._crew is not None else None

    async def _reap(self, hang: Hang) -> bool:
        if self._crew is not None and hang.worker_id in self._crew.names:
            await self._crew.reap(hang)
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """What goes wrong unforeseen in the background must end the job: a job that hangs is the worst failure."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.exception("internal error", error=error)
            self._broken = JobResult(
                FAILED, f"internal error: {error!r}; please report it with the log above"
            )
            self._events.put_nowait(self._broken)

    async def _end_tasks(self) -> None:
        """Whatever was going on: when this returns, no worker is left."""
        assert self._membership_task is not None, "it is the first of the tasks"
        self._membership_task.cancel()
        if self._crew is not None:
            await self._crew.stop(signal.SIGKILL, 0.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._membership_task, *self._tasks, return_exceptions=True)

    async def _close_spawner(self) -> None:
        if self._state.unfit is not None:
            await self._spawner.close(_VAIN_KILLING)
        else:
            await self._spawner.close()

    def _verdict(self) -> JobResult:
        return self._broken or verdict(
            self._state,
            run_end=self._run_end,
            failure=self._failure,
            refusal=self._refusal,
            stop_signal=self._stop_signal,
            ran=self._crew is not None,
        )


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="rallypoint_stacks_")
    except OSError as error:
        raise SettingError(f"can't make a temporary folder: {error}; set TMPDIR to another one") from None


def _join_request(config: JobConfig) -> pb.JoinRun:
    return pb.JoinRun(
        run_id=config.run_id,
        node_id=config.node_id,
        settings=config.settings,
        address=config.address,
        local_world_size=config.local_world_size,
        role=config.role,
        topology=config.topology,
    )
