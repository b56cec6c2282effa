"""The engine publishes only durable facts, to every member and watcher, and never counts a live node as lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.rendezvous.base.errors import Draining, StreamReplaced
from rallypoint.rendezvous.base.limits import LimitReached, RendezvousLimits
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.commands import (
    JoinTimedOut,
    LeaseLost,
    LeaseNotProven,
    RevisionAhead,
    RunIsClosed,
    RunNotFound,
)
from rallypoint.rendezvous.core.state import Reopen, RunSettings
from rallypoint.rendezvous.journal.journal import Entry, JournalError, MemoryJournal, Record
from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.clock import LagSettings
from rendezvous.engine_fixtures import RUN, Stage, begun, idle, staged, taken


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """Runs of two nodes; the journal commits at once until it is held, and the clock does not advance."""
    async with staged(Stage()) as stage:
        yield stage


def states(run: pb.Run) -> dict[str, str]:
    """The state of every node."""
    return {node.node_id: pb.NodeState.Name(node.state).removeprefix("NODE_STATE_") for node in run.nodes}


# ---- nothing is published before it is durable


async def test_nothing_is_published_or_read_before_it_is_durable(stage: Stage) -> None:
    """While a commit is held back, no join, update, watch or read returns, and no round begins; after it, all do."""
    first = await stage.join("a")
    watcher = await stage.engine.watch(RUN, 0)
    seen = await watcher.take()
    stage.journal.hold()
    (joining,) = await begun(stage.join("b"))
    await stage.journal.held()
    tasks: list[asyncio.Task[Any]] = [
        joining,
        *await begun(first.updates.take()),
        *await begun(watcher.take()),
        *await begun(stage.engine.get_run(RUN)),
        *await begun(stage.list_runs()),
        *await begun(stage.engine.watch(RUN, 0)),
    ]
    assert not any(task.done() for task in tasks)
    assert stage.engine.writable_round(RUN) == 0

    stage.journal.release()
    second, update, told, run, runs, _ = await asyncio.gather(*tasks)
    assert second.lease.number == 3
    assert seen is not None
    assert seen.run.revision < told.run.revision == update.revision == run.revision == runs[0].revision == 4
    assert update.phase == (await taken(second)).phase == pb.PHASE_FROZEN
    assert stage.engine.writable_round(RUN) == 1


async def test_a_refusal_waits_until_its_cause_is_durable(stage: Stage) -> None:
    """A join of a closed run is refused only once the closing is durable."""
    stage.settings = replace(stage.settings, reopen=Reopen.NEVER)
    await stage.join("a")
    stage.journal.hold()
    (closing,) = await begun(stage.engine.close_run(RUN, "enough"))
    await stage.journal.held()
    (joining,) = await begun(stage.join("b"))
    assert not joining.done()
    stage.journal.release()
    assert (await closing).outcome == pb.OUTCOME_CANCELLED
    with pytest.raises(RunIsClosed):
        await joining


async def test_a_run_that_is_not_durable_is_not_there(stage: Stage) -> None:
    """The store asks for its round, and the engine answers that there is no such run."""
    stage.journal.hold()
    (joining,) = await begun(stage.join("a"))
    await stage.journal.held()
    assert stage.engine.writable_round(RUN) is None
    stage.journal.release()
    await joining
    assert stage.engine.writable_round(RUN) == 0


async def test_commands_that_arrive_together_are_committed_together(stage: Stage) -> None:
    """Those that arrive during a commit make up the next one."""
    stage.journal.hold()
    (first,) = await begun(stage.join("a"))
    await stage.journal.held()
    rest = await begun(*(stage.join(f"n{number}", run_id=f"run{number}") for number in range(20)))
    stage.journal.release()
    await asyncio.gather(first, *rest)
    assert stage.journal.commits == 2


async def test_a_round_is_over_for_writers_when_its_end_is_durable(stage: Stage) -> None:
    """That is before the next one has its number: a lost node's workers write no more from then on."""
    _, b = await stage.running("a", "b")
    assert stage.engine.writable_round(RUN) == 1
    stage.journal.hold()
    (leaving,) = await begun(stage.leave(b))
    await stage.journal.held()
    assert stage.engine.writable_round(RUN) == 1
    stage.journal.release()
    await leaving
    assert stage.engine.writable_round(RUN) == 2
    assert stage.ended_rounds == [(RUN, 2)]
    assert (await stage.engine.get_run(RUN)).round == 1
    assert Stage(stage.journal.durable).engine.writable_round(RUN) == 2


