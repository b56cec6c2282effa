"""An unexpected error in one run stops that run, is reported, and deletes nothing; all others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.rendezvous.base.errors import RunBroken
from rallypoint.rendezvous.base.limits import RendezvousLimits
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.journal.journal import Record
from rallypoint.rendezvous.runs import recovery, runs
from rallypoint.rendezvous.runs.run import HostedRun
from rallypoint.rendezvous.store.store import RunStore
from rallypoint.rendezvous.store.writes import Set
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.engine_fixtures import RUN, Stage, begun, staged, taken, writer_of
from rendezvous.shard_fixtures import ShardJournal, idle, opened, refusal_of

OTHER = "other"


def tripping(original: Callable[..., Any], run_id: str, named: Callable[..., str]) -> Callable[..., Any]:
    """The same function, but it raises an error in one run."""

    def trip(*arguments: Any, **named_arguments: Any) -> Any:
        if named(*arguments) == run_id:
            raise KeyError("planted")
        return original(*arguments, **named_arguments)

    return trip


# The failing function: its module or class, its name, and the run id in its arguments.
MISTAKES: dict[str, tuple[Any, str, Callable[..., str]]] = {
    "while a command is carried out": (runs, "carry_out", lambda state, *_: state.run_id),
    "while its consequences are found": (runs, "settle", lambda state, *_: state.run_id),
    "while a record is made": (runs, "encode_record", lambda run_id, *_: run_id),
    "while it is told": (HostedRun, "publish_to_members", lambda run: run.state.run_id),
    "while its deadline is found": (HostedRun, "next_deadline", lambda run, *_: run.state.run_id),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_one_run_is_stopped_and_the_others_go_on(
    mistake: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Members, watchers and later requests of the run get RunBroken. Its records stay complete; a service that starts
    again, without the error, goes on from them."""
    async with staged(Stage()) as stage:
        members = [await stage.join(node, RUN) for node in "ab"]
        others = [await stage.join(node, OTHER) for node in "ab"]
        for member in (*members, *others):
            await taken(member)
        watcher = await stage.engine.watch(RUN, 0)
        await watcher.take()
        where, name, named = MISTAKES[mistake]
        with monkeypatch.context() as patch:
            patch.setattr(where, name, tripping(getattr(where, name), RUN, named))
            confirms = [
                stage.engine.execute(run_id, commands.Confirm(member.node_id, member.lease.number, 1, 29500))
                for run_id, each in ((RUN, members), (OTHER, others))
                for member in each
            ]
            tasks = await begun(*confirms)
            # Commands that were durable before the error may succeed.
            for outcome in await asyncio.gather(*tasks[:2], return_exceptions=True):
                assert isinstance(outcome, RunBroken) or where is HostedRun
            await asyncio.gather(*tasks[2:])
        for member in others:
            assert (await taken(member)).phase == pb.PHASE_FINAL
        for member in members:
            assert isinstance(await refusal_of(member.updates.take()), RunBroken)
        assert isinstance(await refusal_of(watcher.take()), RunBroken)
        for ask in (
            stage.join("a", RUN),
            stage.engine.get_run(RUN),
            stage.engine.watch(RUN, 0),
            stage.engine.resume(RUN, "a", members[0].lease.number, 1, members[0].lease.token),
            stage.engine.execute(RUN, commands.Restart("by hand")),
        ):
            assert isinstance(await refusal_of(ask), RunBroken)
        with pytest.raises(RunBroken):
            stage.engine.history(RUN)
        with pytest.raises(RunBroken):
            stage.engine.check_lease(RUN, "a", members[0].lease.number, members[0].lease.token)
        assert [(run.run_id, run.broken) for run in await stage.list_runs()] == [
            (OTHER, ""),
            (RUN, "KeyError"),
        ]
        (line,) = [
            record for record in caplog.records if "stopped by an unexpected error" in record.getMessage()
        ]
        assert line.exc_info is not None
        durable = stage.journal.durable
    revisions = [each.revision for each in durable if isinstance(each, Record) and each.run_id == RUN]
    assert revisions == list(range(1, len(revisions) + 1))
    async with staged(Stage(durable=durable)) as again:
        resumed = await again.engine.resume(RUN, "a", members[0].lease.number, 4, members[0].lease.token)
        assert (await taken(resumed)).assignment.round == 1


async def test_a_mistake_in_a_deadline_stops_that_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error happens without a request: here while an idle run is forgotten."""
    async with staged(Stage(limits=RendezvousLimits(run_ttl=10.0))) as stage:
        for run_id in (RUN, OTHER):
            member = await stage.join("a", run_id)
            await stage.engine.execute(run_id, commands.Leave("a", member.lease.number, "enough"))

        def trip(run_id: str) -> None:
            if run_id == RUN:
                raise KeyError("planted")

        monkeypatch.setattr(stage, "forget_run", trip)
        stage.now += 10
        await stage.list_runs()
        assert [run.broken for run in await stage.list_runs()] == ["KeyError"]
        await stage.join("a", OTHER)


async def test_a_run_that_can_not_be_recovered_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service starts, with all other runs; nothing of this one is deleted, its store included."""
    async with opened() as scene:
        await scene.join("a", OTHER)
        durable = list(scene.journal.durable)
    with monkeypatch.context() as patch:
        trip = tripping(recovery._fold, RUN, lambda run, record, *_: record.run_id)
        patch.setattr(recovery, "_fold", trip)
        async with opened(ShardJournal(durable)) as second:
            await idle()
            engine, store = second.shard.engine, second.shard.store
            assert isinstance(await refusal_of(engine.get_run(RUN)), RunBroken)
            assert isinstance(await refusal_of(second.join("c", RUN)), RunBroken)
            assert isinstance(
                await refusal_of(store.write(RUN, Set(writer=scene.writer, round=0, key="k", value=b""))),
                RunBroken,
            )
            assert (await engine.get_run(OTHER)).run_id == OTHER
            await second.join("b", OTHER)
            kept = [entry for entry in second.journal.durable if entry.run_id == RUN]
            assert kept == [entry for entry in durable if entry.run_id == RUN]
            durable = list(second.journal.durable)
    async with opened(ShardJournal(durable)) as third:
        assert (await third.shard.engine.get_run(RUN)).round == 1
        assert await third.shard.store.get(RUN, 0, "here", 0) == b"value"


async def test_a_mistake_in_the_store_of_one_run_stops_that_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its waiting requests fail too. Stores of other runs go on, and so does the run itself."""
    async with opened() as scene:
        other = await scene.join("a", OTHER)
        store = scene.shard.store
        (waiting,) = await begun(store.get(RUN, 0, "later", 3600.0))
        trip = tripping(RunStore._take_over, RUN, lambda run_store, *_: run_store.spaces.run_id)
        monkeypatch.setattr(RunStore, "_take_over", trip)
        for ask in (
            store.write(RUN, Set(writer=scene.writer, round=0, key="k", value=b"")),
            store.write(RUN, Set(writer=scene.writer, round=0, key="k", value=b"")),
            store.get(RUN, 0, "here", 0),
            waiting,
        ):
            assert isinstance(await refusal_of(ask), RunBroken)
        await store.write(OTHER, Set(writer=writer_of(other), round=0, key="k", value=b""))
        await scene.restart()


async def test_a_wait_for_a_key_of_a_run_that_is_stopped_fails() -> None:
    async with opened() as scene:
        (waiting,) = await begun(scene.shard.store.get(RUN, 0, "later", 3600.0))
        scene.shard.engine._stop(RUN, KeyError("planted"))
        assert isinstance(await refusal_of(waiting), RunBroken)
