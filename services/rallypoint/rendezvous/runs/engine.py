"""The rendezvous service around the core, without gRPC: the operations of nodes, people and tools on a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from rallypoint.rendezvous.base.cooperative import LatestValue
from rallypoint.rendezvous.base.entries import WriteAdmission
from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.base.limits import LimitReached
from rallypoint.rendezvous.core import apply, commands, facts, starts
from rallypoint.rendezvous.core.commands import SERVICE, Actor, ActorKind, RevisionAhead
from rallypoint.rendezvous.core.decide import check_lease, check_revision, end_of
from rallypoint.rendezvous.core.starts import StartReport
from rallypoint.rendezvous.core.state import Phase, RunSettings, RunState
from rallypoint.rendezvous.runs.history import History
from rallypoint.rendezvous.runs.run import (
    HostedRun,
    Member,
    PublishedRun,
    StoppedRun,
    api_messages,
    node_update,
    run_message,
    run_summary,
)
from rallypoint.rendezvous.runs.runs import DurableRuns
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

_T = TypeVar("_T")

_TOKEN_BYTES = 16


class RendezvousEngine(DurableRuns, WriteAdmission):
    """Runs with operations for clients. All that it returns, or puts into a `LatestValue`, is durable."""

    async def join(
        self, run_id: str, command: commands.Join, peer: str = "", *, stays: bool = False
    ) -> Member:
        """Give a node a lease; it may reopen a closed run.

        Args:
            peer: Its address, for the event log.
            stays: See Member.

        Raises:
            RunIsEnding: It may once nodes have gone that were in the closed run; see `until_reopenable`.
            RunIsClosed, SettingsDiffer, NodeIsEvicted, NodeIdTaken: See `decide`.
            LimitReached: The service has as many runs, or the run as many nodes, as its limit allows.
            LeaseLost: It was superseded at once.
        """

        def enrol(happened: Sequence[facts.Fact]) -> Member:
            run = self._run(run_id)
            lease = next(fact.lease for fact in happened if isinstance(fact, facts.NodeJoined))
            check_lease(run.state, command.node_id, lease)  # a command of the same step may have ended it
            # Its term begins when the node gets it, however long the commit took.
            self._renew(run, command.node_id)
            member = run.enrol(command.node_id, lease, stays=stays)
            if run.state.phase is not Phase.JOINABLE:
                member.updates.put(node_update(run.state, command.node_id))
            return member

        # Unique: a run of this name would have to begin twice in the same fraction of a microsecond.
        incarnation = f"{round(self._wall_clock() * 1e9):x}"
        command = replace(command, incarnation=incarnation, token=self._draw(_TOKEN_BYTES))
        actor = Actor(ActorKind.NODE, command.node_id, peer)
        while True:
            try:
                return await self._submit(enrol, run_id, command, actor, self.disconnect)
            except commands.RunIsEnding as ending:
                if ending.node_ids:
                    raise
                run = self._run(run_id)
                if (end := run.state.run_end) is not None:  # otherwise another node was as fast
                    refusal = partial(commands.RunIsClosed, outcome=end.outcome, detail=end.detail)
                    await asyncio.gather(*(each.clear(run_id, refusal) for each in self.data))

    async def until_reopenable(self, run_id: str, begun: Callable[[LatestValue[bool]], None]) -> None:
        """Return when a closed run can be reopened, or was, or is forgotten: join again then.

        `begun`: called with that for which this waits, once `drain` would end it too.

        Raises:
            Draining, NotOwner, RunBroken: The service can't wait for it any more.
        """

        def wait(_: Sequence[facts.Fact]) -> LatestValue[bool]:
            run, slot = self._run(run_id), LatestValue[bool]()
            run.waiting.add(slot)
            run.end_gone()  # the last one may have gone meanwhile
            begun(slot)
            return slot

        def forget(slot: LatestValue[bool]) -> None:
            if (run := self._runs.get(run_id)) is not None:
                run.waiting.discard(slot)

        with suppress(commands.RunNotFound):
            slot = await self._submit(wait, run_id, undo=forget)
            try:
                await slot.take()
            finally:
                forget(slot)

    async def resume(
        self, run_id: str, node_id: str, lease: int, revision: int, token: bytes, *, stays: bool = False
    ) -> Member:
        """Admit a node again that holds a lease; the present state is put into its updates. `stays`: see Member.

        Raises:
            RunNotFound, LeaseLost, LeaseNotProven, RevisionAhead: The node must join again, as a newcomer.
            NodeIsEvicted: It must not join again.
        """

        def enrol(_: Sequence[facts.Fact]) -> Member:
            run = self._run(run_id)
            if run.state.run_end is not None:  # all leases ended with the run; its end may be sent to anyone
                if not stays or not run.holds_lease(node_id, lease, token):
                    return run.closing_update(node_id, lease)
                self._renew(run, node_id)  # it is still there, and the run is not reopened
                member = run.enrol(node_id, lease, stays=True)
                member.updates.put(node_update(run.state, node_id))
                return member
            check_lease(run.state, node_id, lease, token)
            check_revision(run.state, revision)
            self._renew(run, node_id)
            member = run.enrol(node_id, lease, stays=stays)
            member.updates.put(node_update(run.state, node_id))
            return member

        run = self._runs.get(run_id)
        if run is None or not run.holds_lease(node_id, lease, token):
            return await self._submit(enrol, run_id, undo=self.disconnect)
        # A sign of life counts from its arrival until the reply, however long the commits under way take.
        self._renew(run, node_id)
        run.state.returned_at = self._now()
        run.returning[node_id, lease] += 1
        try:
            return await self._submit(enrol, run_id, undo=self.disconnect)
        finally:
            run.returning[node_id, lease] -= 1
            if not run.returning[node_id, lease]:
                del run.returning[node_id, lease]
                if run.holds_lease(node_id, lease) and node_id not in run.members:
                    # Its stream broke before it was admitted. It has a full term from then, and not the grace: the
                    # service was slow, not the node, which may wait longer than the grace before it tries again.
                    self._renew(run, node_id)
                    apply.note_broken(run.state, node_id, self._now_in(run))

    def renew(self, member: Member, watchdog_trouble: str | None = None) -> None:
        """Handle a sign of life of a member.

        Args:
            member: The node with its stream.
            watchdog_trouble: Why no watchdog watches its workers, "" if one does; None: unchanged.
        """
        run = self._runs.get(member.run_id)
        if run is None or run.members.get(member.node_id) is not member:
            return
        if run.holds_lease(member.node_id, member.lease.number):
            self._renew(run, member.node_id)
            if watchdog_trouble is not None and member.node_id in run.state.nodes:
                run.state.nodes[member.node_id].watchdog_trouble = watchdog_trouble

    def note_start(self, member: Member, report: StartReport) -> None:
        """Note that the workers of a member have started in a round; see `starts`."""
        run = self._runs.get(member.run_id)
        if run is None or run.members.get(member.node_id) is not member:
            return
        now = self._now_in(run)
        if run.holds_lease(member.node_id, member.lease.number) and starts.note(
            run.state, member.node_id, report, now
        ):
            self._settle_at(run, now)

    def _renew(self, run: HostedRun, node_id: str) -> None:
        now = self._now_in(run)
        if apply.renew(run.state, node_id, now):
            self._settle_at(run, now)

    def _settle_at(self, run: HostedRun, deadline: float | None) -> None:
        """Schedule a run for a time that may be nearer than its present deadline, and wake `serve`."""
        self._schedule.put(run.state.run_id, deadline)
        self._wake.set()

    def disconnect(self, member: Member) -> None:
        """Note that a member's stream is gone; its lease lives on for the disconnect grace."""
        run = self._runs.get(member.run_id)
        if run is None or run.members.get(member.node_id) is not member:
            return
        del run.members[member.node_id]
        if run.holds_lease(member.node_id, member.lease.number):
            broken = apply.note_broken if self._streams_over else apply.disconnect
            broken(run.state, member.node_id, self._now_in(run))
            self._settle_at(run, run.next_deadline(self._limits.run_ttl))

    async def execute(
        self, run_id: str, command: commands.Command, actor: Actor = SERVICE
    ) -> Sequence[facts.Fact]:
        """Carry out a command; returns its facts once they are durable and published.

        Raises:
            Refused: The command was not accepted.
            JournalError: The outcome is unknown, and the service is going down.
            NotOwner: Another process owns the run; nothing was done.
            OutcomeUnknown: Another process came to own it during the commit.
        """
        return await self._submit(lambda happened: happened, run_id, command, actor)

    async def close_run(
        self, run_id: str, reason: str, actor: Actor = SERVICE, incarnation: str = ""
    ) -> pb.RunEnd:
        """Close a run, or return how it was closed before; `incarnation`: see commands.Close.

        Raises:
            RunNotFound: There is no such run, or no such incarnation of it is known.
        """

        def run_end(_: Sequence[facts.Fact]) -> pb.RunEnd:
            state = self._run(run_id).state
            earlier = end_of(state, incarnation) if incarnation != state.incarnation else None
            return run_summary(state).run_end if earlier is None else api_messages.to_message(earlier)

        return await self._submit(run_end, run_id, commands.Close(reason, incarnation), actor)

    async def delete_run(self, run_id: str, actor: Actor = SERVICE, incarnation: str = "") -> None:
        """Forget a run without nodes, with its events, store and states; `incarnation`: see commands.Forget.

        Raises:
            RunNotFound: There is no such run, or it is another incarnation.
            RunInUse: It has nodes.
        """

        def check_deleted(_: object) -> None:
            if (run := self._runs.get(run_id)) is not None:
                raise commands.RunInUse(run_id, len(run.state.nodes))  # a node was as fast

        await self._submit(check_deleted, run_id, commands.Forget(incarnation), actor)

    async def get_run(self, run_id: str) -> pb.Run:
        """Return a run with its nodes, as it is durable."""
        return await self.read_run(run_id, run_message)

    async def read_run(self, run_id: str, view: Callable[[RunState], _T]) -> _T:
        """Return the result of `view` for a run as it is durable."""
        return await self._submit(lambda _: view(self._run(run_id).state), run_id)

    async def read_runs(self, view: Callable[[Iterable[RunState]], _T]) -> _T:
        """Return the result of `view` for all runs as they are durable; stopped ones have a name only."""

        def states() -> Iterator[RunState]:
            yield from (run.state for run in self._runs.values())
            yield from (StoppedRun(run_id, broken=cause) for run_id, cause in self._broken.items())

        return await self._submit(lambda _: view(states()))

    async def watch(self, run_id: str, revision: int) -> LatestValue[PublishedRun]:
        """Return a value that gets the run's states after `revision`; see RunWatchers."""

        def subscribe(_: Sequence[facts.Fact]) -> LatestValue[PublishedRun]:
            run = self._run(run_id)
            check_revision(run.state, revision)
            self._check_subscribers(run)
            slot: LatestValue[PublishedRun] = LatestValue()
            run.watchers.add(slot, revision, run.state, self._now())
            if run.ended:
                slot.end()
                run.watchers.slots.discard(slot)
            return slot

        return await self._submit(subscribe, run_id, undo=partial(self.unwatch, run_id))

    def unwatch(self, run_id: str, slot: LatestValue[PublishedRun]) -> None:
        """Drop a watcher."""
        if (run := self._runs.get(run_id)) is not None:
            run.watchers.slots.discard(slot)

    @property
    def run_count(self) -> int:
        """Number of runs."""
        return len(self._runs)

    def remote_reader(self, run_id: str) -> NotOwner | None:
        """Return None: no other process knows more of a run of this one."""
        return None

    def now(self) -> float:
        """Return the present time by the clock of the deadlines, seconds."""
        return self._now()

    def history(self, run_id: str) -> History:
        """Return the kept events of a run; all of them are durable.

        Raises:
            RunNotFound: There is no such run.
        """
        return self._readable(run_id).history

    def settings(self, run_id: str) -> RunSettings:
        """Return the settings of a run, which change only when it is reopened.

        Raises:
            RunNotFound: There is no such run.
        """
        return self._readable(run_id).state.settings

    def follow(self, run_id: str, revision: int) -> LatestValue[int]:
        """Return a value that gets the revision of the latest durable event: now, and after every change.

        Raises:
            RunNotFound: There is no such run.
            RevisionAhead: `revision` was never given out.
            LimitReached: The run has as many watchers and followers as its limit allows.
        """
        run = self._readable(run_id)
        if revision > run.history.latest:  # the state may be ahead of the journal
            raise RevisionAhead(run_id, revision, run.history.latest)
        self._check_subscribers(run)
        slot: LatestValue[int] = LatestValue()
        slot.put(run.history.latest)
        if run.ended:
            slot.end()
        else:
            run.followers.add(slot)
        return slot

    def unfollow(self, run_id: str, slot: LatestValue[int]) -> None:
        """Drop a follower."""
        if (run := self._runs.get(run_id)) is not None:
            run.followers.discard(slot)

    def _check_subscribers(self, run: HostedRun) -> None:
        most = self._limits.subscribers_per_run
        if len(run.watchers) + len(run.followers) >= most:
            run_id = run.state.run_id
            detail = f"run {run_id!r} is at its limit of watchers"
            remedy = "end some of them, or raise --max-subscribers-per-run"
            raise LimitReached("TOO_MANY_SUBSCRIBERS", run_id, detail, remedy, most)

    def writable_round(self, run_id: str) -> int | None:
        """Return the latest round, or the next once that has ended, as durable; None if there is no such run."""
        self._check_whole(run_id)
        run = self._runs.get(run_id)
        return None if run is None else run.writable_round

    def latest_round(self, run_id: str) -> int | None:
        """As `writable_round`, by the latest facts, durable or not."""
        self._check_whole(run_id)
        run = self._runs.get(run_id)
        return None if run is None else run.latest_round()

    def creator_of(self, run_id: str) -> str:
        """Return the client that created a run; empty: unknown to this process."""
        run = self._runs.get(run_id)
        return "" if run is None else run.client

    async def settled(self) -> None:
        """Return when all present decisions are durable."""
        await self._submit(lambda _: None)

    def check_lease(self, run_id: str, node_id: str, lease: int, token: bytes) -> None:
        """Check that a node holds the lease it sent, by the latest facts, durable or not. See `WriteAdmission`."""
        check_lease(self._run(run_id).state, node_id, lease, token)
