"""All runs of a journal: commands are carried out in steps, each made durable, and told of only then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rallypoint.rendezvous.codec import encode_record, to_message
from rallypoint.rendezvous.core import commands, facts
from rallypoint.rendezvous.core.execute import carry_out, settle
from rallypoint.rendezvous.core.leases import LEAST_TERM_AFTER_RESTART
from rallypoint.rendezvous.core.refusals import Refused, RunNotFound
from rallypoint.rendezvous.core.snapshot import take_snapshot, take_tombstone
from rallypoint.rendezvous.core.state import RunState
from rallypoint.rendezvous.errors import Draining, NotOwner, Refusal
from rallypoint.rendezvous.fact_log import log_fact
from rallypoint.rendezvous.gradual import Work, finish
from rallypoint.rendezvous.guard import CheckOwned, always_owned
from rallypoint.rendezvous.history import Histories, KeptEvents
from rallypoint.rendezvous.hosted_run import HostedRun
from rallypoint.rendezvous.journal.journal import (
    Checkpoint,
    Forgotten,
    Journal,
    OwnershipLost,
    Record,
    Recovered,
)
from rallypoint.rendezvous.lease_clock import LeaseClock
from rallypoint.rendezvous.limits import LimitReached, RendezvousLimits
from rallypoint.rendezvous.recovery import Numbers, recover_runs
from rallypoint.rendezvous.schedule import Schedule
from rallypoint.rendezvous.shares import Share, Totals
from rallypoint.rendezvous.step import SERVICE, Request, Step
from rallypoint.rendezvous.turns import Turns
from rallypoint.serving.lag import LagSettings
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
        totals: Totals | None = None,
        check_owned: CheckOwned = always_owned,
        lag: LagSettings | None = None,
    ) -> None:
        """Set up; `recover` or `recovering`, and `serve`, make it work.

        Args:
            journal: Opened already; what it held goes to `recover`.
            clock: Monotonic seconds.
            wall_clock: Unix seconds, for the records that people read.
            on_round_end: Called with (run_id, number of the next round) once the end of a round is durable.
            on_expiry: Called with the run_id once it is durable that a run is forgotten.
            limits: What the service, and each run, may use.
            totals: What all shards of the service count in; None: there is no other.
            check_owned: Raises NotOwner once the runs may be another process's.
            lag: How pauses of this process are noticed and forgiven.
        """
        self._journal = journal
        self._lease_clock = LeaseClock(clock, lag or LagSettings())
        self._now = self._lease_clock.now
        self._wall_clock = wall_clock
        self._on_round_end = on_round_end
        self._on_expiry = on_expiry
        self._limits = limits = limits or RendezvousLimits()
        totals = totals or Totals()
        self._histories = Histories(
            limits.events_per_run, limits.event_bytes_per_run, limits.event_bytes, totals.events
        )
        self._run_count = Share(totals.runs)
        self._check_owned = check_owned
        self._runs: dict[str, HostedRun] = {}
        # Runs that expired: their numbers go on if they come again.
        self._expired: dict[str, Numbers] = {}
        self._schedule = Schedule()
        self._requests: Turns[Request[Any]] = Turns(_MOST_PER_STEP)
        self._under_way: Sequence[Request[Any]] = ()
        self._wake = asyncio.Event()
        self._retired = False
        # What is told to whoever asks for something, and to whoever reads on in a stream, once that is over.
        self._closed: Callable[[str], Exception] | None = None
        self._streams_over: Callable[[str], Exception] | None = None

    def recover(self, recovered: Recovered, least_lease: float = LEAST_TERM_AFTER_RESTART) -> None:
        """As `recovering`, at once: it holds the event loop for some 30 us per record."""
        finish(self.recovering(recovered, least_lease))

    def recovering(self, recovered: Recovered, least_lease: float = LEAST_TERM_AFTER_RESTART) -> Work[None]:
        """Take over what the journal held, gradually. Every lease and every deadline gets a full new term.

        To be finished before anything else is asked of the service; if it is not, there is only `release`.

        Args:
            recovered: What the journal held.
            least_lease: How long a lease lives at least, seconds, however short its term.

        Raises:
            JournalError: A record is missing, or of a newer version.
        """
        self._lease_clock.look(waited=False)
        now = self._now()
        # Apart, so that a recovery that fails shortens nobody's history.
        apart = KeptEvents()
        self._runs, self._expired = yield from recover_runs(
            recovered, lambda: self._histories.open(apart), now, self._to_wall(), least_lease
        )
        yield from self._histories.make_room(apart)
        # Nodes could not show meanwhile that they are alive.
        self._lease_clock.look(waited=True)
        now = self._now()
        self._run_count.add(len(self._runs))
        for run_id, run in self._runs.items():
            self._histories.take_in(run.history)
            # What must happen by now, happens as soon as the engine is served.
            self._schedule.put(run_id, now)
            yield
        self._wake.set()
        if self._runs:
            # A replica takes over dozens of shards at a time, and tells of them together.
            say = _log.info if least_lease <= LEAST_TERM_AFTER_RESTART else _log.debug
            say("recovered", runs=len(self._runs), records=len(recovered.records))

    async def serve(self) -> None:
        """Carry out commands and deadlines until retired or cancelled.

        Raises:
            JournalError: The journal is broken: what is served must be built anew from what is durable.
        """
        try:
            while True:
                await self._wait_for_work()
                if self._retired:
                    return
                self._under_way = self._requests.take()
                await self._step(self._under_way)
                self._under_way = ()
                if self._requests:
                    self._wake.set()
                    await asyncio.sleep(0)  # who was answered goes on first
        except BaseException as error:
            # Whatever it is: nobody may wait for an answer that can't come any more.
            self._break(error)
            raise

    async def _wait_for_work(self) -> None:
        deadline = self._schedule.next()
        timeout = self._lease_clock.patience(deadline)
        if not self._wake.is_set():
            with contextlib.suppress(TimeoutError):  # a deadline of the core is due
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
        self._wake.clear()
        if paused := self._lease_clock.look(waited=deadline is not None):
            _log.warning("paused", forgiven=round(paused, 3))

    def _to_wall(self) -> float:
        """What makes a time of the wall clock out of one by which leases are judged, when added."""
        return self._wall_clock() - self._now()

    async def _step(self, requests: Sequence[Request[Any]]) -> None:
        now = self._now()
        step = Step()
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
        else:
            try:
                self._check_owned("")
            except NotOwner:
                for request in requests:
                    request.fail(NotOwner(request.run_id))
                return  # nor are deadlines looked at again: what is not ours now, is never again
        self._publish(step, now)
        for request in requests:
            request.settle()
        for run_id, run in step.changed.items():
            self._schedule.put(run_id, run.next_deadline(self._limits.run_ttl))

    def _carry_out(self, step: Step, request: Request[Any], command: commands.Command, now: float) -> None:
        try:
            run = self._run_for(request.run_id, command)
            if isinstance(command, commands.ReportFailure):
                # It may have waited for a commit, and which failure was the first must not depend on the disk.
                command = command.aged(now - request.came_at)
            stated = carry_out(run.state, command, now)
            self._run_count.add(request.run_id not in self._runs)
            self._runs[request.run_id] = step.changed[request.run_id] = run
            self._note(step, run, stated, request.actor)
            consequences = settle(run.state, now)
            self._note(step, run, consequences, SERVICE)
            request.happened = [*stated, *consequences]
        except Refused as refusal:
            request.refusal = refusal

    def _note(self, step: Step, run: HostedRun, happened: Sequence[facts.Fact], actor: str) -> None:
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

    def _forget(self, step: Step, run_id: str, run: HostedRun) -> None:
        tombstone = to_message(take_tombstone(run.state)).SerializeToString()
        step.entries.append(Forgotten(run_id, run.state.revision, tombstone))
        step.forgotten.append(run_id)

    def _publish(self, step: Step, now: float) -> None:
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
        self._run_count.add(-1)
        self._expired[run_id] = Numbers(run.state.revision, run.state.round)
        self._schedule.put(run_id, None)
        run.history.clear()
        for slot in run.slots():
            slot.end(RunNotFound(run_id))
        _log.info("run expired", run_id=run_id)
        self._on_expiry(run_id)

    def _break(self, error: BaseException) -> None:
        if isinstance(error, OwnershipLost):
            self.halt(NotOwner)
        ending = error if isinstance(error, Exception) else Draining()
        # Also if it is retired: what was under way may be durable, and must not be told that nothing was done.
        for request in self._under_way:
            request.fail(ending)
        if self._closed is None:
            self._closed = lambda _: ending.with_traceback(None)
            self._refuse_waiting(self._closed)
            self.end_streams(self._closed)

    def _refuse_waiting(self, refusal: Callable[[str], Exception]) -> None:
        while self._requests:
            for request in self._requests.take():
                request.fail(refusal(request.run_id))

    def retire(self, refusal: Refusal) -> None:
        """Refuse what waits and what comes; `serve` returns once the step under way is done. Streams stay open."""
        self._closed = refusal
        self._retired = True
        self._refuse_waiting(refusal)
        self._wake.set()

    def halt(self, refusal: Refusal) -> None:
        """End everything at once; nothing is told any more. Whoever calls it cancels `serve`."""
        self._closed = self._streams_over = refusal
        self._refuse_waiting(refusal)
        for request in self._under_way:
            request.abandon(refusal)
        for run_id, run in self._runs.items():
            for slot in run.slots():
                slot.cut(refusal(run_id))

    def release(self) -> None:
        """Give back what was counted in the totals of the service. What there is can still be read."""
        self._run_count.release()
        for run in self._runs.values():
            run.history.leave_count()

    def drain(self, farewell: Exception) -> None:
        """Stop the clock of leases and deadlines, and end every stream with `farewell`."""
        self._lease_clock.stop()
        self.end_streams(lambda _: farewell)

    def end_streams(self, refusal: Callable[[str], Exception]) -> None:
        """End every stream, each with a refusal, after what waits to be told on it."""
        self._streams_over = refusal
        for run_id, run in self._runs.items():
            for slot in run.slots():
                slot.end(refusal(run_id))

    def check_streams(self, run_id: str) -> None:
        """Check that streams of a run still go on.

        Raises:
            Exception: What they were ended with.
        """
        if self._streams_over is not None:
            raise self._streams_over(run_id)

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
        if self._run_count.together >= self._limits.runs:
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

    def _readable(self, run_id: str) -> HostedRun:
        """A run that is read at once, and not in a step.

        Raises:
            RunNotFound: There is no such run.
            NotOwner: It may be another process's by now.
        """
        if self._closed is not None:
            raise self._closed(run_id)
        self._check_owned(run_id)
        return self._run(run_id)

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
        if self._closed is not None:
            raise self._closed(run_id)
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._requests.put(run_id, Request(answer, read, run_id, command, actor, undo, self._now()))
        self._wake.set()
        try:
            return await answer
        except asyncio.CancelledError:
            if not answer.cancelled() and answer.exception() is None:  # it came, and too late
                undo(answer.result())
            raise
