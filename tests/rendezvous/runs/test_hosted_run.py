"""Watchers receive every state that lasts, and always the last one; a large run is sent less often."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import pytest

from rallypoint.rendezvous.base.cooperative import LatestValue
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.commands import SERVICE, NodeIsEvicted, RevisionAhead, RunNotFound
from rallypoint.rendezvous.runs import run as hosted_run
from rallypoint.rendezvous.runs.run import PublishedRun
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.engine_fixtures import RUN, Stage, begun, idle, staged, taken

PACE = 1.0


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """Runs of two nodes."""
    async with staged(Stage()) as stage:
        yield stage


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of more than two nodes is large, and sent once a second if it has four."""
    monkeypatch.setattr(hosted_run, "_CHEAP", 2 * hosted_run._BUILD)
    monkeypatch.setattr(hosted_run, "_SEND", 0.0)
    monkeypatch.setattr(hosted_run, "_SHARE", 4 * hosted_run._BUILD / PACE)


def waits(slot: LatestValue[PublishedRun]) -> bool:
    """Return True if a value waits in a slot."""
    return slot._value is not None


async def seen(slot: LatestValue[PublishedRun]) -> pb.Run:
    published = await slot.take()
    assert published is not None
    return published.run


# ---- watchers of a large run


@pytest.mark.usefixtures("large")
async def test_a_large_run_is_published_at_intervals(stage: Stage) -> None:
    """The first change is sent at once; those that follow quickly are sent together, when it is time."""
    await stage.running("a", "b")
    await stage.join("c")
    watcher = await stage.engine.watch(RUN, 0)
    await seen(watcher)
    await stage.later(PACE)
    await stage.join("d")
    assert (await seen(watcher)).node_count == 4
    await stage.join("e")
    await stage.join("f")
    assert not waits(watcher)
    await stage.later(PACE - 0.01)
    assert not waits(watcher)
    await stage.later(0.01)
    assert (await seen(watcher)).node_count == 6
    await stage.later(10 * PACE)
    assert not waits(watcher)


@pytest.mark.usefixtures("large")
async def test_the_last_state_is_published_without_a_further_change(stage: Stage) -> None:
    """The engine wakes up for it by itself: its next deadline is no later than that."""
    for node_id in ("a", "b", "c"):
        await stage.join(node_id)
    watcher = await stage.engine.watch(RUN, 0)
    await stage.join("d")
    await stage.join("e")
    deadline = stage.engine._schedule.next()
    assert deadline is not None
    assert deadline <= stage.now + PACE
    told = await seen(watcher)
    stage.now = deadline
    await stage.list_runs()
    assert told.revision < (await seen(watcher)).revision == (await stage.engine.get_run(RUN)).revision


@pytest.mark.usefixtures("large")
async def test_the_end_of_a_large_run_is_published_at_once(stage: Stage) -> None:
    """No further change can come."""
    for node_id in ("a", "b", "c", "d"):
        await stage.join(node_id)
    watcher = await stage.engine.watch(RUN, 0)
    await stage.join("e")
    await stage.join("f")
    await stage.engine.close_run(RUN, "enough")
    assert (await seen(watcher)).phase == pb.PHASE_CLOSED
    assert await watcher.take() is None


@pytest.mark.usefixtures("large")
async def test_a_new_watcher_of_a_large_run_gets_a_state_at_once(stage: Stage) -> None:
    """It gets the state that the others got last, and all get the next one: for the others, nothing is sent twice."""
    for node_id in ("a", "b", "c"):
        await stage.join(node_id)
    first = await stage.engine.watch(RUN, 0)
    await seen(first)
    await stage.later(PACE)
    await stage.join("d")
    await stage.join("e")
    told = await seen(first)
    second = await stage.engine.watch(RUN, 0)
    assert await seen(second) == told
    assert not waits(first)
    await stage.later(PACE)
    present = await stage.engine.get_run(RUN)
    assert await seen(second) == await seen(first) == present
    assert told.revision < present.revision
    await stage.later(10 * PACE)
    assert not waits(first)
    assert not waits(second)