async def test_the_store_drops_a_round_before_members_receive_its_end(stage: Stage) -> None:
    """The store drops its data of the old round before any node receives its end."""
    a, b = await stage.running("a", "b")
    (listening,) = await begun(a.updates.take())
    ends_when_received: list[int] = []
    listening.add_done_callback(lambda _: ends_when_received.append(len(stage.ended_rounds)))
    await stage.fail(b, 1)
    await listening
    await idle()
    assert ends_when_received == [1]


# ---- a journal that breaks, a server that ends


async def test_a_broken_journal_fails_all_requests_and_streams(stage: Stage) -> None:
    """The command in the commit, the one behind it, every stream, and every later request fail."""
    member = await stage.join("a")
    watcher = await stage.engine.watch(RUN, 1)
    await watcher.take()
    stage.journal.hold()
    (joining,) = await begun(stage.join("b"))
    await stage.journal.held()
    behind = await begun(stage.engine.get_run(RUN))
    streams: list[asyncio.Task[Any]] = [*await begun(member.updates.take()), *await begun(watcher.take())]
    stage.journal.break_()
    for task in [joining, *behind, *streams]:
        with pytest.raises(JournalError, match="the disk is full"):
            await task
    with pytest.raises(JournalError):
        await stage.engine.get_run(RUN)


@pytest.mark.parametrize("error", [JournalError, IndexError])
async def test_serving_ends_with_the_error_of_the_journal(error: type[Exception]) -> None:
    """This holds for any error: the process starts again from the durable entries; no call waits."""
    stage = Stage(max_nodes=1, min_nodes=1)

    async def trip(entries: Sequence[Entry]) -> None:
        raise error

    serving = asyncio.create_task(stage.engine.serve())
    member = await stage.join("a")
    stage.journal.append = trip  # type: ignore[method-assign]
    with pytest.raises(error):
        await stage.leave(member)
    with pytest.raises(error):
        await serving


async def test_a_server_that_is_stopped_leaves_no_call_waiting() -> None:
    """Commands that wait for a commit, streams, and later requests all get Draining."""
    stage = Stage()
    async with staged(stage):
        member = await stage.join("a")
        stage.journal.hold()
        (joining,) = await begun(stage.join("b"))
        await stage.journal.held()
    for waiting in (joining, member.updates.take(), stage.engine.get_run(RUN)):
        with pytest.raises(Draining):
            await waiting


# ---- members


async def test_a_slow_member_receives_the_latest_state_only(stage: Stage) -> None:
    """It reads nothing while two rounds pass, and then the current one."""
    a, b = await stage.running("a", "b")
    for round_ in (1, 2):
        await stage.fail(b, round_)
        await stage.confirm(a, b)
    update = await taken(a)
    assert (update.phase, update.assignment.round, update.restart_count) == (pb.PHASE_FINAL, 3, 2)
    (waiting,) = await begun(a.updates.take())
    assert not waiting.done()
    waiting.cancel()


async def test_a_node_that_joins_during_a_round_receives_its_phase(stage: Stage) -> None:
    """A spare receives at once that it has no assignment."""
    await stage.running("a", "b")
    spare = await stage.join("c")
    update = await taken(spare)
    assert update.phase == pb.PHASE_FINAL
    assert not update.HasField("assignment")


async def test_a_node_that_joins_again_ends_its_older_stream(stage: Stage) -> None:
    """It ends with LeaseLost and the reason; nothing on the old stream touches the new lease."""
    old, _ = await stage.running("a", "b")
    new = await stage.join("a")
    with pytest.raises(LeaseLost, match="node a was lost: an agent joined again under its name"):
        await old.updates.take()
    stage.engine.disconnect(old)
    await stage.later(2)
    assert states(await stage.engine.get_run(RUN)) == {"a": "ASSIGNED", "b": "ASSIGNED"}
    assert (await taken(new)).assignment.round == 2


