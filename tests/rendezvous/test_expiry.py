"""A run without nodes is forgotten after a while; its numbers are not, so that none is used twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.rendezvous.base.limits import Limits, RendezvousLimits
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.commands import (
    SERVICE,
    LeaseLost,
    RevisionAhead,
    RunInUse,
    RunIsEnding,
    RunNotFound,
)
from rallypoint.rendezvous.core.snapshot import numbers_only
from rallypoint.rendezvous.core.state import RunSettings
from rallypoint.rendezvous.journal.codec import encode_snapshot
from rallypoint.rendezvous.journal.journal import MARK, Dropped, Entry, Forgotten
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.shard.shard import Shard, open_shard
from rallypoint.rendezvous.state.core import SetState
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.engine_fixtures import RUN, Stage, begun, idle, staged, taken

TTL = 100.0
LIMITS = RendezvousLimits(run_ttl=TTL)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """An engine whose runs have one node, and are forgotten 100 s after it has gone."""
    async with staged(Stage(limits=LIMITS, min_nodes=1, max_nodes=1)) as stage:
        yield stage


async def known(stage: Stage, after: float = 0.0) -> list[str]:
    """The names of the known runs, `after` seconds later."""
    stage.now += after
    await stage.list_runs()  # this step also carries out the due deadlines
    return [run.run_id for run in await stage.list_runs()]


async def ended_run(stage: Stage) -> pb.Run:
    """A closed run that had one round."""
    await stage.running("a")
    await stage.engine.close_run(RUN, "enough")
    return await stage.engine.get_run(RUN)


async def test_a_closed_run_is_forgotten_after_its_time(stage: Stage) -> None:
    """Until then its outcome can be read."""
    await ended_run(stage)
    assert await known(stage, TTL - 0.1) == [RUN]
    assert (await stage.engine.get_run(RUN)).run_end.outcome == pb.OUTCOME_CANCELLED
    assert await known(stage, 0.1) == []
    for question in (stage.engine.get_run(RUN), stage.engine.watch(RUN, 0)):
        with pytest.raises(RunNotFound):
            await question
    assert stage.engine.writable_round(RUN) is None


async def test_a_run_that_all_nodes_left_is_forgotten_too(stage: Stage) -> None:
    """It is open, but no node came back."""
    (member,) = await stage.running("a")
    await stage.leave(member)
    assert await known(stage, TTL - 0.1) == [RUN]
    assert await known(stage, 0.1) == []


async def test_a_run_that_lost_its_nodes_has_its_time_from_then_on(stage: Stage) -> None:
    """The time begins when the nodes count as lost."""
    (member,) = await stage.running("a")
    stage.engine.disconnect(member)
    assert await known(stage, 2.0) == [RUN]
    assert await known(stage, TTL - 0.1) == [RUN]
    assert await known(stage, 0.1) == []


async def test_a_run_that_has_a_node_is_never_forgotten(stage: Stage) -> None:
    """This holds however long nothing happens to it."""
    (member,) = await stage.running("a")
    for _ in range(30):
        stage.engine.renew(member)
        assert await known(stage, 10.0) == [RUN]
    assert stage.expired_runs == []


async def test_a_node_that_comes_back_in_time_restarts_the_time(stage: Stage) -> None:
    """The time begins when the node leaves again."""
    await stage.leave(await stage.join("a"))
    stage.now += TTL - 1
    member = await stage.join("a")
    stage.now += 10
    stage.engine.renew(member)
    await stage.leave(member)
    assert await known(stage, TTL - 0.1) == [RUN]
    assert await known(stage, 0.1) == []


async def test_a_node_that_comes_back_at_the_deadline_finds_the_run(stage: Stage) -> None:
    """Requests come before deadlines of the same step."""
    await stage.leave(await stage.join("a"))
    revision = (await stage.engine.get_run(RUN)).revision
    stage.now += TTL
    member = await stage.join("a")
    assert member.lease.number > revision
    assert stage.expired_runs == []


async def test_the_expiry_of_a_run_is_reported_once_it_is_durable(stage: Stage) -> None:
    """The engine reports it to the store and to readers once no restart can bring the run back."""
    await ended_run(stage)
    stage.journal.hold()
    stage.now += TTL
    (reading,) = await begun(stage.list_runs())
    await stage.journal.held()
    assert stage.expired_runs == []
    assert not reading.done()
    stage.journal.release()
    assert await reading == []
    assert stage.expired_runs == [RUN]
    assert [type(entry) for entry in stage.journal.durable[-3:]] == [Forgotten, Dropped, Forgotten]


async def test_watchers_of_an_idle_run_are_notified_that_it_is_gone(stage: Stage) -> None:
    """Watchers and followers get RunNotFound; none waits for ever."""
    await stage.leave(await stage.join("a"))
    watcher, follower = await stage.engine.watch(RUN, 0), stage.engine.follow(RUN, 0)
    await watcher.take()
    await follower.take()
    waiting: list[asyncio.Task[Any]] = [*await begun(watcher.take()), *await begun(follower.take())]
    assert await known(stage, TTL) == []
    for task in waiting:
        with pytest.raises(RunNotFound):
            await task


async def test_deadlines_of_a_run_that_is_gone_have_no_effect() -> None:
    """With a time to live of 0 it goes with its last node, whose lease would have lasted longer."""
    async with staged(Stage(limits=RendezvousLimits(run_ttl=0.0))) as stage:
        await stage.leave(await stage.join("a"))
        assert await known(stage) == []
        assert await known(stage, 1000.0) == []
        await stage.join("a")
        assert await known(stage) == [RUN]


async def test_a_stream_that_outlives_its_run_does_no_harm(stage: Stage) -> None:
    """A node that received the end, and has not closed its side yet, may still send messages."""
    (member,) = await stage.running("a")
    await stage.engine.close_run(RUN, "enough")
    assert await known(stage, TTL) == []
    stage.engine.renew(member)
    stage.engine.disconnect(member)
    with pytest.raises(RunNotFound):
        await stage.leave(member)


# ---- a run that is deleted


async def test_a_closed_run_is_deleted_at_once(stage: Stage) -> None:
    """As if its time were over: the journal keeps only its numbers, and members receive the end."""
    (member,) = await stage.running("a")
    with pytest.raises(RunInUse, match="has 1 nodes: close it"):
        await stage.engine.delete_run(RUN, SERVICE)
    await stage.engine.close_run(RUN, "enough")
    await stage.engine.delete_run(RUN, SERVICE)
    assert (await taken(member)).phase == pb.PHASE_CLOSED, "which it is told though the run is gone"
    assert await known(stage) == []
    assert stage.expired_runs == [RUN]
    assert [type(entry) for entry in stage.journal.durable[-3:]] == [Forgotten, Dropped, Forgotten]
    with pytest.raises(RunNotFound):
        await stage.engine.delete_run(RUN, SERVICE)


async def test_a_node_that_comes_with_the_deletion_keeps_its_run(stage: Stage) -> None:
    """Both are carried out in one step: the node is admitted, and the deletion is refused."""
    await stage.leave(await stage.join("a"))
    deleting = asyncio.ensure_future(stage.engine.delete_run(RUN, SERVICE))
    joining = asyncio.ensure_future(stage.join("a"))
    with pytest.raises(RunInUse):
        await deleting
    assert (await joining).lease.number > 0
    assert await known(stage, TTL / 2) == [RUN]


# ---- a run that comes again


async def test_a_name_can_be_used_again(stage: Stage) -> None:
    """The new run has other settings, and no outcome, restarts or evicted nodes of the old one."""
    member = await stage.join("a")
    await stage.engine.execute(RUN, commands.Evict("bad", "bad memory"))
    await stage.confirm(member)
    await stage.fail(member, 1)
    await stage.engine.close_run(RUN, "enough")
    with pytest.raises(RunIsEnding):
        await stage.join("a")
    await known(stage, TTL)
    stage.settings = type(stage.settings)(min_nodes=1, max_nodes=1, join_timeout=7.0)
    await stage.join("bad")
    run = await stage.engine.get_run(RUN)
    assert (run.phase, run.restart_count, list(run.evicted_node_ids)) == (pb.PHASE_FROZEN, 0, [])
    assert run.settings.join_timeout.seconds == 7
    assert not run.HasField("run_end")
    assert not run.HasField("last_round_end")


async def test_its_numbers_go_on(stage: Stage) -> None:
    """Revisions, leases, rounds and fencing tokens only grow."""
    (old,) = await stage.running("a")
    token = (await stage.engine.get_run(RUN)).nodes[0].assignment.fencing_token
    await stage.engine.close_run(RUN, "enough")
    last = await stage.engine.get_run(RUN)
    await known(stage, TTL)
    new = await stage.join("a")
    update = await taken(new)
    assert new.lease.number > last.revision > old.lease.number
    assert update.assignment.round == last.round + 1
    assert update.assignment.fencing_token > token
    assert update.revision == last.revision + 3  # created, joined, frozen


async def test_leases_of_its_earlier_life_are_worth_nothing(stage: Stage) -> None:
    """A node that slept through it all can't write, resume, or send commands."""
    (old,) = await stage.running("a")
    await stage.engine.close_run(RUN, "enough")
    await known(stage, TTL)
    await stage.join("a")
    with pytest.raises(LeaseLost):
        stage.engine.check_lease(RUN, "a", old.lease.number, old.lease.token)
    with pytest.raises(LeaseLost):
        await stage.engine.resume(RUN, "a", old.lease.number, 0, old.lease.token)
    with pytest.raises(LeaseLost):
        await stage.confirm(old)


