"""A closed run is reopened over every journal: its store is deleted, its events stay, also for the next server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from rallypoint.rendezvous.base.entries import Writer
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.commands import RunIsClosed, RunIsEnding, RunNotFound
from rallypoint.rendezvous.core.state import RunSettings
from rallypoint.rendezvous.journal.codec import DecodedRecord
from rallypoint.rendezvous.journal.journal import Journal, MemoryJournal
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.runs.run import Member
from rallypoint.rendezvous.shard.shard import Shard, open_shard
from rallypoint.rendezvous.state.core import SetState
from rallypoint.rendezvous.store.writes import Set
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.engine_fixtures import NO_PAUSES, writer_of
from rendezvous.journal.etcd_shelf import etcd_shelf
from support.etcd_server import NEEDS_ETCD

RUN = "run"
SETTINGS = RunSettings(min_nodes=1, max_nodes=1, max_restarts=1, restart_backoff=0.0)


class Server:
    """A service without its sockets, over one journal."""

    def __init__(self, journal: Callable[[], Journal], *, lasts: bool) -> None:
        self.lasts = lasts
        self.now = 1000.0
        self._journal = journal
        self.shard: Shard

    async def start(self) -> None:
        self.shard = await open_shard(
            self._journal(),
            clock=lambda: self.now,
            wall_clock=lambda: 1.7e9 + self.now,
            draw=bytes,
            lag=NO_PAUSES,
            on_failure=self._fail,
        )

    @staticmethod
    def _fail(error: BaseException) -> None:
        raise error

    async def stop(self) -> None:
        await self.shard.retire(RunNotFound)

    async def again(self) -> None:
        """Replace it by another process; one whose journal does not last would begin with nothing, so it stays."""
        if self.lasts:
            await self.stop()
            await self.start()

    async def join(self, node_id: str = "a", **more: Any) -> Member:
        command = commands.Join(node_id, SETTINGS, f"{node_id}.cluster", 1, "trainer", **more)
        return await self.shard.engine.join(RUN, command, stays=True)

    async def do(self, command: commands.Command) -> None:
        await self.shard.engine.execute(RUN, command)

    async def start_round(self, member: Member) -> int:
        round_ = (await self.shard.engine.get_run(RUN)).round
        await self.do(commands.Confirm(member.node_id, member.lease.number, round_, 29500))
        return round_

    async def set(self, writer: Writer, round_: int, key: str) -> None:
        await self.shard.store.write(RUN, Set(writer=writer, round=round_, key=key, value=b"value"))

    def keys(self, round_: int) -> list[str]:
        return self.shard.store.list_keys(RUN, round_, "", "", 10)

    def facts(self) -> list[str]:
        return [
            DecodedRecord(each.content).fact_name for each in self.shard.engine.history(RUN).after(0, 1000)
        ]


@pytest.fixture(params=["memory", "sqlite", pytest.param("etcd", marks=NEEDS_ETCD)])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    """A server over a journal of every kind."""
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            server = Server(MemoryJournal, lasts=False)
        elif request.param == "sqlite":
            server = Server(lambda: SqliteJournal(tmp_path / "rendezvous.db"), lasts=True)
        else:
            url = request.getfixturevalue("etcd").url
            server = Server((await stack.enter_async_context(etcd_shelf(url))).journal, lasts=True)
        await server.start()
        yield server
        await server.stop()


async def closed(server: Server) -> Member:
    """Let a run come to its end with node a in it, and keys in both spaces."""
    member = await server.join()
    round_ = await server.start_round(member)
    await server.set(writer_of(member), 0, "of the run")
    await server.set(writer_of(member), round_, "of the round")
    await server.shard.states.set(SetState(run_id=RUN, state=b"state", token=None))
    await server.shard.engine.close_run(RUN, "enough")
    return member


async def test_it_begins_again_with_an_empty_store_and_all_its_events(server: Server) -> None:
    """Its numbers continue; an operator's fenced state stays; another server finds the same."""
    former = await closed(server)
    before = await server.shard.engine.get_run(RUN)
    events = server.facts()
    await server.do(commands.Leave("a", former.lease.number, "no worker is left"))
    member = await server.join()
    for _ in range(2):
        run = await server.shard.engine.get_run(RUN)
        assert (run.phase, run.round) == (pb.PHASE_FROZEN, before.round + 1)
        assert run.incarnation not in ("", before.incarnation)
        assert not run.HasField("run_end")
        assert server.keys(0) == []
        assert server.facts() == [*events, "run_created", "node_joined", "round_frozen"]
        assert server.shard.engine.writable_round(RUN) == run.round
        state = server.shard.states.get(RUN)
        assert state is not None
        assert state.state == b"state"
        await server.again()
    assert member.lease.number > before.revision