async def test_two_nodes_that_share_a_name_get_a_lease_each(stage: Stage) -> None:
    """If they join at the same moment, the first is refused, and never receives the second one's lease."""
    stage.journal.hold()
    (other,) = await begun(stage.join("b"))
    await stage.journal.held()
    first, second = await begun(stage.join("a"), stage.join("a"))
    stage.journal.release()
    with pytest.raises(LeaseLost, match=r"no longer holds lease 3 .* superseded it"):
        await first
    assert (await second).lease.number > 3
    assert (await other).lease.number == 2


async def test_a_node_that_waited_too_long_gets_join_timed_out(stage: Stage) -> None:
    """The error is not LeaseLost: joining again would only make it wait again."""
    member = await stage.join("a")
    for _ in range(120):
        await stage.later(5)
        stage.engine.renew(member)
    with pytest.raises(JoinTimedOut, match="had fewer than 2 nodes for 600 s"):
        await member.updates.take()


# ---- streams that break and come back


async def test_a_member_that_resumes_receives_the_current_state(stage: Stage) -> None:
    """It has missed updates; its lease is the same, and no node is lost."""
    a, b = await stage.running("a", "b")
    stage.engine.disconnect(a)
    await stage.fail(b, 1)
    await stage.later(1.9)
    again = await stage.engine.resume(RUN, "a", a.lease.number, 1, a.lease.token)
    update = await taken(again)
    assert (again.lease.number, update.phase, update.assignment.round) == (a.lease.number, pb.PHASE_FROZEN, 2)
    assert states(await stage.later(13)) == {"a": "ASSIGNED", "b": "ASSIGNED"}


async def test_a_member_that_comes_back_in_time_is_not_lost_to_a_slow_disk(stage: Stage) -> None:
    """It came within the grace; the time of the commit before it does not count."""
    a, _ = await stage.running("a", "b")
    stage.engine.disconnect(a)
    stage.journal.hold()
    (joining,) = await begun(stage.join("c"))
    await stage.journal.held()
    stage.now += 1.9
    (resuming,) = await begun(stage.engine.resume(RUN, "a", a.lease.number, 0, a.lease.token))
    stage.now += 5
    stage.journal.release()
    assert (await resuming).lease.number == a.lease.number
    await joining
    assert states(await stage.engine.get_run(RUN)) == {"a": "RUNNING", "b": "RUNNING", "c": "SPARE"}


async def test_a_resume_without_proof_does_not_renew_the_lease(stage: Stage) -> None:
    """An attempt to resume without the node's token does not count as a heartbeat."""
    a, _ = await stage.running("a", "b")
    stage.engine.disconnect(a)
    stage.now += 1.5
    with pytest.raises(LeaseNotProven):
        await stage.engine.resume(RUN, "a", a.lease.number, 0, bytes(16))
    assert states(await stage.later(1.0)) == {"b": "WAITING"}


async def test_a_member_whose_stream_breaks_before_it_is_in_again_is_still_away(stage: Stage) -> None:
    """No round freezes with it. It has a term from then, not the grace: its next attempt may come later than that."""
    a, b = await stage.running("a", "b")
    state = stage.engine._runs[RUN].state
    stage.engine.disconnect(a)
    stage.journal.hold()
    (joining,) = await begun(stage.join("c"))
    await stage.journal.held()
    first, second = await begun(
        *(stage.engine.resume(RUN, "a", a.lease.number, 0, a.lease.token) for _ in range(2))
    )
    first.cancel()
    await idle()
    assert state.disconnected == set()
    stage.now += 60
    second.cancel()
    await idle()
    assert state.disconnected == {"a"}
    stage.now += 10
    stage.engine.renew(b)
    stage.journal.release()
    await joining
    assert state.disconnected == {"a"}
    assert set(states(await stage.later(4.9))) == {"a", "b", "c"}
    assert set(states(await stage.later(0.2))) == {"b", "c"}


async def test_a_newer_stream_replaces_the_older_one(stage: Stage) -> None:
    """The lease is the same; the end of the older one does not count as a broken stream."""
    a, _ = await stage.running("a", "b")
    again = await stage.engine.resume(RUN, "a", a.lease.number, 0, a.lease.token)
    with pytest.raises(StreamReplaced):
        await a.updates.take()
    stage.engine.disconnect(a)
    await stage.later(3)
    assert (await taken(again)).phase == pb.PHASE_FINAL


