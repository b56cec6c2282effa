"""A write of a round gets a successful reply before the end of that round is announced, or never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest

from rallypoint.rendezvous.base.entries import Operation, Writer
from rallypoint.rendezvous.base.refusals import KeyWaitTimedOut, RoundNotBegun
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.commands import Refused, RoundOver
from rallypoint.rendezvous.core.state import RunSettings
from rallypoint.rendezvous.journal.journal import Entry, Journal, MemoryJournal, Recovered
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.runs.run import Member
from rallypoint.rendezvous.shard.shard import Shard, open_shard
from rallypoint.rendezvous.store.writes import CompareSet, DeleteKey, Set, Write
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.engine_fixtures import writer_of
from rendezvous.journal.etcd_shelf import etcd_shelf
from rendezvous.shard_fixtures import RUN, begun, elsewhere, idle, opened, refusal_of
from support.etcd_server import NEEDS_ETCD
from support.waiting import PATIENCE

# ---- one after the other, over a journal whose commits the test holds


def of_round(writer: Writer, round_: int, kind: str, operation: Operation | None = None) -> Write[object]:
    """A write of a round: to its space, or as one of its workers to the space of the run."""
    if kind == "to its space":
        return Set(writer=writer, round=round_, key="k", value=b"late", operation=operation)
    return Set(writer=writer, round=0, writer_round=round_, key="k", value=b"late", operation=operation)


KINDS = ["to its space", "by its worker"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_write_that_comes_while_the_end_of_its_round_is_committed_is_refused(kind: str) -> None:
    """The latest facts decide. The refusal is sent once these are durable: a service killed before that would have
    ended nothing, and ROUND_OVER is final."""
    async with opened() as scene:
        journal, store = scene.journal, scene.shard.store
        journal.hold()
        (ending,) = await begun(scene.restart())
        await journal.held()
        (writing,) = await begun(store.write(RUN, of_round(scene.writer, 1, kind)))
        appends = journal.appends
        await idle()
        assert not writing.done()
        assert scene.shard.engine.writable_round(RUN) == 1
        journal.release()
        with pytest.raises(RoundOver):
            await writing
        await ending
        assert journal.appends == appends
        assert not store.check(RUN, 0, ["k"])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_write_that_comes_first_is_answered_first(kind: str) -> None:
    """Both commits are made at the same moment; still the reply comes before any member receives the end."""
    async with opened() as scene:
        journal = scene.journal
        order: list[str] = []

        async def note(name: str, task: asyncio.Task[object]) -> None:
            await task
            order.append(name)

        told = asyncio.create_task(scene.members[0].updates.take())
        journal.hold()
        writing, ending = await begun(
            scene.shard.store.write(RUN, of_round(scene.writer, 1, kind)), scene.restart()
        )
        noting = await begun(note("answered", writing), note("told", told))
        assert not order
        journal.release()
        await asyncio.gather(ending, *noting)
        assert order == ["answered", "told"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_write_that_waited_for_another_is_decided_by_the_latest_facts(kind: str) -> None:
    """It was queued while its round lasted; its turn came after the end of that was decided."""
    async with opened() as scene:
        journal, store = scene.journal, scene.shard.store
        journal.hold()
        (first,) = await begun(store.write(RUN, of_round(scene.writer, 1, kind, Operation("c", 0, 1))))
        (second,) = await begun(store.write(RUN, of_round(scene.writer, 1, kind, Operation("c", 1, 1))))
        (ending,) = await begun(scene.restart())
        journal.release()
        await first
        with pytest.raises(RoundOver):
            await second
        await ending


async def test_a_write_without_effect_waits_until_its_facts_are_durable() -> None:
    """The result of a failed comparison in a round that is frozen, but not durably, would reveal that round."""
    async with opened() as scene:
        journal, store, engine = scene.journal, scene.shard.store, scene.shard.engine
        journal.hold()
        (ending,) = await begun(scene.restart())
        assert engine.latest_round(RUN) == 2
        assert engine.writable_round(RUN) == 1
        lost = CompareSet(
            writer=scene.writer, round=0, writer_round=2, key="here", expected=b"x", desired=b"y"
        )
        tasks = await begun(
            store.write(RUN, lost), store.write(RUN, DeleteKey(writer=scene.writer, round=2, key="nowhere"))
        )
        (beyond,) = await begun(store.write(RUN, DeleteKey(writer=scene.writer, round=3, key="nowhere")))
        await idle()
        assert not [task for task in (*tasks, beyond) if task.done()]
        journal.release()
        await asyncio.gather(ending, *tasks)
        with pytest.raises(RoundNotBegun):
            await beyond


@pytest.mark.parametrize("kind", KINDS)
async def test_a_completed_write_that_is_repeated_has_its_outcome(kind: str) -> None:
    """This holds while the end of its round is being committed, after that, and after a restart of the service."""
    async with opened() as scene:
        store, journal = scene.shard.store, scene.journal
        write = of_round(scene.writer, 1, kind, Operation("c", 0, 1))
        await store.write(RUN, write)
        journal.hold()
        (ending,) = await begun(scene.restart())
        await store.write(RUN, write)
        journal.release()
        await ending
        await store.write(RUN, write)
        assert isinstance(
            await refusal_of(store.write(RUN, of_round(scene.writer, 1, kind, Operation("c", 0, 2)))),
            RoundOver,
        )
        durable = journal.durable
    again = type(journal)(durable)
    async with opened(again) as scene:
        await scene.shard.store.write(RUN, write)


# ---- concurrently, over every journal


class SlowJournal:
    """A journal in memory whose commits take their time, one after the other."""

    def __init__(self, random: Random) -> None:
        self._journal = MemoryJournal()
        self._random = random
        self._turn = asyncio.Lock()

    async def open(self) -> Recovered:
        return await self._journal.open()

    async def append(self, entries: Sequence[Entry]) -> None:
        async with self._turn:  # acquired in the order of the calls
            for _ in range(self._random.randrange(20)):
                await asyncio.sleep(0)
            await self._journal.append(entries)

    async def close(self) -> None:
        await self._journal.close()


class Job:
    """One run of two nodes, workers that write as fast as they get replies, and an operator who ends rounds."""

    ROUNDS = 12
    WRITERS = 6

    def __init__(self, shard: Shard, random: Random) -> None:
        self.shard = shard
        self.random = random
        self.announced = 0
        self.members: list[Member] = []
        self.acknowledged: set[str] = set()
        self.refused: set[str] = set()
        self.over = asyncio.Event()
        self.progress = asyncio.Condition()

    async def run(self) -> None:
        settings = RunSettings(min_nodes=2, max_nodes=2, max_restarts=3, restart_backoff=0.0)
        for node in ("a", "b"):
            command = commands.Join(node, settings, f"{node}.cluster", 1, "trainer")
            self.members.append(await self.shard.engine.join(RUN, command))
        async with asyncio.TaskGroup() as group:
            for member in self.members:
                group.create_task(self.follow(member))
            for number in range(self.WRITERS):
                group.create_task(self.write(number))
            group.create_task(self.end_rounds())

    async def follow(self, member: Member) -> None:
        """Confirm each round, as an agent does."""
        while (update := await member.updates.take()) is not None:
            if update.HasField("last_round_end"):
                self.announced = max(self.announced, update.last_round_end.round + 1)
            if update.phase == pb.PHASE_FROZEN:
                round_ = update.assignment.round
                self.announced = max(self.announced, round_)
                confirm = commands.Confirm(member.node_id, member.lease.number, round_, 29500)
                try:
                    await self.shard.engine.execute(RUN, confirm)
                except Refused:
                    continue  # it ended meanwhile

    async def write(self, number: int) -> None:
        """Write as a worker of the announced round, and of the one before, which doesn't know yet that it ended."""
        sequence, writer = 0, writer_of(self.members[0])
        while not self.over.is_set():
            for _ in range(self.random.randrange(5)):
                await asyncio.sleep(0)
            round_ = self.announced
            if not round_:
                continue
            sequence += 1
            key = f"{number}.{sequence}"
            operation = Operation(f"worker{number}", 0, sequence)
            write = Set(writer=writer, round=0, writer_round=round_, key=key, value=b"", operation=operation)
            try:
                await self.shard.store.write(RUN, write)
            except RoundOver as refusal:
                self.refused.add(key)
                self.settle(refusal)
                continue
            except commands.RunIsClosed:
                assert self.over.is_set()
                self.refused.add(key)
                return
            assert self.announced == round_, f"acknowledged in round {round_}, announced was {self.announced}"
            self.acknowledged.add(key)
            async with self.progress:
                self.progress.notify_all()

    def settle(self, refusal: RoundOver) -> None:
        """Check that the end of the round that refused a write is durable."""
        durable = self.shard.engine.writable_round(RUN)
        assert durable is not None
        assert refusal.round < durable

    async def end_rounds(self) -> None:
        for round_ in range(1, self.ROUNDS + 1):
            async with self.progress:
                await self.progress.wait_for(
                    lambda: self.announced >= round_ and len(self.acknowledged) >= 5 * round_  # noqa: B023
                )
            await self.shard.engine.execute(RUN, commands.Restart("again"))
        self.over.set()
        await self.shard.engine.close_run(RUN, "enough")


