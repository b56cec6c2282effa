"""A shard ends by a hand-over, or at once. No request waits for ever, and none gets an answer that may be wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rallypoint.rendezvous.api.event_pages import EventServicer
from rallypoint.rendezvous.base.entries import Operation, StoreChange
from rallypoint.rendezvous.base.errors import NotOwner, OutcomeUnknown
from rallypoint.rendezvous.base.refusals import JournalFailed
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.journal.journal import JournalError, OwnershipLost
from rallypoint.rendezvous.shard.locator import SingleShardLocator
from rallypoint.rendezvous.state.core import SPACE, SetState
from rallypoint.rendezvous.store.writes import Add
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.serving.flow import Turns
from rendezvous.shard_fixtures import (
    OWNER,
    RUN,
    Scene,
    ShardJournal,
    begun,
    elsewhere,
    idle,
    opened,
    refusal_of,
)

REQUESTS = [
    "join",
    "resume",
    "execute",
    "close",
    "get run",
    "list runs",
    "watch run",
    "history",
    "settings",
    "follow",
    "set",
    "get",
    "multi get",
    "wait",
    "check",
    "list keys",
    "get state",
    "set state",
    "watch state",
]


def assert_refused(error: Exception) -> None:
    """Check that nothing was done, and that the error has the owner."""
    assert isinstance(error, NotOwner), repr(error)
    assert error.owner == OWNER


def assert_unknown(error: Exception) -> None:
    """Check that the outcome is unknown, and that the error has the owner."""
    assert isinstance(error, OutcomeUnknown), repr(error)
    assert (error.run_id, error.owner) == (RUN, OWNER)


async def three_commits(scene: Scene) -> list[asyncio.Task[Any]]:
    """Begin changes of the run, of its store and of its state, each in a commit that is under way."""
    before = scene.journal.appends
    scene.journal.hold()
    tasks = await begun(scene.restart(), scene.set("new", b"value"), scene.set_state(b"new", scene.token))
    assert scene.journal.appends == before + 3
    return tasks


async def behind_them(scene: Scene) -> list[asyncio.Task[Any]]:
    """Begin requests that wait while commits are under way: for the next, or for a key."""
    engine, store = scene.shard.engine, scene.shard.store
    return await begun(
        engine.get_run(RUN),
        engine.close_run(RUN, "over"),
        scene.join("c"),
        scene.set("newer", b"value"),
        scene.set_state(b"newer", scene.token),
        store.get(RUN, 0, "nowhere", 3600.0),
        store.multi_get(RUN, 0, ["here", "nowhere"], 3600.0),
        store.wait(RUN, 1, ["nowhere"], 3600.0),
    )


# ---- hand-over


async def test_commits_under_way_are_finished_and_answered() -> None:
    """The commits that have begun are the last: requests behind them are refused before they are done."""
    async with opened() as scene:
        under_way = await three_commits(scene)
        waiting = await behind_them(scene)
        (retiring,) = await begun(scene.shard.retire(elsewhere))
        for task in waiting:
            assert_refused(await refusal_of(task))
        assert not any(task.done() for task in [*under_way, retiring])
        assert not scene.journal.closed
        scene.journal.release()
        await retiring
        for task in under_way:
            await task
        assert scene.journal.closed
        assert scene.failures == []


async def test_the_next_owner_finds_all_that_was_answered() -> None:
    """It finds no effect of the refused requests."""
    async with opened() as scene:
        under_way = await three_commits(scene)
        waiting = await behind_them(scene)
        (retiring,) = await begun(scene.shard.retire(elsewhere))
        scene.journal.release()
        await asyncio.wait([retiring, *under_way, *waiting])
    async with opened(ShardJournal(scene.journal.durable)) as next_:
        run = await next_.shard.engine.get_run(RUN)
        assert [node.node_id for node in run.nodes] == ["a", "b"]
        assert (run.last_round_end.round, run.HasField("run_end")) == (1, False)
        assert next_.shard.store.list_keys(RUN, 0, "", "", 10) == ["here", "new"]
        state = next_.shard.states.get(RUN)
        assert state is not None
        assert state.state == b"new"


async def test_streams_stay_open_until_the_new_owner_is_known() -> None:
    """Pending updates are sent first; then comes the refusal, with the new owner's address."""
    async with opened() as scene:
        streams = await scene.streams()
        await scene.restart()
        await scene.set_state(b"new", scene.token)
        await scene.shard.retire(elsewhere)
        assert not any(stream.ended for stream in streams.values())
        update = await scene.members[0].updates.take()
        assert update is not None
        assert update.phase == pb.PHASE_FROZEN
        scene.shard.end_streams(elsewhere)
        for name, stream in streams.items():
            if name != "member":
                assert await stream.take() is not None
            assert_refused(await refusal_of(stream.take()))


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("end", ["retire", "halt"])
async def test_every_later_request_is_refused(name: str, end: str) -> None:
    """It is refused at once, with the owner's address."""
    async with opened() as scene:
        assert list(scene.requests()) == REQUESTS
        ask = scene.requests()[name]
        if end == "retire":
            await scene.shard.retire(elsewhere)
        else:
            scene.shard.halt(elsewhere)
        appends = scene.journal.appends
        assert_refused(await refusal_of(ask()))
        assert scene.journal.appends == appends