@pytest.mark.parametrize(
    ("cursor", "refusal"),
    [
        (("other", "a", 2, 0), RunNotFound),
        ((RUN, "c", 2, 0), LeaseLost),
        ((RUN, "a", 1, 0), LeaseLost),
        ((RUN, "a", 2, 9999), RevisionAhead),
        ((RUN, "a", 2, 0, b""), LeaseNotProven),
        ((RUN, "a", 2, 0, bytes(16)), LeaseNotProven),
        ((RUN, "b", 3, 0), LeaseNotProven),
    ],
)
async def test_a_resume_with_an_invalid_cursor_is_refused(
    stage: Stage, cursor: tuple[str, str, int, int, bytes], refusal: type[Exception]
) -> None:
    """Causes are an unknown run, a lease that is not held or not proven, and a revision that does not exist yet."""
    a, _ = await stage.running("a", "b")
    with pytest.raises(refusal):
        await stage.engine.resume(*cursor) if len(cursor) > 4 else await stage.engine.resume(
            *cursor, a.lease.token
        )


@pytest.mark.parametrize("turns", range(8))
async def test_a_member_that_goes_away_while_it_joins_is_disconnected(stage: Stage, turns: int) -> None:
    """This holds at any moment: no stream has its lease, so it is lost after the grace, not after the time to live."""
    await stage.join("a")
    stage.journal.hold()
    (joining,) = await begun(stage.join("b"))
    await stage.journal.held()
    stage.journal.release()
    for _ in range(turns):
        await asyncio.sleep(0)
    if joining.done():
        stage.engine.disconnect(await joining)
    joining.cancel()
    await idle()
    assert states(await stage.later(1.9)) == {"a": "ASSIGNED", "b": "ASSIGNED"}
    assert states(await stage.later(0.1)) == {"a": "WAITING"}


@pytest.mark.parametrize("turns", range(6))
async def test_a_watcher_that_goes_away_while_it_subscribes_is_dropped(stage: Stage, turns: int) -> None:
    """This holds at any moment."""
    await stage.join("a")
    stays = await stage.engine.watch(RUN, 0)
    going = asyncio.create_task(stage.engine.watch(RUN, 0))
    for _ in range(turns):
        await asyncio.sleep(0)
    if not going.done():
        going.cancel()
        await idle()
        assert stage.engine._runs[RUN].watchers.slots == {stays}


async def test_a_heartbeat_or_disconnect_while_a_loss_is_committed_has_no_effect(stage: Stage) -> None:
    """A heartbeat or a broken stream at that moment has no effect; it neither fails nor touches a newer lease."""
    a, b = await stage.running("a", "b")
    stage.engine.disconnect(b)
    stage.now += 2
    stage.journal.hold()
    (joining,) = await begun(stage.join("a"))  # the state is ahead now: b is lost, and a has a new lease
    await stage.journal.held()
    for member in (a, b):
        stage.engine.renew(member)
        stage.engine.disconnect(member)
    stage.journal.release()
    new = await joining
    assert states(await stage.later(3)) == {"a": "WAITING"}
    assert new.lease.number > a.lease.number


async def test_a_heartbeat_while_the_run_is_being_closed_is_harmless(stage: Stage) -> None:
    """All leases end with the run, and its members receive that a moment later."""
    a, b = await stage.running("a", "b")
    stage.journal.hold()
    (closing,) = await begun(stage.engine.close_run(RUN, "enough"))
    await stage.journal.held()
    stage.engine.renew(a)
    stage.engine.disconnect(b)
    stage.journal.release()
    await closing
    assert (await taken(a)).phase == pb.PHASE_CLOSED


# ---- time


async def test_deadlines_come_due_by_themselves() -> None:
    """No request is needed: the round freezes when the last call is over, by the engine's own clock."""
    engine = RendezvousEngine(MemoryJournal(), clock=time.monotonic, wall_clock=time.time)
    settings = RunSettings(min_nodes=1, max_nodes=2, last_call_timeout=0.05)
    serving = asyncio.create_task(engine.serve())
    member = await engine.join(RUN, commands.Join("a", settings, "a.cluster", 1, "trainer"))
    assert (await taken(member)).phase == pb.PHASE_FROZEN
    serving.cancel()


async def test_a_pause_of_the_server_costs_no_lease() -> None:
    """It was stopped for a minute and finds no heartbeat: they wait, unread, in its sockets."""
    async with staged(Stage(lag=LagSettings())) as stage:
        await stage.running("a", "b")
        assert states(await stage.later(60)) == {"a": "RUNNING", "b": "RUNNING"}
        # But a node that sends nothing while the server is awake is lost all the same.
        for _ in range(60):
            run = await stage.later(0.3)
        assert states(run) == {}


