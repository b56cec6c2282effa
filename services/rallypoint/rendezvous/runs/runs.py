"""All runs of a journal: commands are carried out in steps, each committed first and published only then."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rallypoint.rendezvous.base.cooperative import LatestValue, Work
from rallypoint.rendezvous.base.entries import RunData
from rallypoint.rendezvous.base.errors import Refusal, RunBroken, of_unknown_outcome
from rallypoint.rendezvous.base.limits import KeptEvents, LimitReached, Quota, RendezvousLimits, SharedTotals
from rallypoint.rendezvous.core import apply, commands, facts
from rallypoint.rendezvous.core.apply import LEAST_TERM_AFTER_RESTART, LONG_PAUSE
from rallypoint.rendezvous.core.commands import SERVICE, Actor, Refused, RunNotFound
from rallypoint.rendezvous.core.decide import begin_to_confirm, carry_out, decide, settle
from rallypoint.rendezvous.core.failures import await_signs_of_life
from rallypoint.rendezvous.core.snapshot import (
    RunSnapshot,
    numbers_only,
    restore,
    take_high_water,
    take_reopened,
    take_snapshot,
    take_tombstone,
)
from rallypoint.rendezvous.core.state import Phase, RunState
from rallypoint.rendezvous.journal.codec import encode_record, encode_snapshot
from rallypoint.rendezvous.journal.commit_loop import CheckOwned, CommitLoop, PendingRequest, always_owned
from rallypoint.rendezvous.journal.journal import (
    MARK,
    Checkpoint,
    Dropped,
    Entry,
    Forgotten,
    HighWater,
    Journal,
    Record,
    Recovered,
)
from rallypoint.rendezvous.runs.history import Histories, log_fact
from rallypoint.rendezvous.runs.recovery import Numbers, recover_runs
from rallypoint.rendezvous.runs.run import HostedRun, LeaseClock
from rallypoint.rpc.clock import LagSettings
from rallypoint.rpc.logs import get_logger

# ---- One step of the runs of a journal: its requests and its changes.


_T = TypeVar("_T")


@dataclass(slots=True, eq=False, kw_only=True)
class RunRequest(PendingRequest[_T]):
    """A request: optionally a command, and a function that computes the reply from its facts once all is durable."""

    read: Callable[[Sequence[facts.Fact]], _T]
    command: commands.Command | None = None
    actor: Actor = SERVICE
    undo: Callable[[_T], None] = lambda _: None
    came_at: float
    happened: Sequence[facts.Fact] = ()
    refusal: Refused | None = None

    def publish(self) -> None:
        """Send the reply; if its receiver has gone meanwhile, undo it."""
        if self.command is None and self.reply.done():
            return  # it changed nothing; a node that no longer waits gives no sign of life
        try:
            if self.refusal is not None:
                raise self.refusal
            result = self.read(self.happened)
        except Exception as error:  # a refusal, or any other error: it concerns this request only
            self.fail(error)
        else:
            if self.reply.done():
                self.undo(result)
            else:
                self.reply.set_result(result)

    def abandon(self, refusal: Refusal) -> None:
        """Reply although a commit is still under way; a request without a command changes nothing."""
        refused = refusal(self.run_id)
        self.fail(refused if self.command is None else of_unknown_outcome(refused))


@dataclass(slots=True)
class RunStep:
    """The changes of one step: committed together, and published only then."""

    entries: list[Entry] = field(default_factory=list)
    changed: dict[str, HostedRun] = field(default_factory=dict)
    happened: list[tuple[HostedRun, facts.Fact, Record]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)


# ---- The times at which runs are looked at again.


class Schedule:
    """One deadline per run. Reading the next one costs the same however many runs there are."""

    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}
        # Entries whose deadline is no longer the run's are passed over when they come up.
        self._queue: list[tuple[float, str]] = []

    def put(self, run_id: str, deadline: float | None) -> None:
        """Set a run's deadline, replacing the one before; None: it has none."""
        if deadline is None:
            self._deadlines.pop(run_id, None)
        elif self._deadlines.get(run_id) != deadline:
            self._deadlines[run_id] = deadline
            heapq.heappush(self._queue, (deadline, run_id))
            self._prune()

    def next(self) -> float | None:
        """The earliest deadline; None: there is none."""
        while self._queue:
            deadline, run_id = self._queue[0]
            if self._deadlines.get(run_id) == deadline:
                return deadline
            heapq.heappop(self._queue)
        return None

    def due(self, now: float) -> list[str]:
        """Take off the runs whose deadlines have come, the earliest first."""
        due = []
        while (deadline := self.next()) is not None and deadline <= now:
            _, run_id = heapq.heappop(self._queue)
            del self._deadlines[run_id]
            due.append(run_id)
        return due

    def _prune(self) -> None:
        """Remove stale entries: deadlines that are moved more often than they come up must not pile up."""
        if len(self._queue) > 2 * len(self._deadlines) + 64:
            self._queue = [(deadline, run_id) for run_id, deadline in self._deadlines.items()]
            heapq.heapify(self._queue)