async def test_workers_of_its_earlier_life_write_no_more() -> None:
    """Their round is over, also before the new run of that name has a round of its own."""
    async with staged(Stage(limits=LIMITS)) as stage:
        await stage.running("a", "b")
        await stage.engine.close_run(RUN, "enough")
        await known(stage, TTL)
        await stage.join("a")
        assert stage.engine.writable_round(RUN) == 2
        again = Stage(durable=stage.journal.durable)
        assert again.engine.writable_round(RUN) == 2
        await stage.join("b")
        assert stage.engine.writable_round(RUN) == 2
        assert (await stage.engine.get_run(RUN)).round == 2


async def test_cursors_of_its_earlier_life_still_grow(stage: Stage) -> None:
    """A watcher of the earlier run can go on watching, and receives only new states."""
    last = await ended_run(stage)
    await known(stage, TTL)
    await stage.join("a")
    watcher = await stage.engine.watch(RUN, last.revision)
    told = await watcher.take()
    assert told is not None
    assert told.run.revision > last.revision
    with pytest.raises(RevisionAhead):
        await stage.engine.watch(RUN, told.run.revision + 1)


async def test_numbers_outlive_the_server_too(stage: Stage) -> None:
    """The server may start again while the run is forgotten, or after it came again, any number of times."""
    last = await ended_run(stage)
    await known(stage, TTL)
    durable = stage.journal.durable
    for _ in range(3):
        async with staged(restarted(durable)) as second:
            assert await known(second) == []
            member = await second.join("a")
            assert member.lease.number > last.revision
            assert (await taken(member)).assignment.round == last.round + 1
            revision = (await second.engine.get_run(RUN)).revision
        async with staged(restarted(second.journal.durable)) as third:
            resumed = await third.engine.resume(RUN, "a", member.lease.number, revision, member.lease.token)
            assert (await taken(resumed)).assignment.round == last.round + 1
            await third.engine.close_run(RUN, "enough")
            last = await third.engine.get_run(RUN)
            assert await known(third, TTL) == []
        durable = third.journal.durable