async def test_no_node_loses_its_lease_while_its_run_is_handed_over() -> None:
    """This holds however long it takes: a silent node may be connected to the next owner."""
    async with opened() as scene:
        await scene.shard.retire(elsewhere)
        appends = scene.journal.appends
        scene.now += 3600.0
        scene.shard.engine.disconnect(scene.members[0])
        await idle()
        assert scene.journal.appends == appends


async def test_a_command_of_a_member_during_the_hand_over_is_refused() -> None:
    """A heartbeat is accepted, but has no effect."""
    async with opened() as scene:
        await scene.shard.retire(elsewhere)
        scene.shard.engine.renew(scene.members[0])
        assert_refused(await refusal_of(scene.confirm(scene.members[0])))


async def test_a_long_deletion_does_not_hold_up_the_hand_over() -> None:
    """The next owner deletes the rest when it opens the journal."""
    async with opened() as scene:
        for number in range(600):
            await scene.shard.store.write(
                RUN, Add(writer=scene.writer, round=1, key=f"key {number}", amount=1)
            )
        await scene.restart()  # the round is over, and its keys with it
        await scene.shard.retire(elsewhere)
        left = [entry for entry in scene.journal.kept().store_entries if entry.round == 1]
        assert left
    async with opened(ShardJournal(scene.journal.durable)) as next_:
        await asyncio.gather(*next_.shard.store.committing())
        assert [entry for entry in next_.journal.kept().store_entries if entry.round == 1] == []


async def test_nothing_is_written_after_the_last_commit() -> None:
    """Not even its consequences are: the next owner deletes the keys of a round that it ended."""
    async with opened() as scene:
        await scene.shard.store.write(RUN, Add(writer=scene.writer, round=1, key="key", amount=1))
        scene.journal.hold()
        (restarting,) = await begun(scene.restart())
        (retiring,) = await begun(scene.shard.retire(elsewhere))
        appends = scene.journal.appends
        scene.journal.release()
        await retiring
        await restarting
        await idle()
        assert scene.journal.appends == appends


async def test_to_retire_twice_is_to_retire_once() -> None:
    """The second call waits for the first."""
    async with opened() as scene:
        await three_commits(scene)
        retiring = await begun(scene.shard.retire(elsewhere), scene.shard.retire(NotOwner))
        assert not any(task.done() for task in retiring)
        scene.journal.release()
        await asyncio.gather(*retiring)


async def test_a_journal_that_breaks_in_the_last_commit() -> None:
    """`on_failure` is called once; requests that wait for the commit fail as usual, and the hand-over ends."""
    async with opened() as scene:
        run, store, state = await three_commits(scene)
        (retiring,) = await begun(scene.shard.retire(elsewhere))
        scene.journal.break_()
        await retiring
        assert isinstance(await refusal_of(run), JournalError)
        assert isinstance(await refusal_of(store), JournalFailed)
        assert isinstance(await refusal_of(state), JournalFailed)
        assert [str(error) for error in scene.failures] == ["the disk is full"]


# ---- at once


