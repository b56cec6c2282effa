"""The shell around the core: keeps the runs, makes every change durable, and only then tells of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from rallypoint.rendezvous.codec import decode_record, encode_record
from rallypoint.rendezvous.core import commands, facts, leases
from rallypoint.rendezvous.core.apply import apply
from rallypoint.rendezvous.core.decide import check_lease, check_revision
from rallypoint.rendezvous.core.execute import execute, next_deadline, settle
from rallypoint.rendezvous.core.refusals import Refused, RunNotFound
from rallypoint.rendezvous.core.state import Phase, RunState
from rallypoint.rendezvous.errors import Draining
from rallypoint.rendezvous.fact_log import log_fact
from rallypoint.rendezvous.hosted_run import HostedRun, Member
from rallypoint.rendezvous.journal.journal import Journal, JournalError
from rallypoint.rendezvous.slot import Slot
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1.journal_pb2 import JournalRecord
from rallypoint.rendezvous.views import node_update, run_message, run_summary
from rallypoint.serving.lag import LagSettings, WatchClock
from rallypoint.serving.logs import get_logger

_T = TypeVar("_T")
_log = get_logger(__name__)

# What every node must act on. Others (who else joined, who confirmed) are for watchers only: a round that n
# nodes join is told to each of them once, not n times.
_TOLD_TO_NODES = (facts.RoundFrozen, facts.RoundFinalized, facts.RoundEnded, facts.RunClosed)


@dataclass(slots=True)
class _Request(Generic[_T]):
    """A command, if any, and what is then read: with the facts that came of it, once all there is is durable."""

    answer: asyncio.Future[_T]
    read: Callable[[Sequence[facts.Fact]], _T]
    run_id: str = ""
    command: commands.Command | None = None
    happened: Sequence[facts.Fact] = ()
    refusal: Refused | None = None

    def settle(self) -> None:
        try:
            if self.refusal is not None:
                raise self.refusal
            self.answer.set_result(self.read(self.happened))
        except Refused as refusal:
            self.answer.set_exception(refusal)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


def _undo(undo: Callable[[_T], None], answer: asyncio.Future[_T]) -> None:
    if answer.exception() is None:
        undo(answer.result())


def _writable_round(state: RunState) -> int:
    ended = state.last_round_end is not None and state.last_round_end.round == state.round
    return state.round + 1 if ended else state.round


class RendezvousEngine:
    """Serves all runs of one journal.

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
        lag: LagSettings | None = None,
    ) -> None:
        """Set up; `recover` and `serve` make it work.

        Args:
            journal: Opened already; its records go to `recover`.
            clock: Monotonic seconds.
            wall_clock: Unix seconds, for the records that people read.
            on_round_end: Called with (run_id, number of the next round) once the end of a round is durable.
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
        self._runs: dict[str, HostedRun] = {}
        self._requests: list[_Request[Any]] = []
        self._wake = asyncio.Event()
        self._broken: Exception | None = None

    def recover(self, records: Sequence[JournalRecord]) -> None:
        """Fold what the journal held. Every lease and every deadline gets a full new term.

        Raises:
            JournalError: A record is missing, or of a newer version.
        """
        now = self._now()
        for record in records:
            run = self._runs.setdefault(record.run_id, HostedRun(RunState(record.run_id)))
            try:
                apply(run.state, decode_record(record), now)
            except ValueError as error:
                raise JournalError(f"the journal can't be read by this version: {error}") from error
            if run.state.revision != record.revision:
                raise JournalError(
                    f"the journal is damaged: run {record.run_id!r} has no record {run.state.revision}; restore it "
                    "from a backup, or start without it"
                )
        for run in self._runs.values():
            run.recorded = run.state.revision
            run.writable_round = _writable_round(run.state)
            leases.restart_leases(run.state, now)
        self._wake.set()  # what must happen by now, happens as soon as the engine is served
        if self._runs:
            _log.info("recovered", runs=len(self._runs), records=len(records))

    async def serve(self) -> None:
        """Carry out commands and deadlines until cancelled.

        Raises:
            JournalError: The journal is broken: the process must end, and start again from what is durable.
        """
        requests: list[_Request[Any]] = []
        try:
            while True:
                await self._wait_for_work()
                requests, self._requests = self._requests, []
                await self._step(requests)
        except BaseException as error:
            # Whatever it is: nobody may wait for an answer that can't come any more.
            self._broken = error if isinstance(error, Exception) else Draining()
            self._fail(requests, self._broken)
            raise

    async def _wait_for_work(self) -> None:
        deadlines = (next_deadline(run.state) for run in self._runs.values())
        deadline = min((deadline for deadline in deadlines if deadline is not None), default=None)
        timeout = None
        if deadline is not None and self._stopped_at is None:
            # However far the deadline: only who looks often can tell that it was paused in between.
            timeout = min(max(0.0, deadline - self._now()), self._lag.pulse)
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

    async def _step(self, requests: Sequence[_Request[Any]]) -> None:
        now = self._now()
        changes: list[tuple[HostedRun, Sequence[facts.Fact]]] = []
        for request in requests:
            if request.command is None:
                continue
            try:
                run = self._run_for(request.run_id, request.command)
                request.happened = execute(run.state, request.command, now)
                changes.append((run, request.happened))
            except Refused as refusal:
                request.refusal = refusal
        changes.extend((run, settle(run.state, now)) for run in self._runs.values())
        if records := self._records(changes):
            await self._journal.append(records)
        self._publish(changes)
        for request in requests:
            request.settle()

    def _records(self, changes: Sequence[tuple[HostedRun, Sequence[facts.Fact]]]) -> list[JournalRecord]:
        wall_time = self._wall_clock()
        records = []
        for run, happened in changes:
            for fact in happened:
                run.recorded += 1
                records.append(encode_record(run.state.run_id, run.recorded, fact, wall_time))
        return records

    def _publish(self, changes: Sequence[tuple[HostedRun, Sequence[facts.Fact]]]) -> None:
        """Tell what has become durable."""
        changed: dict[int, tuple[HostedRun, bool]] = {}
        for run, happened in changes:
            if not happened:
                continue
            _, tell_nodes = changed.get(id(run), (run, False))
            tell_nodes = tell_nodes or any(isinstance(fact, _TOLD_TO_NODES) for fact in happened)
            changed[id(run)] = run, tell_nodes
            run.writable_round = _writable_round(
                run.state
            )  # until the next step, the state is what is durable
            for fact in happened:
                self._note(run, fact)
        for run, tell_nodes in changed.values():
            if tell_nodes:
                run.tell_members()
            run.tell_watchers()

    def _note(self, run: HostedRun, fact: facts.Fact) -> None:
        log_fact(run.state.run_id, fact)
        if isinstance(fact, facts.RoundEnded):
            self._on_round_end(run.state.run_id, fact.end.round + 1)
        if isinstance(fact, (facts.NodeLost, facts.NodeLeft)):
            run.end_stale_member(fact)

    def _fail(self, requests: Sequence[_Request[Any]], error: Exception) -> None:
        for request in [*requests, *self._requests]:
            request.fail(error)
        self._end_streams(error)

    def drain(self, farewell: Exception) -> None:
        """Stop the clock of leases and deadlines, and end every stream with `farewell`."""
        self._stopped_at = self._now()
        self._end_streams(farewell)

    def _end_streams(self, error: Exception) -> None:
        for run in self._runs.values():
            for slot in run.slots():
                slot.end(error)

    def _run_for(self, run_id: str, command: commands.Command) -> HostedRun:
        if isinstance(command, commands.Join):
            return self._runs.setdefault(run_id, HostedRun(RunState(run_id)))
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
        undo: Callable[[_T], None] = lambda _: None,
    ) -> _T:
        """Have a command carried out, and get what `read` then returns; `undo` takes it if who asked has gone."""
        if self._broken is not None:
            raise self._broken
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._requests.append(_Request(answer, read, run_id, command))
        self._wake.set()
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(partial(_undo, undo))
            raise

    async def join(self, run_id: str, command: commands.Join) -> Member:
        """Give a node a lease.

        Raises:
            RunIsClosed, SettingsDiffer: As `decide` says.
            LeaseLost: It was superseded at once.
        """

        def enrol(happened: Sequence[facts.Fact]) -> Member:
            run = self._run(run_id)
            lease = next(fact.lease for fact in happened if isinstance(fact, facts.NodeJoined))
            check_lease(run.state, command.node_id, lease)  # what was carried out together may have ended it
            member = run.enrol(command.node_id, lease)
            if run.state.phase is not Phase.JOINABLE:
                member.updates.put(node_update(run.state, command.node_id))
            return member

        return await self._submit(enrol, run_id, command, self.disconnect)

    async def resume(self, run_id: str, node_id: str, lease: int, revision: int) -> Member:
        """Take a node in again that holds a lease; the present state is put into its updates.

        Raises:
            RunNotFound, LeaseLost, RevisionAhead: The node must join again, as a newcomer.
        """

        def enrol(_: Sequence[facts.Fact]) -> Member:
            run = self._run(run_id)
            if run.state.run_end is not None:  # all leases ended with it, and how it ended is no secret
                return run.farewell(node_id, lease)
            check_lease(run.state, node_id, lease)
            check_revision(run.state, revision)
            leases.renew(run.state, node_id, self._now())
            member = run.enrol(node_id, lease)
            member.updates.put(node_update(run.state, node_id))
            return member

        run = self._runs.get(run_id)
        if run is not None and run.holds_lease(node_id, lease):
            # A sign of life counts from when it came, however long the commit takes that is under way.
            leases.renew(run.state, node_id, self._now())
        return await self._submit(enrol, undo=self.disconnect)

    def renew(self, member: Member) -> None:
        """Take a sign of life of a member."""
        run = self._runs[member.run_id]
        stands = run.holds_lease(member.node_id, member.lease.lease)
        if stands and run.members.get(member.node_id) is member:
            leases.renew(run.state, member.node_id, self._now())

    def disconnect(self, member: Member) -> None:
        """Note that a member's stream is gone; its lease lives on for the disconnect grace."""
        run = self._runs[member.run_id]
        if run.members.get(member.node_id) is not member:
            return
        del run.members[member.node_id]
        if run.holds_lease(member.node_id, member.lease.lease):
            leases.disconnect(run.state, member.node_id, self._now())
            self._wake.set()

    async def execute(self, run_id: str, command: commands.Command) -> None:
        """Carry out a command; returns when everything that came of it is durable and told.

        Raises:
            Refused: The command was not taken.
            JournalError: The outcome is unknown, and the service is going down.
        """
        await self._submit(lambda _: None, run_id, command)

    async def close_run(self, run_id: str, reason: str) -> pb.RunEnd:
        """Close a run, or learn how it was closed."""
        return await self._submit(
            lambda _: run_summary(self._run(run_id).state).run_end, run_id, commands.Close(reason)
        )

    async def get_run(self, run_id: str) -> pb.Run:
        """A run with its nodes, as it is durable."""
        return await self._submit(lambda _: run_message(self._run(run_id).state))

    async def list_runs(self) -> list[pb.Run]:
        """All runs without their nodes, by name."""
        return await self._submit(lambda _: [run_summary(run.state) for _, run in sorted(self._runs.items())])

    async def watch(self, run_id: str, revision: int) -> Slot[pb.Run]:
        """A slot that gets the run's state: now, if it is past `revision`, and after every change."""

        def subscribe(_: Sequence[facts.Fact]) -> Slot[pb.Run]:
            run = self._run(run_id)
            check_revision(run.state, revision)
            slot: Slot[pb.Run] = Slot()
            if run.state.revision > revision:
                slot.put(run_message(run.state))
            if run.state.run_end is not None:
                slot.end()
            else:
                run.watchers.add(slot)
            return slot

        return await self._submit(subscribe, undo=partial(self.unwatch, run_id))

    def unwatch(self, run_id: str, slot: Slot[pb.Run]) -> None:
        """Drop a watcher."""
        self._runs[run_id].watchers.discard(slot)

    def writable_round(self, run_id: str) -> int | None:
        """The one round of a run whose workers may write: the latest, or the next once that has ended.

        It changes when the fact behind it is durable. 0 before the first; None where there is no such run.
        """
        run = self._runs.get(run_id)
        return None if run is None else run.writable_round