async def test_after_a_pause_nodes_have_the_time_to_come_back() -> None:
    """It finds their streams broken before it notices the pause. They have as long as after a restart."""
    async with staged(Stage(lag=LagSettings())) as stage:
        a, b = await stage.running("a", "b")
        stage.now += 20
        for member in (a, b):
            stage.engine.disconnect(member)
        for _ in range(33):
            run = await stage.later(0.3)
        assert states(run) == {"a": "RUNNING", "b": "RUNNING"}
        back = await stage.engine.resume(RUN, "a", a.lease.number, run.revision, a.lease.token)
        for _ in range(20):
            stage.engine.renew(back)
            run = await stage.later(0.3)
        assert states(run) == {"a": "WAITING"}


async def test_a_short_pause_breaks_no_stream() -> None:
    """A node that disconnects then has the usual grace."""
    async with staged(Stage(lag=LagSettings())) as stage:
        a, _ = await stage.running("a", "b")
        stage.now += 1
        stage.engine.disconnect(a)
        for _ in range(8):
            run = await stage.later(0.3)
        assert states(run) == {"b": "WAITING"}


async def test_a_slow_commit_is_no_pause() -> None:
    """A lease ends in its time though each commit takes a second: the process was awake, and could read."""
    async with staged(Stage(lag=LagSettings(), keep_alive_interval=1.0, keep_alive_max_attempt=3)) as stage:
        a, _ = await stage.running("a", "b")
        for number in range(4):
            stage.journal.hold()
            (joining,) = await begun(stage.join("a", f"another-{number}"))
            await stage.journal.held()
            for _ in range(5):
                stage.now += 0.2
                stage.engine.renew(a)
            stage.journal.release()
            await joining
            run = await stage.later(0.0)
        assert states(run)["a"] == "WAITING"
        assert "b" not in states(run)


async def test_a_node_that_waits_for_a_slow_commit_keeps_its_lease() -> None:
    """This holds for new and resuming nodes: their streams are open, but they have received nothing to respond to."""
    async with staged(Stage(lag=LagSettings(), keep_alive_interval=1.0, keep_alive_max_attempt=3)) as stage:
        a, b = await stage.running("a", "b")
        stage.engine.disconnect(a)
        for _ in range(2):
            stage.journal.hold()
            waiting = await begun(
                stage.fail(b, 1),
                stage.engine.resume(RUN, "a", a.lease.number, 0, a.lease.token),
                stage.join("c"),
            )
            await stage.journal.held()
            for _ in range(50):
                stage.now += 0.2
                stage.engine.renew(b)
            stage.journal.release()
            await asyncio.gather(*waiting)
        assert set(states(await stage.later(0.2))) == {"a", "b", "c"}


async def test_the_confirm_timeout_begins_when_the_round_is_published(stage: Stage) -> None:
    """The time does not begin with the decision, if the commit is slow."""
    a = await stage.join("a")
    stage.journal.hold()
    (joining,) = await begun(stage.join("b"))
    await stage.journal.held()
    stage.now += 100
    stage.engine.renew(a)
    stage.journal.release()
    await joining
    stage.engine.renew(a)
    assert (await stage.later(10)).phase == pb.PHASE_FROZEN


async def test_a_server_that_drains_loses_no_node(stage: Stage) -> None:
    """It ends the streams of its nodes, so they do not count as lost: when it is back, the same round runs."""
    a, b = await stage.running("a", "b")
    watcher = await stage.engine.watch(RUN, 0)
    await watcher.take()
    stage.engine.drain(Draining())
    for member in (a, b):
        with pytest.raises(Draining):
            await member.updates.take()
        stage.engine.disconnect(member)
    with pytest.raises(Draining):
        await watcher.take()
    run = await stage.later(100_000)
    assert (run.phase, run.round) == (pb.PHASE_FINAL, 1)