async def test_a_server_that_starts_again_waits_for_the_nodes_of_a_closed_run(server: Server) -> None:
    """It does not know whether they have gone."""
    former = await closed(server)
    await server.again()
    with pytest.raises(RunIsEnding):
        await server.join()
    lease = former.lease
    again = await server.shard.engine.resume(RUN, "a", lease.number, 0, lease.token, stays=True)
    update = await again.updates.take()
    assert update is not None
    assert update.run_end.outcome == pb.OUTCOME_CANCELLED
    assert not again.updates.ended
    await server.do(commands.Leave("a", lease.number, "no worker is left"))
    assert again.updates.ended
    await server.join()


async def test_a_write_of_the_ended_incarnation_is_refused(server: Server) -> None:
    """Under its lease, in its round, in the run's own space; before and after another server starts."""
    former = await closed(server)
    late = writer_of(former)
    with pytest.raises(RunIsClosed):
        await server.set(late, 0, "too late")
    await server.do(commands.Leave("a", former.lease.number, "no worker is left"))
    member = await server.join()
    round_ = await server.start_round(member)
    for _ in range(2):
        for space in (0, round_, round_ - 1):
            with pytest.raises(RunIsClosed, match="CANCELLED"):
                await server.set(late, space, "too late")
        with pytest.raises(RunIsClosed):
            await server.shard.engine.resume(RUN, "a", former.lease.number, 0, former.lease.token)
        with pytest.raises(RunIsClosed):
            await server.do(commands.Leave("a", former.lease.number, "late"))
        with pytest.raises(RunIsClosed):
            await server.join("b", former_incarnation=former.lease.incarnation)
        assert (await server.shard.engine.close_run(RUN, "late", incarnation=former.lease.incarnation)).detail
        run = await server.shard.engine.get_run(RUN)
        assert (run.phase, run.node_count) == (pb.PHASE_FINAL, 1)
        assert server.keys(0) == server.keys(round_) == []
        await server.again()
    await server.set(writer_of(member), round_, "in time")


async def test_a_join_waits_until_the_last_node_has_gone(server: Server) -> None:
    """Then it is admitted; the streams of the earlier nodes end normally."""
    former = await closed(server)
    waiting = asyncio.create_task(server.shard.engine.until_reopenable(RUN, lambda _: None))
    await server.shard.engine.settled()
    assert not waiting.done()
    await server.do(commands.Leave("a", former.lease.number, "no worker is left"))
    await waiting
    update = await former.updates.take()
    assert update is not None
    assert former.updates.ended
    await asyncio.gather(server.join(), server.shard.engine.until_reopenable(RUN, lambda _: None))


async def test_writes_that_are_being_committed_at_the_end_are_deleted_too(server: Server) -> None:
    """They were decided while the run was open."""
    member = await server.join()
    await server.start_round(member)
    writes = [asyncio.create_task(server.set(writer_of(member), 0, f"key {n}")) for n in range(600)]
    await asyncio.sleep(0)
    await server.shard.engine.close_run(RUN, "enough")
    await server.do(commands.Leave("a", member.lease.number, "no worker is left"))
    await server.join()
    for _ in range(2):
        assert server.keys(0) == []
        await server.again()
    await asyncio.gather(*writes, return_exceptions=True)
