"""A process that may have lost its runs sends nothing about them: a reply without a commit needs an ownership check."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rallypoint.rendezvous.base.entries import Operation, Writer
from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.base.refusals import KeyWaitTimedOut
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.commands import LeaseLost
from rallypoint.rendezvous.state.core import SetState
from rallypoint.rendezvous.store.writes import CompareSet, DeleteKey, Set
from rendezvous.shard_fixtures import RUN, Scene, begun, idle, opened, refusal_of

# Requests that are answered without a commit, besides those of `Scene.requests`.
Asks = Callable[[Scene], Awaitable[object]]


async def wait_in_vain(scene: Scene) -> object:
    """Wait for an absent key, long enough that an ownership check only at the beginning would miss the loss."""
    waiting = asyncio.create_task(scene.shard.store.get(RUN, 0, "nowhere", 0.2))
    await idle()
    scene.lost = OSError("the session is lost")
    return await waiting


WITHOUT_A_COMMIT: dict[str, Asks] = {
    "a command that changes nothing": lambda scene: scene.confirm(scene.members[0]),
    "a refused command": lambda scene: scene.confirm(scene.members[0], round_=7),
    "a comparison that fails": lambda scene: scene.shard.store.write(
        RUN, CompareSet(writer=scene.writer, round=0, key="here", expected=b"other", desired=b"new")
    ),
    "a deletion of nothing": lambda scene: scene.shard.store.write(
        RUN, DeleteKey(writer=scene.writer, round=0, key="nowhere")
    ),
    "a write in a round to come": lambda scene: scene.shard.store.write(
        RUN, Set(writer=scene.writer, round=9, key="key", value=b"")
    ),
    "a write with a lease that nobody holds": lambda scene: scene.shard.store.write(
        RUN, Set(round=0, key="key", value=b"", writer=Writer("a", 999))
    ),
    "a state that loses": lambda scene: scene.set_state(b"new", b"an old token"),
    "a state with a lease that nobody holds": lambda scene: scene.set_state(
        b"new", scene.token, writer=Writer("a", 999)
    ),
    "a key of a round to come": lambda scene: scene.shard.store.get(RUN, 9, "key", 1.0),
    "an unknown run": lambda scene: scene.shard.engine.get_run("nowhere"),
    "keys of an unknown run": lambda scene: scene.shard.store.get("nowhere", 0, "key", 1.0),
}
WITH_A_COMMIT = ["join", "execute", "close", "set", "set state"]


@pytest.mark.parametrize("name", WITHOUT_A_COMMIT)
async def test_a_result_without_a_commit_is_not_sent(name: str) -> None:
    """Neither a response nor a refusal is sent: both may be outdated. Once the check passes, the request gets another
    result, so the check was the only cause."""
    async with opened() as scene:
        ask = WITHOUT_A_COMMIT[name]
        appends = scene.journal.appends
        scene.lost = OSError("the session is lost")
        refusal = await refusal_of(ask(scene))
        assert isinstance(refusal, NotOwner), repr(refusal)
        assert refusal.owner is None
        scene.lost = None
        task = asyncio.ensure_future(ask(scene))
        await asyncio.wait([task])
        assert not isinstance(task.exception(), NotOwner)
        assert scene.journal.appends == appends


async def test_reads_are_not_answered() -> None:
    """Every read, at once or in a step, and every new watch."""
    async with opened() as scene:
        asks = {name: ask for name, ask in scene.requests().items() if name not in WITH_A_COMMIT}
        assert len(asks) == 14
        scene.lost = OSError("the session is lost")
        for name, ask in asks.items():
            assert isinstance(await refusal_of(ask()), NotOwner), name
        scene.lost = None
        for ask in asks.values():
            await ask()


async def test_a_wait_that_is_over_reveals_nothing_of_the_key() -> None:
    """Another owner may have set it."""
    async with opened() as scene:
        assert isinstance(await refusal_of(wait_in_vain(scene)), NotOwner)
        scene.lost = None
        assert isinstance(await refusal_of(scene.shard.store.get(RUN, 0, "nowhere", 0.0)), KeyWaitTimedOut)


async def test_a_commit_needs_no_further_check() -> None:
    """Its results are sent without another check: the journal has checked already."""
    async with opened() as scene:
        token = scene.token
        scene.journal.hold()
        tasks = await begun(
            scene.restart(), scene.set("new", b"value"), scene.set_state(b"new", token), scene.join("c")
        )
        await scene.journal.held()
        scene.lost = OSError("the session is lost")
        asked = scene.guarded
        scene.journal.release()
        # The join came while the restart was being committed, and has a commit of its own.
        for task in tasks:
            await task
        assert scene.guarded == asked


async def test_watchers_get_no_update() -> None:
    """A step without a commit sends updates neither to members nor to watchers, although some are due."""
    async with opened() as scene:
        watcher = await scene.shard.engine.watch(RUN, scene.revision)
        run = scene.shard.engine._runs[RUN]
        for lost in (OSError("the session is lost"), None):
            scene.lost = lost
            run.watchers._published = (
                None  # as if it were a large run, whose watchers get an update only now and then
            )
            scene.shard.engine._schedule.put(RUN, scene.now)
            (reading,) = await begun(scene.shard.engine.get_run(RUN))
            assert isinstance(reading.exception(), NotOwner) == (lost is not None)
            (listening,) = await begun(watcher.take())
            assert listening.done() == (lost is None)
            listening.cancel()


async def test_a_lost_process_that_stays_does_not_spin() -> None:
    """After the check refuses, a deadline that has passed stays unhandled: it does not wake the engine repeatedly."""
    async with opened() as scene:
        scene.lost = OSError("the session is lost")
        scene.shard.engine._schedule.put(RUN, scene.now)
        assert isinstance(await refusal_of(scene.shard.engine.get_run(RUN)), NotOwner)
        await idle()
        asked = scene.guarded
        await idle()
        assert scene.guarded == asked


async def test_a_lost_lease_is_refused_only_once_the_loss_is_durable() -> None:
    """A lost lease is refused once the loss is durable; that commit proves ownership."""
    async with opened() as scene:
        member = scene.members[0]
        leave = commands.Leave(member.node_id, member.lease.number, "told to stop")
        scene.journal.hold()
        leaving, writing = await begun(
            scene.shard.engine.execute(RUN, leave),
            scene.shard.store.write(RUN, Set(round=0, key="key", value=b"", writer=scene.writer)),
        )
        await scene.journal.held()
        assert not writing.done()
        scene.journal.release()
        await leaving
        assert isinstance(await refusal_of(writing), LeaseLost)


async def test_a_request_behind_a_commit_is_refused_after_the_loss() -> None:
    """The check passed when the request came, but fails when it is decided."""
    async with opened() as scene:
        store, states, token = scene.shard.store, scene.shard.states, scene.token
        operation = Operation("client", 0, 1)
        await scene.set("key", b"value", operation)
        scene.journal.hold()
        first = await begun(scene.set("new", b"value"), scene.set_state(b"new", token))
        await scene.journal.held()
        behind = [
            *await begun(scene.set("key", b"value", operation)),
            *await begun(store.write(RUN, DeleteKey(writer=scene.writer, round=0, key="nowhere"))),
            *await begun(states.set(SetState(run_id=RUN, state=b"newer", token=b"an old token"))),
        ]
        scene.lost = OSError("the session is lost")
        scene.journal.release()
        for task in first:
            await task
        for each in behind:
            assert isinstance(await refusal_of(each), NotOwner)


async def test_a_repetition_is_guarded_too() -> None:
    """The first attempt may have been repeated at another owner, and its slot used again."""
    async with opened() as scene:
        operation = Operation("client", 0, 1)
        write = Set(writer=scene.writer, round=0, key="key", value=b"value", operation=operation)
        request = SetState(run_id=RUN, state=b"new", token=scene.token, operation=operation)
        await scene.shard.store.write(RUN, write)
        await scene.shard.states.set(request)
        scene.lost = OSError("the session is lost")
        assert isinstance(await refusal_of(scene.shard.store.write(RUN, write)), NotOwner)
        assert isinstance(await refusal_of(scene.shard.states.set(request)), NotOwner)