async def test_a_drain_right_after_a_pause_costs_no_lease() -> None:
    """Stopped for a minute, it handles SIGTERM before anything else: no node could have sent a heartbeat."""
    async with staged(Stage(lag=LagSettings())) as stage:
        a, b = await stage.running("a", "b")
        stage.now += 60
        stage.engine.drain(Draining())
        stage.engine.disconnect(a)
        stage.engine.disconnect(b)
        assert states(await stage.later(60)) == {"a": "RUNNING", "b": "RUNNING"}


async def test_a_commit_that_outlasts_a_lease_costs_none_when_the_server_drains_meanwhile(
    stage: Stage,
) -> None:
    """While the commit is under way, heartbeats are not read: no lease may end meanwhile (seed 80018051)."""
    a, b = await stage.running("a", "b")
    stage.journal.hold()
    (succeeding,) = await begun(
        stage.engine.execute(RUN, commands.ReportSuccess("a", a.lease.number, round=1))
    )
    await stage.journal.held()
    stage.now += 100
    stage.engine.drain(Draining())
    stage.engine.disconnect(a)
    stage.engine.disconnect(b)
    stage.journal.release()
    await succeeding
    assert states(await stage.later(100)) == {"a": "SUCCEEDED", "b": "RUNNING"}


async def test_a_drain_is_no_disconnect() -> None:
    """A stream that the server ends costs no lease, even with a disconnect grace of 0 (seed 95000104)."""
    async with staged(Stage(disconnect_grace=0.0)) as stage:
        members = await stage.running("a", "b")
        stage.engine.drain(Draining())
        for member in members:
            stage.engine.disconnect(member)
        assert states(await stage.later(100)) == {"a": "RUNNING", "b": "RUNNING"}


# ---- starting again


async def test_a_restarted_server_has_all_durable_state(stage: Stage) -> None:
    """Round and leases are the same; members resume and receive the same state; nothing is restarted."""
    members = await stage.running("a", "b")
    before = await stage.engine.get_run(RUN)
    async with staged(Stage(durable=stage.journal.durable)) as second:
        resumed = [
            await second.engine.resume(
                RUN, each.node_id, each.lease.number, before.revision, each.lease.token
            )
            for each in members
        ]
        assert await second.engine.get_run(RUN) == before
        assert second.engine.writable_round(RUN) == 1
        for each in resumed:
            update = await taken(each)
            assert (update.phase, update.revision) == (pb.PHASE_FINAL, before.revision)


async def test_a_round_that_was_not_durable_never_happened(stage: Stage) -> None:
    """A round that was decided and not committed is never published; the next has its number, for the first time."""
    a, b = await stage.running("a", "b")
    stage.journal.hold()
    (failing,) = await begun(stage.fail(b, 1))
    await stage.journal.held()
    (listening,) = await begun(a.updates.take())
    async with staged(Stage(durable=stage.journal.durable)) as second:
        run = await second.engine.get_run(RUN)
        assert (run.phase, run.round, run.restart_count) == (pb.PHASE_FINAL, 1, 0)
        await second.engine.resume(RUN, "a", a.lease.number, run.revision, a.lease.token)
        again = await second.engine.resume(RUN, "b", b.lease.number, run.revision, b.lease.token)
        await second.fail(again, 1)
        assert (await second.engine.get_run(RUN)).round == 2
    assert not listening.done()
    for task in (listening, failing):
        task.cancel()


async def test_a_restarted_server_gives_every_lease_a_full_term(stage: Stage) -> None:
    """After that, nodes that sent no heartbeat are lost."""
    await stage.running("a", "b")
    async with staged(Stage(durable=stage.journal.durable)) as second:
        run = await second.later(14.9)
        assert states(run) == {"a": "RUNNING", "b": "RUNNING"}
        assert not any(node.connected for node in run.nodes)
        assert states(await second.later(0.1)) == {}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda records: records.pop(2), "run 'run' has no record 3"),
        (
            # With its run and revision, and no known fact.
            lambda records: records.append(Record(RUN, 8, b"\n\x03run\x10\x08")),
            "a newer version",
        ),
    ],
)
async def test_a_journal_that_makes_no_sense_is_refused(stage: Stage, spoil: Any, message: str) -> None:
    """A missing record, or a fact that this version does not know, is an error."""
    await stage.running("a", "b")
    spoil(stage.journal.durable)
    with pytest.raises(JournalError, match=message):
        Stage(durable=stage.journal.durable)


# ---- reads and watches