async def test_a_lost_shard_leaves_no_request_waiting() -> None:
    """A request in a commit gets OutcomeUnknown, all others NotOwner."""
    async with opened() as scene:
        under_way = await three_commits(scene)
        waiting = await behind_them(scene)
        await scene.shard.drop(elsewhere)
        for task in under_way:
            assert_unknown(await refusal_of(task))
        for task in waiting:
            assert_refused(await refusal_of(task))


async def test_a_lost_shard_neither_publishes_nor_writes() -> None:
    """Pending updates are not sent; and the journal, whose next commit is another owner's, is not touched."""
    async with opened() as scene:
        streams = await scene.streams()
        await scene.restart()
        await scene.set_state(b"new", scene.token)
        tasks = [*await three_commits(scene), *await behind_them(scene)]
        appends, durable = scene.journal.appends, list(scene.journal.durable)
        await scene.shard.drop(elsewhere)
        scene.journal.release()
        await asyncio.wait(tasks)
        scene.now += 3600.0
        await idle()
        for stream in streams.values():
            assert_refused(await refusal_of(stream.take()))
        assert (scene.journal.appends, scene.journal.durable) == (appends, durable)
        assert not scene.journal.closed


@pytest.mark.parametrize("end", ["halt", "end_streams"])
async def test_a_watcher_of_a_long_history_gets_not_owner(end: str) -> None:
    """A watcher that reads old events gets NotOwner instead of the next message."""
    async with opened() as scene:
        for _ in range(100):
            await scene.shard.engine.execute(RUN, commands.Evict("elsewhere", "to and fro"))
            await scene.shard.engine.execute(RUN, commands.Readmit("elsewhere", "to and fro"))
        told: list[pb.WatchEventsResponse] = []

        class Watcher:
            async def send(self, response: pb.WatchEventsResponse) -> None:
                told.append(response)
                if end == "halt":
                    scene.shard.halt(elsewhere)
                else:
                    scene.shard.end_streams(elsewhere)

        events = EventServicer(SingleShardLocator(scene.shard), lambda: None, Turns(1))
        watcher: Any = Watcher()
        assert_refused(await refusal_of(events.watch(pb.WatchEventsRequest(run_id=RUN), watcher)))
        assert len(told) == 1


async def test_a_resume_in_the_same_step_as_a_commit_was_not_done() -> None:
    """It changes nothing, so it gets NotOwner, not OutcomeUnknown."""
    async with opened() as scene:
        scene.journal.hold()
        member = scene.members[0]
        tasks = await begun(
            scene.restart(),
            scene.shard.engine.resume(RUN, member.node_id, member.lease.number, 1, member.lease.token),
        )
        await scene.journal.held()
        scene.shard.halt(elsewhere)
        assert_unknown(await refusal_of(tasks[0]))
        assert_refused(await refusal_of(tasks[1]))


@pytest.mark.parametrize("came_through", [True, False])
async def test_a_write_repeated_at_the_next_owner_takes_effect_once(came_through: bool) -> None:
    """With its operation it takes effect once, also if the commit came through."""
    async with opened() as scene:
        add = Add(writer=scene.writer, round=0, key="counter", amount=5, operation=Operation("client", 0, 1))
        request = SetState(run_id=RUN, state=b"newer", token=scene.token, operation=Operation("client", 0, 1))
        if came_through:
            scene.journal.hold_answers()
        else:
            scene.journal.hold()
        tasks = await begun(scene.shard.store.write(RUN, add), scene.shard.states.set(request))
        await scene.shard.drop(elsewhere)
        for task in tasks:
            assert_unknown(await refusal_of(task))
    keys = {entry.key for entry in scene.journal.kept().store_entries}
    assert ("counter" in keys) == came_through
    async with opened(ShardJournal(scene.journal.durable)) as next_:
        for _ in range(2):
            assert await next_.shard.store.write(RUN, add) == 5
            outcome = await next_.shard.states.set(request)
            assert outcome.has_set


async def test_to_be_lost_while_retiring_ends_both() -> None:
    """The hand-over ends without closing the journal."""
    async with opened() as scene:
        under_way = await three_commits(scene)
        (retiring,) = await begun(scene.shard.retire(NotOwner))
        await scene.shard.drop(elsewhere)
        await retiring
        for task in under_way:
            assert_unknown(await refusal_of(task))
        scene.journal.release()
        await idle()
        assert not scene.journal.closed


