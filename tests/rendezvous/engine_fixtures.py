"""An engine over a journal and a clock that the test controls."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from rallypoint.rendezvous.base.cooperative import finish
from rallypoint.rendezvous.base.entries import StoreChange, Writer
from rallypoint.rendezvous.base.limits import RendezvousLimits
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.state import ReportedFailure, RunSettings, RunState
from rallypoint.rendezvous.journal.journal import (
    Checkpoint,
    Dropped,
    Entry,
    Forgotten,
    JournalError,
    Record,
    Recovered,
)
from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.runs.run import Member, run_summary
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.clock import LagSettings

T = TypeVar("T")

RUN = "run"
# The jumps of a test's clock are no pauses of the process.
NO_PAUSES = LagSettings(tolerance=math.inf)


class HeldJournal:
    """Keeps entries in memory; a test can hold its commits."""

    def __init__(self, durable: Sequence[Entry] = ()) -> None:
        self.durable = list(durable)
        self.commits = 0
        self._error: JournalError | None = None
        self._free = asyncio.Event()
        self._free.set()
        self._arrived = asyncio.Event()

    async def open(self) -> Recovered:
        return self.kept()

    def kept(self) -> Recovered:
        """The durable entries, as a journal returns them when opened."""
        checkpoints: dict[str, Checkpoint] = {}
        records: dict[tuple[str, int], Record] = {}
        for entry in self.durable:
            match entry:
                case Record():
                    records[entry.run_id, entry.revision] = entry
                case Checkpoint():
                    checkpoints[entry.run_id] = entry
                    dropped = [key for key in records if key[0] == entry.run_id and key[1] < entry.keep_from]
                    for key in dropped:
                        del records[key]
                case Forgotten():
                    checkpoints[entry.run_id] = Checkpoint(
                        entry.run_id, entry.revision, entry.content, entry.revision + 1
                    )
                    for key in [key for key in records if key[0] == entry.run_id]:
                        del records[key]
                case Dropped():
                    del checkpoints[entry.run_id]
                case StoreChange():
                    pass
        return Recovered(list(checkpoints.values()), list(records.values()), [])

    async def append(self, entries: Sequence[Entry]) -> None:
        self._arrived.set()
        await self._free.wait()
        if self._error is not None:
            raise self._error
        self.commits += 1
        self.durable += entries

    async def close(self) -> None:
        pass

    def hold(self) -> None:
        """Hold commits from now on."""
        self._free.clear()
        self._arrived.clear()

    async def held(self) -> None:
        """Wait until a commit is held."""
        await self._arrived.wait()

    def release(self) -> None:
        """Let commits through."""
        self._free.set()

    def break_(self) -> None:
        """Let commits fail."""
        self._error = JournalError("the disk is full")
        self._free.set()


class Stage:
    """An engine; the test plays its agents, its store and its clock."""

    def __init__(
        self,
        durable: Sequence[Entry] = (),
        lag: LagSettings = NO_PAUSES,
        limits: RendezvousLimits | None = None,
        **settings: Any,
    ) -> None:
        self.settings = replace(
            RunSettings(min_nodes=2, max_nodes=2, max_restarts=3, restart_backoff=0.0), **settings
        )
        self.journal = HeldJournal(durable)
        self.now = 1000.0
        self.wall = 1.7e9
        self.ended_rounds: list[tuple[str, int]] = []
        self.expired_runs: list[str] = []
        self.engine = RendezvousEngine(
            self.journal, clock=lambda: self.now, wall_clock=lambda: self.wall, limits=limits, lag=lag
        )
        self.engine.data = [self]
        finish(self.engine.recovering(self.journal.kept()))

    def forget_rounds_before(self, run_id: str, round: int) -> None:
        self.ended_rounds.append((run_id, round))

    def forget_run(self, run_id: str) -> None:
        self.expired_runs.append(run_id)

    def is_empty(self, run_id: str) -> bool:
        return True

    async def clear(self, run_id: str, refusal: object) -> None:
        raise AssertionError("there is nothing to clear")

    def stop_run(self, refusal: object) -> None:
        pass

    def join_command(self, node_id: str) -> commands.Join:
        return commands.Join(node_id, self.settings, f"{node_id}.cluster", 2, "trainer")

    async def join(self, node_id: str, run_id: str = RUN) -> Member:
        return await self.engine.join(run_id, self.join_command(node_id))

    async def running(self, *node_ids: str) -> list[Member]:
        """Members of a final round, which have taken all their updates."""
        members = [await self.join(node_id) for node_id in node_ids]
        await self.confirm(*members)
        for member in members:
            assert (await taken(member)).phase == pb.PHASE_FINAL
        return members

    async def confirm(self, *members: Member) -> None:
        """Confirm the current round for the members."""
        round_ = (await self.engine.get_run(RUN)).round
        for member in members:
            command = commands.Confirm(member.node_id, member.lease.number, round_, 29500)
            await self.engine.execute(RUN, command)

    async def fail(self, member: Member, round_: int) -> None:
        failure = ReportedFailure(
            round_, 0, 0, "trainer", member.node_id, "host", 1, 1, 1.7e9, "it broke", "", ""
        )
        command = commands.ReportFailure(member.node_id, member.lease.number, failure)
        await self.engine.execute(RUN, command)

    async def leave(self, member: Member) -> None:
        command = commands.Leave(member.node_id, member.lease.number, "told to stop")
        await self.engine.execute(RUN, command)

    async def list_runs(self) -> list[pb.Run]:
        """The durable runs without their nodes, by name; the engine also reads the clock."""

        def summaries(states: Iterable[RunState]) -> list[pb.Run]:
            return [run_summary(state) for state in sorted(states, key=lambda state: state.run_id)]

        return await self.engine.read_runs(summaries)

    async def later(self, seconds: float) -> pb.Run:
        """Advance the clock, let the engine read it, and return the run."""
        self.now += seconds
        return await self.engine.get_run(RUN)


@asynccontextmanager
async def staged(stage: Stage) -> AsyncIterator[Stage]:
    """Serve a stage's engine."""
    serving = asyncio.create_task(stage.engine.serve())
    try:
        yield stage
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, JournalError):
            await serving


async def taken(member: Member) -> pb.NodeUpdate:
    """A member's next update."""
    update = await member.updates.take()
    assert update is not None
    return update


def writer_of(member: Member) -> Writer:
    """The lease that a member holds, as its writes carry it."""
    return Writer(member.node_id, member.lease.number, member.lease.token)


async def begun(*coroutines: Coroutine[Any, Any, T]) -> list[asyncio.Task[T]]:
    """Start tasks, and let them run until they wait."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    await idle()
    return tasks


async def idle() -> None:
    """Run the loop for enough turns that a request gets to the journal and back."""
    for _ in range(20):
        await asyncio.sleep(0)
