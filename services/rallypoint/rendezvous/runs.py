"""All runs of a journal: commands are carried out in steps, each made durable, and told of only then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rallypoint.rendezvous.codec import encode_record, to_message
from rallypoint.rendezvous.core import commands, facts
from rallypoint.rendezvous.core.execute import carry_out, settle
from rallypoint.rendezvous.core.refusals import Refused, RunNotFound
from rallypoint.rendezvous.core.snapshot import take_snapshot, take_tombstone
from rallypoint.rendezvous.core.state import RunState
from rallypoint.rendezvous.errors import Draining
from rallypoint.rendezvous.fact_log import log_fact
from rallypoint.rendezvous.history import Histories
from rallypoint.rendezvous.hosted_run import HostedRun
from rallypoint.rendezvous.journal.journal import Checkpoint, Entry, Forgotten, Journal, Record, Recovered
from rallypoint.rendezvous.limits import LimitReached, RendezvousLimits
from rallypoint.rendezvous.recovery import Numbers, recover_runs
from rallypoint.rendezvous.schedule import Schedule
from rallypoint.rendezvous.turns import Turns
from rallypoint.serving.lag import LagSettings, WatchClock
from rallypoint.serving.logs import get_logger

_T = TypeVar("_T")
_log = get_logger(__name__)

# What every node must act on. Others (who else joined, who confirmed) are for watchers only: a round that n
# nodes join is told to each of them once, not n times.
_TOLD_TO_NODES = (
    facts.RoundFrozen,
    facts.RoundFinalized,
    facts.RoundEnded,
    facts.ExitBarrierPassed,
    facts.RunClosed,
)
# What one step carries out of one run: some 10 ms of work. More in one commit hardly makes it cheaper, and keeps other
# runs waiting for longer.
_MOST_PER_STEP = 256
# Who causes what nobody asked for: deadlines and consequences.
SERVICE = "service"


@dataclass(slots=True)
class _Request(Generic[_T]):
    """A command, if any, and what is then read: with the facts that came of it, once all there is is durable."""

    answer: asyncio.Future[_T]
    read: Callable[[Sequence[facts.Fact]], _T]
    run_id: str = ""
    command: commands.Command | None = None
    actor: str = SERVICE
    undo: Callable[[_T], None] = lambda _: None
    came_at: float = 0.0
    happened: Sequence[facts.Fact] = ()
    refusal: Refused | None = None

    def settle(self) -> None:
        """Answer; what was read for somebody who has gone meanwhile is undone."""
        try:
            if self.refusal is not None:
                raise self.refusal
            answer = self.read(self.happened)
        except Refused as refusal:
            self.fail(refusal)
        else:
            if self.answer.done():
                self.undo(answer)
            else:
                self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True)
class _Step:
    """What one step changes: durable together, and told only then."""

    entries: list[Entry] = field(default_factory=list)
    changed: dict[str, HostedRun] = field(default_factory=dict)
    happened: list[tuple[HostedRun, facts.Fact, Record]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)


class DurableRuns:
    """Keeps all runs of one journal.

    One task changes the runs: it takes all commands that wait, carries them out, commits their facts as one
    group, and only then answers, tells members and watchers, and takes the next. So nothing that is told, or
    read, can be ahead of what is durable, and revisions are told in order.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        on_round_end: Callable[[str, int], None] = lambda run_id, next_round: None,
        on_expiry: Callable[[str], None] = lambda run_id: None,
        limits: RendezvousLimits | None = None,
        lag: LagSettings | None = None,
    ) -> None:
        """Set up; `recover` and `serve` make it work.

        Args:
            journal: Opened already; what it held goes to `recover`.
            clock: Monotonic seconds.
            wall_clock: Unix seconds, for the records that people read.
            on_round_end: Called with (run_id, number of the next round) once the end of a round is durable.
            on_expiry: Called with the run_id once it is durable that a run is forgotten.
            limits: What the service, and each run, may use.
            lag: How pauses of this process are noticed and forgiven.
        """
        self._journal = journal
        self._clock = clock
        self._lag = lag or LagSettings()
        self._watch = WatchClock(clock(), self._lag)
        self._looked = clock()
        self._stopped_at: float | None = None
        self._wall_clock = wall_clock
        self._on_round_end = on_round_end
        self._on_expiry = on_expiry
        self._limits = limits or RendezvousLimits()
        self._histories = Histories(
            self._limits.events_per_run, self._limits.event_bytes_per_run, self._limits.event_bytes
        )
        self._runs: dict[str, HostedRun] = {}
        # Runs that expired: their numbers go on if they come again.
        self._expired: dict[str, Numbers] = {}
        self._schedule = Schedule()
        self._requests: Turns[_Request[Any]] = Turns(_MOST_PER_STEP)
        self._wake = asyncio.Event()
        self._broken: Exception | None = None

    def recover(self, recovered: Recovered) -> None:
        """Take over what the journal held. Every lease and every deadline gets a full new term.

        Raises:
            JournalError: A record is missing, or of a newer version.
        """
        now = self._now()
        self._runs, self._expired = recover_runs(recovered, self._histories.open, now, self._to_wall())
        self._histories.keep_within()
        for run_id in self._runs:
            self._schedule.put(
                run_id, now
            )  # what must happen by now, happens as soon as the engine is served
        self._wake.set()
        if self._runs:
            _log.info("recovered", runs=len(self._runs), records=len(recovered.records))

    async def serve(self) -> None:
        """Carry out commands and deadlines until cancelled.

        Raises:
            JournalError: The journal is broken: the process must end, and start again from what is durable.
        """
        requests: list[_Request[Any]] = []
        try:
            while True:
                await self._wait_for_work()
                requests = self._requests.take()
                await self._step(requests)
                if self._requests:
                    self._wake.set()
                    await asyncio.sleep(0)  # who was answered goes on first
        except BaseException as error:
            # Whatever it is: nobody may wait for an answer that can't come any more.
            self._broken = error if isinstance(error, Exception) else Draining()
            self._fail(requests, self._broken)
            raise

    async def _wait_for_work(self) -> None:
        deadline = self._schedule.next()
        timeout = None
        if deadline is not None and self._stopped_at is None:
            # However far the deadline: only who looks often can tell that it was paused in between.
            timeout = min(max(0.0, deadline - self._now()), self._lag.pulse)
        if not self._wake.is_set():
            with contextlib.suppress(TimeoutError):  # a deadline of the core is due
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
        self._wake.clear()
        now = self._clock()
        if deadline is not None and (paused := self._watch.observe(now, self._looked + self._lag.pulse)):
            _log.warning("paused", forgiven=round(paused, 3))
        self._looked = now

    def _now(self) -> float:
        """The time by which leases and deadlines are judged, seconds.

        It leaves out what time this process was paused, and stands still once it drains: while nodes can't show
        that they are alive, nothing may be held against them.
        """
        return self._watch.read(self._clock()) if self._stopped_at is None else self._stopped_at

    def _to_wall(self) -> float:
        """What makes a time of the wall clock out of one by which leases are judged, when added."""
        return self._wall_clock() - self._now()

    async def _step(self, requests: Sequence[_Request[Any]]) -> None:
        now = self._now()
        step = _Step()
        for request in requests:
            if request.command is not None:
                self._carry_out(step, request, request.command, now)
        for run_id in self._schedule.due(now):
            step.changed[run_id] = self._runs[run_id]
        for run_id, run in step.changed.items():
            self._note(step, run, settle(run.state, now), SERVICE)
            if run.expires(self._limits.run_ttl) <= now:
                self._forget(step, run_id, run)
        if step.entries:
            await self._journal.append(step.entries)
        self._publish(step, now)
        for request in requests:
            request.settle()
        for run_id, run in step.changed.items():
            self._schedule.put(run_id, run.next_deadline(self._limits.run_ttl))

    def _carry_out(self, step: _Step, request: _Request[Any], command: commands.Command, now: float) -> None:
        try:
            run = self._run_for(request.run_id, command)
            if isinstance(command, commands.ReportFailure):
                # It may have waited for a commit, and which failure was the first must not depend on the disk.
                command = command.aged(now - request.came_at)
            stated = carry_out(run.state, command, now)
            self._runs[request.run_id] = step.changed[request.run_id] = run
            self._note(step, run, stated, request.actor)
            consequences = settle(run.state, now)
            self._note(step, run, consequences, SERVICE)
            request.happened = [*stated, *consequences]
        except Refused as refusal:
            request.refusal = refusal

    def _note(self, step: _Step, run: HostedRun, happened: Sequence[facts.Fact], actor: str) -> None:
        """Write facts down that were applied, and a checkpoint where it is time for one."""
        if not happened:
            return
        wall_time = self._wall_clock()
        run_id = run.state.run_id
        for fact in happened:
            run.recorded += 1
            content = encode_record(run_id, run.recorded, fact, wall_time, actor).SerializeToString()
            record = Record(run_id, run.recorded, content)
            step.entries.append(record)
            step.happened.append((run, fact, record))
        if run.wants_checkpoint():
            run.checkpoint = run.recorded
            snapshot = to_message(take_snapshot(run.state, self._to_wall())).SerializeToString()
            step.entries.append(Checkpoint(run_id, run.recorded, snapshot, max(1, run.history.oldest)))

    def _forget(self, step: _Step, run_id: str, run: HostedRun) -> None:
        tombstone = to_message(take_tombstone(run.state)).SerializeToString()
        step.entries.append(Forgotten(run_id, run.state.revision, tombstone))
        step.forgotten.append(run_id)

    def _publish(self, step: _Step, now: float) -> None:
        """Tell what has become durable."""
        told: dict[str, HostedRun] = {}
        for run, fact, record in step.happened:
            run.history.add(record)
            log_fact(run.state.run_id, fact, len(run.state.nodes))
            if isinstance(fact, _TOLD_TO_NODES):
                told[run.state.run_id] = run
            if isinstance(fact, facts.RoundEnded):
                self._on_round_end(run.state.run_id, fact.end.round + 1)
            if isinstance(fact, (facts.NodeLost, facts.NodeLeft, facts.NodeEvicted)):
                run.end_stale_member(fact)
        self._histories.keep_within()
        told |= {run_id: run for run_id, run in step.changed.items() if run.begins_to_settle()}
        for run in told.values():
            run.tell_members()
        for run in step.changed.values():
            run.keep_writable_round()  # until the next step, the state is what is durable
            run.tell_watchers(now)
        for run_id in step.forgotten:
            del step.changed[run_id]
            self._drop(run_id)

    def _drop(self, run_id: str) -> None:
        run = self._runs.pop(run_id)
        self._expired[run_id] = Numbers(run.state.revision, run.state.round)
        self._schedule.put(run_id, None)
        run.history.clear()
        for slot in run.slots():
            slot.end(RunNotFound(run_id))
        _log.info("run expired", run_id=run_id)
        self._on_expiry(run_id)

    def _fail(self, requests: Sequence[_Request[Any]], error: Exception) -> None:
        for request in requests:
            request.fail(error)
        while self._requests:
            for request in self._requests.take():
                request.fail(error)
        self._end_streams(error)

    def drain(self, farewell: Exception) -> None:
        """Stop the clock of leases and deadlines, and end every stream with `farewell`."""
        # Not past the last look: a pause that nobody has noticed yet must not count against anybody.
        self._stopped_at = self._watch.read(min(self._clock(), self._looked + self._lag.pulse))
        self._end_streams(farewell)

    def _end_streams(self, error: Exception) -> None:
        for run in self._runs.values():
            for slot in run.slots():
                slot.end(error)

    def _run_for(self, run_id: str, command: commands.Command) -> HostedRun:
        if not isinstance(command, commands.Join):
            return self._run(run_id)
        run = self._runs.get(run_id) or self._new_run(run_id)
        most = self._limits.nodes_per_run
        if len(run.state.nodes) >= most and command.node_id not in run.state.nodes:
            raise LimitReached(
                "TOO_MANY_NODES", run_id, f"run {run_id!r} has as many nodes as it may, spares included", most
            )
        return run

    def _new_run(self, run_id: str) -> HostedRun:
        if len(self._runs) >= self._limits.runs:
            raise LimitReached(
                "TOO_MANY_RUNS", run_id, "the service has as many runs as it may", self._limits.runs
            )
        numbers = self._expired.get(run_id, Numbers())
        return HostedRun(
            RunState(run_id, revision=numbers.revision, round=numbers.round),
            self._histories.open(),
            recorded=numbers.revision,
            checkpoint=numbers.revision,
        )

    def _run(self, run_id: str) -> HostedRun:
        run = self._runs.get(run_id)
        if run is None:
            raise RunNotFound(run_id)
        return run

    async def _submit(
        self,
        read: Callable[[Sequence[facts.Fact]], _T],
        run_id: str = "",
        command: commands.Command | None = None,
        actor: str = SERVICE,
        undo: Callable[[_T], None] = lambda _: None,
    ) -> _T:
        """Have a command carried out, and get what `read` then returns; `undo` takes it if who asked has gone."""
        if self._broken is not None:
            raise self._broken
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._requests.put(run_id, _Request(answer, read, run_id, command, actor, undo, self._now()))
        self._wake.set()
        try:
            return await answer
        except asyncio.CancelledError:
            if not answer.cancelled() and answer.exception() is None:  # it came, and too late
                undo(answer.result())
            raise
