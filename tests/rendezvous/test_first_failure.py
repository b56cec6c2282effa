"""The engine finds the first failure of a run and sends it to all nodes; a slow disk does not change it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.commands import NodeIsEvicted
from rallypoint.rendezvous.core.failures import SETTLE_WINDOW
from rallypoint.rendezvous.core.state import ReportedFailure
from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.runs.run import Member
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.clock import LagSettings
from rendezvous.engine_fixtures import RUN, Stage, begun, staged, taken


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """Runs of two nodes without a restart."""
    async with staged(Stage(max_restarts=0)) as stage:
        yield stage


def report(
    member: Member, message: str = "it broke", round_: int = 1, age: float = 0.0
) -> commands.ReportFailure:
    """A member's report of a failure of its first worker."""
    failure = ReportedFailure(round_, 0, 0, "", member.node_id, "host", 1, 1, 1.7e9, message, "", "")
    return commands.ReportFailure(member.node_id, member.lease.number, replace(failure, age=age))


async def all_of(member: Member) -> None:
    """Take a member's updates until they end."""
    while await member.updates.take() is not None:
        pass


async def first_of(engine: RendezvousEngine) -> str:
    """The message of the failure that ended the run."""
    return (await engine.get_run(RUN)).run_end.failure.message


async def test_the_end_of_a_run_settles_by_itself(stage: Stage) -> None:
    """The engine decides after the settle window, and sends the first failure to every node."""
    a, b = await stage.running("a", "b")
    await stage.later(5.0)
    await stage.engine.execute(RUN, report(b, "connection reset"))
    assert (await stage.later(SETTLE_WINDOW / 2)).phase == pb.PHASE_FINAL
    await stage.engine.execute(RUN, report(a, "CUDA error", age=SETTLE_WINDOW))
    await stage.later(SETTLE_WINDOW / 2)
    for member in (a, b):
        update = await taken(member)
        assert (update.phase, update.run_end.failure.message) == (pb.PHASE_CLOSED, "CUDA error")


async def test_a_failure_from_within_a_pause_is_not_the_first() -> None:
    """Leases go by a clock that leaves out the pause, and failures by one that does not (seed 7005342)."""
    async with staged(Stage(max_restarts=0, lag=LagSettings())) as stage:
        a, b = await stage.running("a", "b")
        await stage.later(0.3)
        await stage.engine.execute(RUN, report(a, "CUDA error"))
        stage.now += 20
        await stage.engine.execute(RUN, report(b, "connection reset", age=5.0))
        for member in (a, b):
            stage.engine.renew(member)
        for _ in range(20):
            await stage.later(SETTLE_WINDOW / 5)  # in steps that are no pause
        assert await first_of(stage.engine) == "CUDA error"


async def test_every_node_is_notified_once_that_the_end_settles(stage: Stage) -> None:
    """A node whose worker ends slowly can still report it; further failures cause no update."""
    a, b = await stage.running("a", "b")
    await stage.later(5.0)
    await stage.engine.execute(RUN, report(b))
    for member in (a, b):
        update = await taken(member)
        assert (update.phase, update.settling, update.assignment.round) == (pb.PHASE_FINAL, True, 1)
    second = report(b, "its neighbour")
    await stage.engine.execute(RUN, replace(second, failure=replace(second.failure, local_rank=1)))
    stage.engine.renew(a)
    await stage.later(SETTLE_WINDOW)
    for member in (a, b):
        update = await taken(member)
        assert (update.phase, update.settling) == (pb.PHASE_CLOSED, False)


async def test_a_participant_that_does_not_answer_keeps_the_run_from_ending(stage: Stage) -> None:
    """The run ends at its next heartbeat; if its lease ended first, its loss would be the cause of the failure."""
    a, b = await stage.running("a", "b")
    await stage.later(5.0)
    await stage.engine.execute(RUN, report(b))
    assert (await stage.later(5.0)).phase == pb.PHASE_FINAL
    stage.engine.renew(a)
    assert (await stage.later(0.0)).phase == pb.PHASE_CLOSED
    assert await first_of(stage.engine) == "it broke"