_log = get_logger(__name__)

# The facts on which every node must act. Others (another node joined or confirmed) are published to watchers only: a
# round that n nodes join is sent to each of them once, not n times.
_SENT_TO_NODES = (
    facts.RoundFrozen,
    facts.RoundFinalized,
    facts.RoundEnded,
    facts.ExitBarrierPassed,
    facts.RunClosed,
)
# The most requests of one run that one step carries out: some 10 ms of work. More in one commit hardly makes it
# cheaper, and delays the other runs longer.
_MOST_PER_STEP = 256


class DurableRuns(CommitLoop[RunRequest[Any]]):
    """Keeps all runs of one journal. Nothing that is sent, or read, is ahead of the journal.

    Attributes:
        data: The services that keep data of these runs, called in this order. Set before `serve`: they need the runs.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        draw: Callable[[int], bytes] = secrets.token_bytes,
        limits: RendezvousLimits | None = None,
        totals: SharedTotals | None = None,
        check_owned: CheckOwned = always_owned,
        lag: LagSettings | None = None,
        high_water: bool = False,
    ) -> None:
        """Set up; call `recovering`, then `serve`.

        Args:
            journal: Opened already; its content goes to `recovering`.
            clock: Monotonic seconds.
            wall_clock: Unix seconds, for the records that people read.
            draw: Returns so many random bytes, for the secrets of leases.
            limits: Limits of the service and of each run.
            totals: The counters that all shards of the service share; None: there is no other shard.
            check_owned: Raises NotOwner once the runs may be another process's.
            lag: How pauses of this process are noticed and forgiven.
            high_water: True if the journal's entries can expire: then it gets a `HighWater` with each step too.
        """
        super().__init__(journal, check_owned, _MOST_PER_STEP)
        self._high_water = high_water
        self._clock = clock
        self._lease_clock = LeaseClock(clock, lag or LagSettings(), self._forgiven)
        self._now = self._lease_clock.now
        self._wall_clock = wall_clock
        self._draw = draw
        self.data: Sequence[RunData] = ()
        self._limits = limits = limits or RendezvousLimits()
        totals = totals or SharedTotals()
        self._histories = Histories(
            limits.events_per_run, limits.event_bytes_per_run, limits.event_bytes, totals.events
        )
        self._run_count = Quota(totals.runs)
        self._runs_by_client = totals.runs_by_client
        self._runs: dict[str, HostedRun] = {}
        # The highest numbers of all forgotten runs. New runs continue from them: so no number is given out twice under
        # one name, and no name need be remembered.
        self._mark = Numbers()
        # Forgotten runs of which the journal still has entries.
        self._left: dict[str, None] = {}
        # Used restart budgets of runs whose other entries are gone from the journal: a new run of the name keeps them.
        self._budgets: dict[str, RunSnapshot] = {}
        # Runs that an unexpected error stopped, and its kind. Their state in memory can't be trusted any more.
        self._broken: dict[str, str] = {}
        self._schedule = Schedule()

    def recovering(self, recovered: Recovered, least_lease: float = LEAST_TERM_AFTER_RESTART) -> Work[None]:
        """Restore the runs of a journal, as cooperative work. Every lease and every deadline gets a full new term.

        It must be finished before any other call; if it is abandoned, only `release` may be called.
        Args:
            recovered: The content of the journal.
            least_lease: The least remaining time of a lease, seconds, even if its time to live is shorter.

        Raises:
            JournalError: A record is missing, or of a newer version.
        """
        began, now = self._clock(), self._now()
        # Counted apart, so that a recovery that fails drops no events of other shards.
        apart = KeptEvents()
        found = yield from recover_runs(
            recovered, lambda: self._histories.open(apart), now, self._to_wall(), least_lease
        )
        self._runs, self._mark, self._left = found.runs, found.mark, dict.fromkeys(found.left)
        self._budgets = found.budgets
        for run_id, error in found.broken.items():
            self._note_broken(run_id, error)
        yield from self._histories.make_room(apart)
        # The nodes could not send heartbeats meanwhile.
        self._lease_clock.leave_out(since=began)
        now = self._now()
        self._run_count.add(len(self._runs) + len(self._broken))
        for run_id, run in self._runs.items():
            self._histories.take_in(run.history)
            # Overdue consequences happen as soon as `serve` runs.
            self._schedule.put(run_id, now)
            yield
        self._wake.set()
        if self._runs:
            # Debug after a takeover: a replica takes over dozens of shards at a time, and logs one line for all.
            log = _log.info if least_lease <= LEAST_TERM_AFTER_RESTART else _log.debug
            log("recovered", runs=len(self._runs), records=len(recovered.records))

    async def serve(self, *, until_idle: bool = False) -> None:
        """Carry out commands and deadlines until retired or cancelled. Raises as `CommitLoop.serve`."""
        try:
            await super().serve(until_idle=until_idle)
        finally:
            self._lease_clock.watch(wanted=False)

    def has_work(self) -> bool:
        """Return True if entries of forgotten runs are left to drop."""
        return bool(self._left)

    def timeout(self) -> float | None:
        """Return the seconds until a deadline of a run; None: there is none."""
        deadline = self._schedule.next()
        self._lease_clock.watch(wanted=deadline is not None)
        return self._lease_clock.timeout(deadline)

    def error_after(self, error: Exception) -> Callable[[str], Exception]:
        """Return the error itself for every run: its callers know the errors of journals."""
        return lambda _: error.with_traceback(None)

    def _forgiven(self, seconds: float, now: float) -> None:
        """Handle a pause of the process: streams may have broken, and nodes need time to come back."""
        _log.warning("paused", forgiven=round(seconds, 3))
        if seconds >= LONG_PAUSE:
            for run in self._runs.values():
                run.state.woke_at = now

    def _now_in(self, run: HostedRun) -> float:
        """Return the time, and note in the run how far it is behind the clock that forgives no pauses."""
        now = self._now()
        run.state.forgiven = self._clock() - now
        return now

    def _to_wall(self) -> float:
        """Return the offset from times of the lease clock to wall-clock times, seconds."""
        return self._wall_clock() - self._now()

    def commit(self, requests: Iterator[RunRequest[Any]]) -> Iterator[Sequence[Entry]]:
        """Carry out commands and deadlines that are due. See `CommitLoop`."""
        self._lease_clock.watch(wanted=True)
        batch, now, step = [*requests], self._now(), RunStep()
        for request in batch:
            if request.command is not None:
                self._carry_out(step, request, request.command, now)
        for run_id in self._schedule.due(now):
            self._take_up(step, run_id, self._runs[run_id], now)
        for run_id, run in [*step.changed.items()]:
            with self._only_this(step, run_id):
                self._note(step, run, settle(run.state, now), SERVICE)
                if run.expires(self._limits.run_ttl) <= now:
                    self._forget(step, run_id, run)
        self._drop_left(step)
        if self._high_water:
            self._raise_high_water(step)
        yield step.entries
        self._publish(step, now)
        for request in batch:
            request.publish()
        for run_id, run in [*step.changed.items()]:
            with self._only_this(step, run_id):
                self._schedule.put(run_id, run.next_deadline(self._limits.run_ttl))

    @contextlib.contextmanager
    def _only_this(self, step: RunStep, run_id: str) -> Iterator[None]:
        """Stop only this run on an unexpected error, and let the step go on.

        The entries that the block added to the step are removed, for they may be incomplete. Those added before are
        complete: they are committed, and another process continues from them.
        """
        entries, happened, forgotten = len(step.entries), len(step.happened), len(step.forgotten)
        try:
            yield
        except Refused:
            raise
        except Exception as error:
            del step.entries[entries:], step.happened[happened:], step.forgotten[forgotten:]
            step.changed.pop(run_id, None)
            self._stop(run_id, error)

    def _stop(self, run_id: str, error: Exception) -> None:
        """End the streams of a run. It is neither changed nor read any more, but still counts in the run limit."""
        self._note_broken(run_id, error)
        self._schedule.put(run_id, None)
        if (run := self._runs.pop(run_id, None)) is not None:
            run.history.clear()
            for slot in run.slots():
                slot.cut(RunBroken(run_id, self._broken[run_id]))
            for each in self.data:
                each.stop_run(RunBroken(run_id, self._broken[run_id]))

    def _note_broken(self, run_id: str, error: Exception) -> None:
        self._broken[run_id] = type(error).__name__
        _log.exception(
            "run stopped by an unexpected error; nothing of it was deleted", error=error, run_id=run_id
        )

    def _take_up(self, step: RunStep, run_id: str, run: HostedRun, now: float) -> None:
        """Add a run to those that the step changes."""
        if run_id not in step.changed:
            step.changed[run_id] = run
            run.state.forgiven = self._clock() - now
            # During a long commit nodes wait on open streams for their reply: these are alive.
            for node_id, lease in run.returning:
                if run.holds_lease(node_id, lease):
                    apply.renew(run.state, node_id, now)

    def _carry_out(
        self, step: RunStep, request: RunRequest[Any], command: commands.Command, now: float
    ) -> None:
        try:
            run = self._run_for(request.run_id, command)
            if isinstance(command, commands.ReportFailure):
                # It may have waited for a commit; the order of failures must not depend on the disk.
                command = command.aged(self._clock() - request.came_at)
            run.state.forgiven = self._clock() - now
            with self._only_this(step, request.run_id):
                if isinstance(command, commands.Join) and run.state.phase is Phase.CLOSED:
                    self._begin_again(step, run, command, now)
                direct = carry_out(run.state, command, now)
                self._mark_deleted(run, command, request.actor)
                if request.run_id not in self._runs:
                    self._run_count.add(1)
                    self._runs_by_client.add(run.client, 1)
                    self._begin(step, run.state)
                self._runs[request.run_id] = run
                self._take_up(step, request.run_id, run, now)
                self._note(step, run, direct, request.actor)
                consequences = settle(run.state, now)
                self._note(step, run, consequences, SERVICE)
                request.happened = [*direct, *consequences]
            self._check_whole(request.run_id)
        except Refused as refusal:
            request.refusal = refusal

    def _mark_deleted(self, run: HostedRun, command: commands.Command, actor: Actor) -> None:
        """Have the run forgotten with this step if the command deletes it, and not if a node joins after that."""
        if isinstance(command, commands.Forget):
            run.deleted_by = str(actor)
        elif run.state.nodes:
            run.deleted_by = ""

    def _note(self, step: RunStep, run: HostedRun, happened: Sequence[facts.Fact], actor: Actor) -> None:
        """Add applied facts to the step, and a checkpoint when one is due."""
        if not happened:
            return
        wall_time = self._wall_clock()
        run_id = run.state.run_id
        for fact in happened:
            run.recorded += 1
            content = encode_record(run_id, run.recorded, fact, wall_time, actor)
            record = Record(run_id, run.recorded, content)
            step.entries.append(record)
            step.happened.append((run, fact, record))
        if run.wants_checkpoint():
            run.checkpoint = run.recorded
            snapshot = encode_snapshot(take_snapshot(run.state, self._to_wall()))
            step.entries.append(Checkpoint(run_id, run.recorded, snapshot, max(1, run.history.oldest)))

    def _begin(self, step: RunStep, state: RunState) -> None:
        """Write the numbers from which a new run continues, if they are not zero."""
        run_id, revision = state.run_id, self._mark.revision
        self._left.pop(run_id, None)  # the new run replaces the old entries of its name
        if self._mark != Numbers():
            # Not a `Forgotten`: that would also drop a fenced state of this name, which may exist without a run.
            content = encode_snapshot(self._beginning(run_id))
            step.entries.append(Checkpoint(run_id, revision, content, revision + 1))
            self._budgets.pop(run_id, None)

    def _begin_again(self, step: RunStep, run: HostedRun, command: commands.Join, now: float) -> None:
        """Write the snapshot with which a closed run is reopened; its records stay, for people.

        Raises:
            Refused: The run is not reopened, or not yet.
        """
        run_id = run.state.run_id
        decide(run.state, command, now)
        # A closed run takes no writes, so an empty store stays empty. A journal drops the entries of a run only with
        # its records, which are kept here; so the reopening follows their deletion, in a later commit.
        if not all(each.is_empty(run_id) for each in self.data):
            raise commands.RunIsEnding(run_id, ())
        run.checkpoint = run.recorded
        content = encode_snapshot(take_reopened(run.state))
        step.entries.append(Checkpoint(run_id, run.recorded, content, max(1, run.history.oldest)))

    def _beginning(self, run_id: str) -> RunSnapshot:
        """Return the snapshot with which a new run begins."""
        left = self._budgets.get(run_id) or numbers_only(run_id, 0, 0)
        return replace(left, revision=self._mark.revision, round=self._mark.round)

    def _raise_high_water(self, step: RunStep) -> None:
        """Add each changed run's high-water mark to the commit: nothing may be published that it does not cover."""
        for run_id, run in {run.state.run_id: run for run, _, _ in step.happened}.items():
            with self._only_this(step, run_id):
                # The state of a run that was just stopped may be ahead of its records.
                mark = replace(take_high_water(run.state, self._to_wall()), revision=run.recorded)
                step.entries.append(HighWater(run_id, run.recorded, encode_snapshot(mark)))

    def _forget(self, step: RunStep, run_id: str, run: HostedRun) -> None:
        self._mark = self._mark.with_those(run.state)
        tombstone = encode_snapshot(take_tombstone(run.state))
        step.entries += [
            Forgotten(run_id, run.state.revision, tombstone),
            Dropped(run_id),
            _numbers(MARK, self._mark),
        ]
        step.forgotten.append(run_id)

    def _drop_left(self, step: RunStep) -> None:
        """Drop, a part per step, the entries that older versions kept of forgotten runs."""
        if not self._left:
            return
        step.entries.append(_numbers(MARK, self._mark))
        while self._left and len(step.entries) < _MOST_PER_STEP:
            step.entries.append(Dropped(self._left.popitem()[0]))

    def _publish(self, step: RunStep, now: float) -> None:
        """Publish the step, which is durable now."""
        due: set[str] = set()
        for run, fact, record in [*step.happened]:
            run_id = run.state.run_id
            if run_id not in step.changed:
                continue  # an unexpected error has stopped it
            with self._only_this(step, run_id):
                run.history.add(record)
                log_fact(run_id, fact, len(run.state.nodes))
                corrects_count = isinstance(fact, facts.NodeLost) and fact.failed_round
                if isinstance(fact, _SENT_TO_NODES) or corrects_count:
                    due.add(run_id)
                self._follow_up(run, fact)
        self._histories.keep_within()
        for run_id, run in [*step.changed.items()]:
            with self._only_this(step, run_id):
                if run.begins_to_settle():
                    await_signs_of_life(run.state)
                    due.add(run_id)
                if run_id in due:
                    run.publish_to_members()
                run.end_gone()
                run.keep_writable_round()  # until the next step, the state equals the journal
                run.publish_to_watchers(now)
        for run_id in [*step.forgotten]:
            if step.changed.pop(run_id, None) is not None:
                with self._only_this(step, run_id):
                    self._drop(run_id)

    def _follow_up(self, run: HostedRun, fact: facts.Fact) -> None:
        """Carry out the effects of a fact that is durable now."""
        match fact:
            case facts.RunCreated():
                run.end_streams_of_gone()
            case facts.RoundFrozen():
                begin_to_confirm(run.state, self._now())
            case facts.RoundEnded():
                for each in self.data:
                    each.forget_rounds_before(run.state.run_id, fact.end.round + 1)
            case facts.NodeLost() | facts.NodeLeft() | facts.NodeEvicted():
                run.end_stale_member(fact)

    def _drop(self, run_id: str) -> None:
        run = self._runs.pop(run_id)
        self._run_count.add(-1)
        self._runs_by_client.add(run.client, -1)
        self._schedule.put(run_id, None)
        run.history.clear()
        for slot in run.slots():
            slot.end(RunNotFound(run_id))
        if run.deleted_by:
            _log.info("run deleted", run_id=run_id, by=run.deleted_by)
        else:
            _log.info("run expired", run_id=run_id)
        for each in self.data:
            each.forget_run(run_id)

    def streams(self) -> Iterator[tuple[str, LatestValue[Any]]]:
        """Return all streams, each with the name of its run."""
        return ((run_id, slot) for run_id, run in self._runs.items() for slot in run.slots())

    def release(self) -> None:
        """Stop counting in the totals of the service. The runs can still be read."""
        self._run_count.release()
        for run in self._runs.values():
            self._runs_by_client.add(run.client, -1)
            run.client = ""
            run.history.leave_count()

    def drain(self, ending: Exception) -> None:
        """Stop the clock of leases and deadlines, and end every stream with `ending`.

        No lease ends from here on: while a commit took long, heartbeats were not read, and a stream that the server
        ends is no disconnect of its node.
        """
        self._lease_clock.stop()
        for run in self._runs.values():
            apply.suspend_leases(run.state)
        self.end_streams(lambda _: ending)

    def check_streams(self, run_id: str) -> None:
        """Check that the streams of a run go on.

        Raises:
            Exception: The error with which they were ended.
        """
        if self._streams_over is not None:
            raise self._streams_over(run_id)

    def _run_for(self, run_id: str, command: commands.Command) -> HostedRun:
        self._check_whole(run_id)
        if not isinstance(command, commands.Join):
            return self._run(run_id)
        run = self._runs.get(run_id) or self._new_run(run_id, command.client)
        most = self._limits.nodes_per_run
        if len(run.state.nodes) + len(run.waiting) >= most and command.node_id not in run.state.nodes:
            detail = f"run {run_id!r} is at its limit of nodes, spares included"
            raise LimitReached("TOO_MANY_NODES", run_id, detail, "raise --max-nodes-per-run", most)
        return run

    def _new_run(self, run_id: str, client: str) -> HostedRun:
        most, of_client = self._limits.runs, self._limits.runs_per_client
        remedy = "wait until runs that are over expire, delete some (`rallypoint delete`), or raise"
        if self._runs_by_client.used(client) >= of_client:
            detail = f"client {client!r} is at its limit of runs"
            raise LimitReached("TOO_MANY_RUNS", run_id, detail, f"{remedy} --max-runs-per-client", of_client)
        if self._run_count.together >= most:
            detail = "the service is at its limit of runs"
            raise LimitReached("TOO_MANY_RUNS", run_id, detail, f"{remedy} --max-runs", most)
        numbers = self._mark
        return HostedRun(
            restore(self._beginning(run_id), self._now(), self._to_wall()),
            self._histories.open(),
            recorded=numbers.revision,
            checkpoint=numbers.revision,
            client=client,
        )

    def _readable(self, run_id: str) -> HostedRun:
        """Return a run for a read outside a step.

        Raises:
            RunNotFound: There is no such run.
            NotOwner: Another process may own it by now.
        """
        self._check_open(run_id)
        return self._run(run_id)

    def _run(self, run_id: str) -> HostedRun:
        self._check_whole(run_id)
        run = self._runs.get(run_id)
        if run is None:
            raise RunNotFound(run_id)
        return run

    def _check_whole(self, run_id: str) -> None:
        """Check that no unexpected error has stopped a run.

        Raises:
            RunBroken: An error has stopped it.
        """
        if (cause := self._broken.get(run_id)) is not None:
            raise RunBroken(run_id, cause)

    async def _submit(
        self,
        read: Callable[[Sequence[facts.Fact]], _T],
        run_id: str = "",
        command: commands.Command | None = None,
        actor: Actor = SERVICE,
        undo: Callable[[_T], None] = lambda _: None,
    ) -> _T:
        """Queue a request and wait for the result of `read`; if the caller is cancelled too late, `undo` gets it."""
        request = RunRequest(
            run_id=run_id, read=read, command=command, actor=actor, undo=undo, came_at=self._clock()
        )
        self._put(request)
        try:
            return await request.reply
        except asyncio.CancelledError:
            if not request.reply.cancelled() and request.reply.exception() is None:  # cancelled too late
                undo(request.reply.result())
            raise


def _numbers(run_id: str, numbers: Numbers) -> Forgotten:
    """Return the entry that keeps only these numbers of a run, or of the mark."""
    content = encode_snapshot(numbers_only(run_id, numbers.revision, numbers.round))
    return Forgotten(run_id, numbers.revision, content)