async def test_a_run_lists_its_participants_by_rank_and_then_the_spares(stage: Stage) -> None:
    """Each has its assignment and its state."""
    _, a = await stage.running("b", "a")
    await stage.join("z")
    spare = await stage.join("c")
    stage.engine.disconnect(spare)
    await stage.engine.execute(RUN, commands.ReportSuccess(a.node_id, a.lease.number, 1))
    run = await stage.engine.get_run(RUN)
    assert list(states(run).items()) == [("a", "SUCCEEDED"), ("b", "RUNNING"), ("z", "SPARE"), ("c", "SPARE")]
    assert [node.assignment.group_rank for node in run.nodes[:2]] == [0, 1]
    assert not run.nodes[2].HasField("assignment")
    assert [node.connected for node in run.nodes] == [True, True, True, False]
    assert (run.node_count, run.world_size) == (4, 4)


async def test_a_run_shows_which_nodes_still_stop_their_workers(stage: Stage) -> None:
    """A node is ASSIGNED until it has confirmed, DEPARTING when it has announced that it goes."""
    a, b = await stage.running("a", "b")
    await stage.fail(b, 1)
    await stage.confirm(b)
    assert states(await stage.engine.get_run(RUN)) == {"a": "ASSIGNED", "b": "CONFIRMED"}
    await stage.engine.execute(RUN, commands.Depart("a", a.lease.number, "SIGTERM"))
    assert states(await stage.engine.get_run(RUN)) == {"a": "DEPARTING", "b": "WAITING"}


async def test_a_request_does_not_create_an_unknown_run(stage: Stage) -> None:
    """Every request for it is refused."""
    for question in (
        stage.engine.get_run("other"),
        stage.engine.watch("other", 0),
        stage.engine.close_run("other", "because"),
        stage.engine.execute("other", commands.Leave("a", 1, "because")),
    ):
        with pytest.raises(RunNotFound, match="there is no run 'other'"):
            await question
    assert stage.engine.writable_round("other") is None
    assert await stage.list_runs() == []


async def test_a_watcher_sees_the_present_and_then_the_latest(stage: Stage) -> None:
    """Changes while it does not read become one state; revisions grow; a closed run ends it."""
    await stage.join("a")
    watcher = await stage.engine.watch(RUN, 0)
    seen = [await watcher.take()]
    for node_id in ("b", "c", "d"):
        await stage.join(node_id)
    seen.append(await watcher.take())
    await stage.engine.close_run(RUN, "enough")
    seen.append(await watcher.take())
    runs = [published.run for published in seen if published is not None]
    revisions = [run.revision for run in runs]
    assert revisions == sorted(set(revisions))
    assert [run.node_count for run in runs] == [1, 4, 0]
    assert await watcher.take() is None


async def test_a_watcher_that_comes_back_does_not_get_the_same_state_again(stage: Stage) -> None:
    """It waits for a newer state, unless the run is over."""
    await stage.join("a")
    revision = (await stage.engine.get_run(RUN)).revision
    watcher = await stage.engine.watch(RUN, revision)
    (waiting,) = await begun(watcher.take())
    assert not waiting.done()
    await stage.join("b")
    published = await waiting
    assert published is not None
    assert published.run.revision > revision
    await stage.engine.close_run(RUN, "enough")
    last = (await stage.engine.get_run(RUN)).revision
    assert await (await stage.engine.watch(RUN, last)).take() is None
    with pytest.raises(RevisionAhead):
        await stage.engine.watch(RUN, last + 1)


async def test_joins_that_wait_for_a_closed_run_count_as_nodes() -> None:
    """So no client can make their number grow without bound."""
    limits = RendezvousLimits(nodes_per_run=2)
    async with staged(Stage(limits=limits, min_nodes=1, max_nodes=1)) as stage:
        former = await stage.join("a")
        await stage.engine.close_run(RUN, "enough")
        waits, waiting = asyncio.Queue[object](), []
        for node_id in ("b", "c"):
            with pytest.raises(commands.RunIsEnding):
                await stage.join(node_id)
            waiting.append(asyncio.create_task(stage.engine.until_reopenable(RUN, waits.put_nowait)))
            await waits.get()
        with pytest.raises(LimitReached) as refused:
            await stage.join("d")
        assert refused.value.reason == "TOO_MANY_NODES"
        await stage.leave(former)
        await asyncio.gather(*waiting)
        await stage.join("b")