def restarted(durable: list[Entry]) -> Stage:
    """A server that starts again."""
    return Stage(durable=durable, limits=LIMITS, min_nodes=1, max_nodes=1)


async def test_a_restart_gives_an_idle_run_its_full_time_again(stage: Stage) -> None:
    """The server can't know for how long it was down."""
    await ended_run(stage)
    stage.now += TTL - 1
    async with staged(Stage(durable=stage.journal.durable, limits=LIMITS)) as second:
        await idle()
        assert await known(second, TTL - 0.1) == [RUN]
        assert await known(second, 0.1) == []


async def test_every_life_of_a_run_has_a_name_of_its_own(stage: Stage) -> None:
    """Clients see by it that numbers may have begun again; a restart of the server does not change it."""
    (member,) = await stage.running("a")
    first = member.lease.incarnation
    assert first
    stage.wall += 10
    assert (await stage.join("b", run_id=RUN)).lease.incarnation == first
    async with staged(Stage(durable=stage.journal.durable, limits=LIMITS)) as second:
        again = await second.engine.resume(
            RUN, "a", member.lease.number, member.lease.revision, member.lease.token
        )
        assert again.lease.incarnation == first
    await stage.engine.close_run(RUN, "enough")
    assert await known(stage, TTL) == []
    renewed = (await stage.join("a")).lease
    assert renewed.incarnation not in ("", first)