async def test_every_change_of_a_small_run_is_published(stage: Stage) -> None:
    """There is no delay."""
    await stage.join("a")
    watcher = await stage.engine.watch(RUN, 0)
    await seen(watcher)
    for count, node_id in enumerate(("b", "c", "d"), 2):
        await stage.join(node_id)
        assert (await seen(watcher)).node_count == count


async def test_a_small_run_with_many_watchers_is_published_at_intervals(stage: Stage) -> None:
    """All get the same message, which is encoded once; sending it takes at most a tenth of the time."""
    await stage.join("a")
    watchers = [await stage.engine.watch(RUN, 0) for _ in range(100)]
    await stage.later(0.2)
    for watcher in watchers:
        await seen(watcher)
    await stage.join("b")
    [first, second, *_] = [await watcher.take() for watcher in watchers]
    assert first is second
    assert first is not None
    assert pb.WatchRunResponse.FromString(first.response).run == first.run
    assert first.response is first.response
    await stage.join("c")
    assert not any(waits(watcher) for watcher in watchers)
    await stage.later(0.2)
    assert (await seen(watchers[0])).node_count == 3


async def test_a_new_watcher_causes_no_message_to_the_others(stage: Stage) -> None:
    """A new watcher causes no message to the others."""
    await stage.join("a")
    first = await stage.engine.watch(RUN, 0)
    await seen(first)
    await stage.engine.watch(RUN, 0)
    assert not waits(first)


async def test_a_watcher_at_the_latest_revision_does_not_get_it_again(stage: Stage) -> None:
    """A watcher that has seen the latest state does not get it, though no watcher received it before."""
    await stage.join("a")
    gone = await stage.engine.watch(RUN, 0)
    stage.engine.unwatch(RUN, gone)
    await stage.join("b")
    revision = (await stage.engine.get_run(RUN)).revision
    watcher = await stage.engine.watch(RUN, revision)
    await stage.later(1)
    assert not waits(watcher)
    await stage.join("c")
    assert (await seen(watcher)).revision == revision + 1


# ---- followers


async def test_a_follower_receives_the_latest_revision(stage: Stage) -> None:
    """It gets the revision at once and with every change, and nothing if the engine checks an unchanged run."""
    await stage.join("a")
    follower = stage.engine.follow(RUN, 0)
    assert await follower.take() == 2
    await stage.join("b")
    assert await follower.take() == 4
    (waiting,) = await begun(follower.take())
    await stage.later(14)
    assert not waiting.done()
    await stage.engine.close_run(RUN, "enough")
    assert await waiting == 5
    assert await follower.take() is None


async def test_a_follower_receives_no_revision_before_it_is_durable(stage: Stage) -> None:
    """It can't follow from a later revision either: that does not exist yet."""
    await stage.join("a")
    follower = stage.engine.follow(RUN, 0)
    assert await follower.take() == 2
    stage.journal.hold()
    (joining,) = await begun(stage.join("b"))
    await stage.journal.held()
    (waiting,) = await begun(follower.take())
    assert not waiting.done()
    assert stage.engine.history(RUN).latest == 2
    with pytest.raises(RevisionAhead, match="it is at 2"):
        stage.engine.follow(RUN, 3)
    stage.journal.release()
    await joining
    assert await waiting == 4
    assert await stage.engine.follow(RUN, 4).take() == 4


async def test_a_run_that_is_over_is_followed_to_its_end(stage: Stage) -> None:
    """No follower stays registered."""
    await stage.join("a")
    await stage.engine.close_run(RUN, "enough")
    follower = stage.engine.follow(RUN, 0)
    assert (await follower.take(), await follower.take()) == (3, None)
    assert stage.engine._runs[RUN].followers == set()
    with pytest.raises(RunNotFound):
        stage.engine.follow("other", 0)


async def test_a_follower_that_was_dropped_receives_nothing(stage: Stage) -> None:
    """It is no longer registered; for an unknown run, `unfollow` does nothing."""
    await stage.join("a")
    follower = stage.engine.follow(RUN, 0)
    await follower.take()
    stage.engine.unfollow(RUN, follower)
    stage.engine.unfollow("other", follower)
    await stage.join("b")
    (waiting,) = await begun(follower.take())
    assert not waiting.done()
    waiting.cancel()


# ---- nodes that an operator evicts