async def test_a_hand_over_that_takes_too_long_can_be_given_up() -> None:
    """Its caller stops waiting, and drops the shard."""
    async with opened() as scene:
        under_way = await three_commits(scene)
        (retiring,) = await begun(scene.shard.retire(NotOwner))
        retiring.cancel()
        await asyncio.wait([retiring])
        await scene.shard.drop(elsewhere)
        for task in under_way:
            assert_unknown(await refusal_of(task))


async def test_a_drop_is_harmless_in_any_state() -> None:
    """It may be dropped twice, after a hand-over, after its journal broke, and while it is idle."""
    async with opened() as scene:
        await scene.shard.drop(elsewhere)
        await scene.shard.drop(NotOwner)
        await scene.shard.retire(NotOwner)
        assert not scene.journal.closed
        assert_refused(await refusal_of(scene.shard.engine.get_run(RUN)))
    async with opened() as scene:
        await scene.shard.retire(NotOwner)
        scene.shard.end_streams(NotOwner)
        await scene.shard.drop(elsewhere)
    async with opened() as scene:
        tasks = await three_commits(scene)
        scene.journal.break_()
        await asyncio.wait(tasks)
        await scene.shard.drop(elsewhere)
        for ask in scene.requests().values():
            assert_refused(await refusal_of(ask()))


# ---- a journal that another replica owns


@pytest.mark.parametrize("part", ["run", "store", "state"])
async def test_a_journal_that_another_replica_owns_ends_everything(part: str) -> None:
    """Any part may find out: all of them stop at the same moment, and the error is reported once."""
    async with opened() as scene:
        streams = await scene.streams()
        await scene.restart()  # an update that is still pending
        waiting = asyncio.create_task(scene.shard.store.get(RUN, 0, "nowhere", 3600.0))
        scene.journal.hold()
        changes: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "run": scene.restart,
            "store": lambda: scene.set("new", b"value"),
            "state": lambda: scene.set_state(b"new", scene.token),
        }
        (task,) = await begun(changes[part]())
        await scene.journal.held()
        scene.journal.lose()
        assert isinstance(await refusal_of(task), OutcomeUnknown)
        assert isinstance(await refusal_of(waiting), NotOwner)
        for name, stream in streams.items():
            assert isinstance(await refusal_of(stream.take()), NotOwner), name
        for ask in scene.requests().values():
            assert isinstance(await refusal_of(ask()), NotOwner)
        assert [type(error) for error in scene.failures] == [OwnershipLost]
        assert not scene.journal.closed


async def test_a_journal_that_broke_is_reported_once() -> None:
    """This holds for any number of failed commits: the caller drops the shard, or ends the process, once."""
    async with opened() as scene:
        tasks = [*await three_commits(scene), *await behind_them(scene)]
        scene.journal.break_()
        done, _ = await asyncio.wait(tasks[:5])
        assert all(isinstance(task.exception(), JournalError | JournalFailed) for task in done)
        assert [str(error) for error in scene.failures] == ["the disk is full"]


# ---- opening


async def test_a_journal_that_cannot_be_read_is_closed_again() -> None:
    """So another process can open it."""
    async with opened() as scene:
        await scene.shard.retire(elsewhere)
    nonsense = StoreChange(RUN, SPACE, "nobody knows", b"what this is")
    for damaged in (scene.journal.durable[1:], [*scene.journal.durable, nonsense]):
        journal = ShardJournal(damaged)
        with pytest.raises(JournalError, match=r"the journal (is damaged|can't be read)"):
            async with opened(journal):
                pass
        assert journal.closed


@pytest.mark.parametrize(("least", "lost_after"), [(10.0, 15.0), (20.0, 20.0), (60.0, 60.0)])
async def test_a_take_over_gives_every_lease_time_to_come_back(least: float, lost_after: float) -> None:
    """It is a full new term, and at least `least_lease`; then a node that did not come back is lost."""
    async with opened() as scene:
        await scene.shard.retire(elsewhere)
    async with opened(ShardJournal(scene.journal.durable), least_lease=least) as next_:
        next_.now += lost_after - 0.5
        assert len((await next_.shard.engine.get_run(RUN)).nodes) == 2
        next_.now += 0.5
        assert len((await next_.shard.engine.get_run(RUN)).nodes) == 0