@pytest.fixture(params=["memory", "sqlite", pytest.param("etcd", marks=NEEDS_ETCD)])
async def journals(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[Journal]]:
    """A journal of every kind; and, if it outlives its process, the same again for the next process."""
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            yield [SlowJournal(Random(3))]
        elif request.param == "sqlite":
            yield [SqliteJournal(tmp_path / "rendezvous.db") for _ in range(2)]
        else:
            shelf = await stack.enter_async_context(etcd_shelf(request.getfixturevalue("etcd").url))
            yield [shelf.journal(), shelf.journal()]


async def test_no_write_is_acknowledged_after_the_end_of_its_round_is_announced(
    journals: list[Journal],
) -> None:
    """No refused write takes effect. Acknowledged writes are there, also for the next process."""
    jobs: list[Job] = []
    for journal in journals:
        shard = await open_shard(journal)
        if not jobs:
            jobs.append(Job(shard, Random(5)))
            async with asyncio.timeout(PATIENCE):
                await jobs[0].run()
        job = jobs[0]
        assert len(job.acknowledged) > job.ROUNDS
        assert shard.store.check(RUN, 0, sorted(job.acknowledged))
        for key in job.refused:
            with pytest.raises(KeyWaitTimedOut):
                await shard.store.get(RUN, 0, key, 0)
        await shard.retire(elsewhere)
        shard.end_streams(elsewhere)