async def test_an_evicted_node_and_the_others_receive_the_reason(stage: Stage) -> None:
    """Its stream ends with NODE_EVICTED, so it stops its workers and does not come back."""
    a, b = await stage.running("a", "b")
    await stage.engine.execute(RUN, commands.Evict("a", "bad memory"), SERVICE)
    with pytest.raises(NodeIsEvicted, match="bad memory"):
        await a.updates.take()
    update = await taken(b)
    assert update.phase == pb.PHASE_JOINABLE
    assert update.last_round_end.cause == pb.ROUND_END_CAUSE_NODE_EVICTED
    stage.engine.disconnect(a)
    for coming_back in (stage.join("a"), stage.engine.resume(RUN, "a", a.lease.number, 0, a.lease.token)):
        with pytest.raises(NodeIsEvicted):
            await coming_back
    with pytest.raises(NodeIsEvicted):
        stage.engine.check_lease(RUN, "a", a.lease.number, a.lease.token)


async def test_a_node_that_is_taken_out_and_back_in_at_once_has_one_stream(stage: Stage) -> None:
    """Evicted, readmitted and joined in one commit: the old stream ends, and the new one stays."""
    a, _ = await stage.running("a", "b")
    stage.journal.hold()
    (held,) = await begun(stage.join("n", "other"))
    await stage.journal.held()
    together = await begun(
        stage.engine.execute(RUN, commands.Evict("a", "bad memory")),
        stage.engine.execute(RUN, commands.Readmit("a", "mended")),
    )
    (joining,) = await begun(stage.join("a"))
    stage.journal.release()
    await held
    for task in together:
        await task
    again = await joining
    with pytest.raises(NodeIsEvicted):
        await a.updates.take()
    assert (await taken(again)).phase == pb.PHASE_FROZEN
    stage.engine.disconnect(a)
    await stage.later(3)
    assert stage.engine._runs[RUN].members["a"] is again


# ---- the exit barrier


async def test_members_are_notified_that_the_exit_barrier_is_over() -> None:
    """It ends at its deadline, without a request: nodes that succeeded may go, and the others stay in their round."""
    async with staged(Stage(exit_barrier_timeout=10.0)) as stage:
        a, b = await stage.running("a", "b")
        await stage.engine.execute(RUN, commands.ReportSuccess("a", a.lease.number, 1))
        (waiting,) = await begun(a.updates.take())
        stage.now += 10
        await stage.list_runs()
        told = await waiting
        assert told is not None
        assert (told.phase, told.exit_barrier_passed) == (pb.PHASE_FINAL, True)
        assert (await taken(b)).assignment.round == 1
        await stage.leave(a)
        await stage.engine.execute(RUN, commands.ReportSuccess("b", b.lease.number, 1))
        assert (await taken(b)).run_end.outcome == pb.OUTCOME_SUCCEEDED


# ---- deadlines that come nearer


async def test_a_heartbeat_after_a_restart_may_bring_a_deadline_nearer() -> None:
    """A node with a short term that comes back and dies is lost after that term, not after the one of the restart."""
    async with staged(Stage(keep_alive_interval=0.5)) as first:
        members = await first.running("a", "b")
    async with staged(Stage(durable=first.journal.durable, keep_alive_interval=0.5)) as second:
        await second.list_runs()
        revision = (await second.engine.get_run(RUN)).revision
        resumed = [
            await second.engine.resume(RUN, each.node_id, each.lease.number, revision, each.lease.token)
            for each in members
        ]
        await idle()
        assert second.engine._schedule.next() == second.now + 1.5
        second.now += 1.0
        second.engine.renew(resumed[0])
        assert second.engine._schedule.next() == second.now + 0.5
        second.now += 0.5
        await second.list_runs()
        run = await second.engine.get_run(RUN)
        assert [node.node_id for node in run.nodes] == ["a"]


async def test_an_idle_run_is_looked_at_when_it_expires(stage: Stage) -> None:
    """A run with a node has no such deadline."""
    member = await stage.join("a")
    hosted = stage.engine._runs[RUN]
    assert hosted.expires(50.0) == math.inf
    await stage.leave(member)
    assert hosted.expires(50.0) == stage.now + 50.0
    deadline = hosted.next_deadline(5.0)
    assert deadline is not None
    assert deadline <= stage.now + 5.0