async def test_a_message_that_waited_is_no_answer(stage: Stage) -> None:
    """Right after a pause of the server, messages of a lost host may be read after its peer's failure."""
    a, b = await stage.running("a", "b")
    await stage.later(5.0)
    stage.journal.hold()
    (reported,) = await begun(stage.engine.execute(RUN, report(b, "connection reset")))
    stage.engine.renew(a)
    stage.journal.release()
    await reported
    assert (await stage.later(5.0)).phase == pb.PHASE_FINAL
    stage.engine.renew(a)
    assert (await stage.later(0.0)).phase == pb.PHASE_CLOSED


async def test_a_node_that_comes_back_is_notified_that_the_end_settles(stage: Stage) -> None:
    """Its stream broke before it received that."""
    a, b = await stage.running("a", "b")
    before = (await stage.engine.get_run(RUN)).revision
    await stage.engine.execute(RUN, report(b))
    again = await stage.engine.resume(RUN, "a", a.lease.number, before, a.lease.token)
    assert (await taken(again)).settling


async def test_a_report_that_waits_for_a_commit_grows_no_younger(stage: Stage) -> None:
    """Its age counts from its arrival: a slow disk must not turn the first failure into the last."""
    a, b = await stage.running("a", "b")
    stage.journal.hold()
    settled = await begun(stage.engine.execute(RUN, commands.Evict("x", "something to be committed")))
    await stage.journal.held()
    first = await begun(stage.engine.execute(RUN, report(a, "first")))
    stage.now += 5.0
    second = await begun(stage.engine.execute(RUN, report(b, "second", age=0.1)))
    stage.journal.release()
    for task in (*settled, *first, *second):
        await task
    await stage.later(SETTLE_WINDOW)
    assert await first_of(stage.engine) == "first"


async def test_a_restart_is_published_with_its_delay() -> None:
    """Nodes and watchers receive it with the end of the round, and no longer once the next is being formed."""
    async with staged(Stage(max_restarts=9, restart_backoff=30.0)) as stage:
        a, b = await stage.running("a", "b")
        await stage.fail(b, 1)
        update = await taken(a)
        assert update.phase == pb.PHASE_FROZEN
        await stage.confirm(a, b)
        await taken(a)
        await stage.fail(b, 2)
        update = await taken(a)
        assert (update.phase, update.held_back.seconds, update.restart_count) == (pb.PHASE_JOINABLE, 1, 2)
        run = await stage.engine.get_run(RUN)
        assert (run.held_back.seconds, run.counted_restarts) == (1, 2)
        run = await stage.later(1.0)
        await stage.engine.settled()
        run = await stage.engine.get_run(RUN)
        assert run.phase == pb.PHASE_FROZEN
        assert not run.HasField("held_back")


async def test_a_node_that_failed_too_often_receives_the_reason() -> None:
    """Its stream ends with the reason, by the service; the run shows the counted restarts of each node."""
    async with staged(Stage(max_restarts=9, max_restarts_per_node=1)) as stage:
        a, b = await stage.running("a", "b")
        await stage.fail(b, 1)
        nodes = (await stage.engine.get_run(RUN)).nodes
        assert {node.node_id: node.counted_restarts for node in nodes} == {"a": 0, "b": 1}
        await stage.confirm(a, b)
        await stage.fail(b, 2)
        stage.engine.renew(a)
        await stage.later(SETTLE_WINDOW)
        await stage.engine.settled()
        with pytest.raises(
            NodeIsEvicted, match=r"taken out of run 'run' \(its workers failed 2 times"
        ) as refusal:
            await all_of(b)
        assert refusal.value.by == "service"
        with pytest.raises(NodeIsEvicted):
            await stage.join("b")
        await stage.engine.execute(RUN, commands.Readmit("b", "mended"))
        await stage.join("b")