# ---- the remains of runs that do not come again


async def lived(stage: Stage, run_id: str) -> pb.Run:
    """A run of one node that was in one round, and is forgotten."""
    member = await stage.join("a", run_id)
    command = commands.Confirm("a", member.lease.number, (await stage.engine.get_run(run_id)).round, 29500)
    await stage.engine.execute(run_id, command)
    await stage.engine.close_run(run_id, "enough")
    run = await stage.engine.get_run(run_id)
    assert await known(stage, TTL) == []
    return run


async def test_all_forgotten_runs_leave_one_mark(stage: Stage) -> None:
    """Neither the journal nor the service knows their names; every new run begins above all of their numbers."""
    last = pb.Run()
    for number in range(30):
        run = await lived(stage, f"run{number}")
        assert run.round == last.round + 1
        assert run.revision > last.revision
        last = run
    (mark,) = stage.journal.kept().checkpoints
    assert mark.run_id == MARK
    assert not stage.journal.kept().records
    assert stage.engine._left == {}
    async with staged(restarted(stage.journal.durable)) as second:
        for run_id in ("run0", "new"):
            member = await second.join("a", run_id)
            assert member.lease.number > last.revision
            assert (await taken(member)).assignment.round == last.round + 1


async def test_where_nothing_was_forgotten_runs_begin_at_1(stage: Stage) -> None:
    for run_id in ("a", "b"):
        member = await stage.join("a", run_id)
        assert (await taken(member)).assignment.round == 1
        assert member.lease.number == 2


async def test_numbers_that_earlier_versions_kept_for_each_run_are_deleted() -> None:
    """The first process of this version deletes it while it serves; a run that comes again begins above all numbers."""
    kept = [
        Forgotten(f"run{number}", number, encode_snapshot(numbers_only(f"run{number}", number, number)))
        for number in range(1, 1001)
    ]
    async with staged(restarted(list(kept))) as stage:
        member = await stage.join("a", "run7")
        assert member.lease.number == 1002
        assert (await taken(member)).assignment.round == 1001
        for _ in range(10):
            await stage.list_runs()
        assert {each.run_id for each in stage.journal.kept().checkpoints} == {MARK, "run7"}
    async with staged(restarted(stage.journal.durable)) as again:
        assert await known(again) == ["run7"]
        assert (await again.join("a", "run8")).lease.number == 1002


async def test_a_fenced_state_outlives_the_beginning_of_its_run(tmp_path: Path) -> None:
    """It needs no run; a run that begins under its name, above the mark, does not delete it."""

    async def opened() -> Shard:
        return await open_shard(
            SqliteJournal(tmp_path / "rendezvous.db"), limits=Limits(RendezvousLimits(run_ttl=0.0))
        )

    async def closed(shard: Shard) -> None:
        await shard.retire(RunNotFound)
        shard.end_streams(RunNotFound)

    shard = await opened()
    settings = RunSettings(min_nodes=1, max_nodes=1)
    join = commands.Join("a", settings, "a.cluster", 1, "trainer")
    member = await shard.engine.join("first", join)
    await shard.engine.execute("first", commands.Leave("a", member.lease.number, "enough"))
    assert await shard.engine.read_runs(lambda runs: [run.run_id for run in runs]) == []
    await shard.states.set(SetState(run_id=RUN, state=b"kept"))
    await shard.engine.join(RUN, join)
    await closed(shard)
    again = await opened()
    state = again.states.get(RUN)
    assert state is not None
    assert state.state == b"kept"
    await closed(again)
