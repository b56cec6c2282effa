"""A server that starts again goes on from its last checkpoints, and has every run as it was."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable

import pytest

from rallypoint.rendezvous.base.cooperative import finish
from rallypoint.rendezvous.base.limits import RendezvousLimits
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.commands import Actor, ActorKind
from rallypoint.rendezvous.core.snapshot import RunSnapshot
from rallypoint.rendezvous.journal.codec import DecodedRecord, decode_snapshot, encode_snapshot
from rallypoint.rendezvous.journal.journal import Checkpoint, Entry, JournalError, Record, Recovered
from rallypoint.rendezvous.runs import run as hosted_run
from rallypoint.rendezvous.runs.history import History
from rallypoint.rendezvous.runs.recovery import Numbers, RecoveredRuns, recover_runs
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.engine_fixtures import RUN, Stage, staged, taken
from rendezvous.journal.entries import as_written_before


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every ten records."""
    monkeypatch.setattr(hosted_run, "_RECORDS_PER_CHECKPOINT", 10)
    monkeypatch.setattr(hosted_run, "_RECORDS_PER_NODE", 1)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """Runs of two nodes that may fail a hundred times."""
    async with staged(Stage(max_restarts=100)) as stage:
        yield stage


def checkpoints(durable: list[Entry]) -> list[Checkpoint]:
    return [entry for entry in durable if isinstance(entry, Checkpoint)]


def recovered(stage: Stage) -> hosted_run.HostedRun:
    """The run as a server that starts now has it."""
    found = finish(recover_runs(stage.journal.kept(), lambda: History(1000, 10**6), stage.now))
    return found.runs[RUN]


async def failing_rounds(stage: Stage, rounds: int) -> None:
    """Let rounds of two nodes fail, one after the other."""
    members = await stage.running("a", "b")
    for _ in range(rounds):
        run = await stage.engine.get_run(RUN)
        await stage.fail(members[0], run.round)
        await stage.confirm(*members)


async def test_checkpoints_are_written_now_and_then(stage: Stage) -> None:
    """Each comes after 10 to 19 records, with all that came before it, in the same commit as its last record."""
    await failing_rounds(stage, 10)
    written = checkpoints(stage.journal.durable)
    revision = (await stage.engine.get_run(RUN)).revision
    assert len(written) >= revision // 20
    gaps = [later.revision - earlier.revision for earlier, later in itertools.pairwise(written)]
    assert all(10 <= gap < 20 for gap in gaps)
    for checkpoint in written:
        at = stage.journal.durable.index(checkpoint)
        before = [each for each in stage.journal.durable[:at] if isinstance(each, Record)]
        assert before[-1].revision == checkpoint.revision
        assert decode_snapshot(checkpoint.content).revision == checkpoint.revision


async def test_a_large_run_is_written_down_less_often(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a checkpoint grows with the nodes of its run, so there are more records between two."""
    monkeypatch.setattr(hosted_run, "_RECORDS_PER_NODE", 4)
    for node_id in "abcdefgh":
        await stage.join(node_id)
    members = [await stage.join("a"), await stage.join("b")]
    for _ in range(20):
        await stage.confirm(*members)
        await stage.fail(members[0], (await stage.engine.get_run(RUN)).round)
    written = checkpoints(stage.journal.durable)
    assert len(written) > 1
    assert all(32 <= later.revision - earlier.revision < 40 for earlier, later in itertools.pairwise(written))


async def test_a_recovery_from_a_checkpoint_is_that_from_all_records(stage: Stage) -> None:
    """At every commit of a run, both restore the same run."""
    await failing_rounds(stage, 6)
    await stage.join("spare")
    await stage.engine.execute(RUN, commands.Evict("spare", "bad memory"))
    durable = stage.journal.durable
    records = [entry for entry in durable if isinstance(entry, Record)]
    first = next(at for at, entry in enumerate(durable) if isinstance(entry, Checkpoint))
    for end in range(first + 1, len(durable) + 1):
        of_checkpoint = Stage(durable=durable[:end])
        kept = of_checkpoint.journal.kept()
        assert kept.checkpoints
        runs = finish(recover_runs(kept, lambda: History(1000, 10**6), 5.0)).runs
        count = sum(isinstance(entry, Record) for entry in durable[:end])
        from_records = Recovered([], records[:count], [])
        plain = finish(recover_runs(from_records, lambda: History(1000, 10**6), 5.0)).runs
        assert runs[RUN].state == plain[RUN].state
        assert runs[RUN].writable_round == plain[RUN].writable_round
        assert runs[RUN].recorded == plain[RUN].recorded == count


@pytest.mark.parametrize("checkpoints_kept", [True, False])
async def test_a_journal_of_an_earlier_version_goes_on(stage: Stage, checkpoints_kept: bool) -> None:
    """Membership, round and count of restarts are the same; and its run fails and restarts like any other."""
    await failing_rounds(stage, 7)
    before = await stage.engine.get_run(RUN)
    old = [
        as_written_before(entry)
        for entry in stage.journal.durable
        if checkpoints_kept or isinstance(entry, Record)
    ]
    async with staged(Stage(durable=old, max_restarts=100, restart_backoff=30.0)) as second:
        after = await second.engine.get_run(RUN)
        assert (after.round, after.phase, after.restart_count) == (before.round, before.phase, 7)
        assert after.counted_restarts == 7
        a, b = [
            await second.engine.resume(RUN, node.node_id, node.lease, before.revision, b"")
            for node in before.nodes
        ]
        assert a.lease.incarnation == ""
        await second.fail(a, after.round)
        await second.confirm(a, b)
        after = await second.engine.get_run(RUN)
        assert (after.round, after.phase, after.restart_count) == (before.round + 1, pb.PHASE_FINAL, 8)
        await second.join("c")  # with the default settings of this version


async def test_members_resume_after_a_checkpoint(stage: Stage) -> None:
    """Leases and round are the same; and the next record has the next number."""
    members = await stage.running("a", "b")
    for round_ in (1, 2, 3):
        await stage.fail(members[0], round_)
        await stage.confirm(*members)
    before = await stage.engine.get_run(RUN)
    assert stage.journal.kept().checkpoints
    async with staged(Stage(durable=stage.journal.durable, max_restarts=100)) as second:
        for member in members:
            again = await second.engine.resume(
                RUN, member.node_id, member.lease.number, before.revision, member.lease.token
            )
            update = await taken(again)
            assert (update.phase, update.assignment.round) == (pb.PHASE_FINAL, 4)
        assert await second.engine.get_run(RUN) == before
        await second.fail(members[0], 4)
        records = [entry for entry in second.journal.durable if isinstance(entry, Record)]
        assert [record.revision for record in records] == list(range(1, len(records) + 1))


async def test_events_are_kept_past_a_checkpoint(stage: Stage) -> None:
    """Operators read them: a checkpoint drops no more of them than are dropped anyway."""
    await failing_rounds(stage, 10)
    assert stage.journal.kept().checkpoints
    history = recovered(stage).history
    assert (history.oldest, history.latest) == (1, (await stage.engine.get_run(RUN)).revision)
    assert [record.revision for record in history.after(0, 10_000)] == list(range(1, history.latest + 1))


async def test_a_checkpoint_drops_the_records_of_events_that_are_dropped() -> None:
    """The journal of a run that goes on for ever does not grow for ever."""
    limits = RendezvousLimits(events_per_run=15)
    async with staged(Stage(limits=limits, max_restarts=1000)) as stage:
        await failing_rounds(stage, 30)
        kept = stage.journal.kept().records
        assert len(kept) < 60
        assert kept[-1].revision == (await stage.engine.get_run(RUN)).revision
        async with staged(Stage(durable=stage.journal.durable, limits=limits)) as second:
            history = second.engine.history(RUN)
            assert history.latest - history.oldest + 1 == 15
            assert history.latest == (await second.engine.get_run(RUN)).revision


async def test_every_run_has_its_own(stage: Stage) -> None:
    """Runs without a checkpoint are folded from their first record."""
    await failing_rounds(stage, 5)
    await stage.join("n", "other")
    found = finish(recover_runs(stage.journal.kept(), lambda: History(1000, 10**6), 5.0))
    runs = found.runs
    assert (found.mark, found.left, found.broken) == (Numbers(), [], {})
    assert {run_id: run.state.revision for run_id, run in runs.items()} == {
        RUN: (await stage.engine.get_run(RUN)).revision,
        "other": 2,
    }
    assert list(runs["other"].state.nodes) == ["n"]


async def test_a_run_that_expired_is_numbers_only() -> None:
    """This holds until it comes again."""
    async with staged(Stage(limits=RendezvousLimits(run_ttl=10.0))) as stage:
        await stage.running("a", "b")
        await stage.engine.close_run(RUN, "enough")
        last = await stage.engine.get_run(RUN)
        stage.now += 10
        await stage.list_runs()
        found = finish(recover_runs(stage.journal.kept(), lambda: History(9, 999), 5.0))
        assert found == RecoveredRuns({}, Numbers(last.revision, last.round), [], {})
        await stage.join("a")
        run = recovered(stage)
        assert run.state.revision == last.revision + 2
        assert (run.history.oldest, run.state.round) == (last.revision + 1, last.round)
        assert run.checkpoint == last.revision


def dropped_from_the_middle(kept: Recovered) -> Recovered:
    return Recovered(kept.checkpoints, [*kept.records[:-2], kept.records[-1]], [])


def without_the_record_after_the_checkpoint(kept: Recovered) -> Recovered:
    at = kept.checkpoints[0].revision
    return Recovered(kept.checkpoints, [record for record in kept.records if record.revision != at + 1], [])


def without_the_first_node(kept: Recovered) -> Recovered:
    return Recovered([], [record for record in kept.records if record.revision != 2], [])


@pytest.mark.parametrize(
    "spoil", [dropped_from_the_middle, without_the_record_after_the_checkpoint, without_the_first_node]
)
async def test_a_missing_record_is_found(stage: Stage, spoil: Callable[[Recovered], Recovered]) -> None:
    """It may be missing anywhere, and is found before later records fail without it."""
    await failing_rounds(stage, 5)
    kept = spoil(stage.journal.kept())
    revisions = {record.revision for record in kept.records}
    covered = kept.checkpoints[0].revision if kept.checkpoints else 0
    missing = min(each for each in range(covered + 1, max(revisions)) if each not in revisions)
    with pytest.raises(JournalError, match=f"run 'run' has no record {missing}; restore it from a backup"):
        finish(recover_runs(kept, lambda: History(1000, 10**6), 5.0))


@pytest.mark.parametrize(
    "content",
    [b"\xff\xff", encode_snapshot(RunSnapshot(RUN, 3, 1, phase=77))],  # type: ignore[arg-type]
)
async def test_a_checkpoint_that_can_not_be_read_is_refused(content: bytes) -> None:
    """It is damaged, or of a newer version: no server is better than one that lost data."""
    kept = Recovered([Checkpoint(RUN, 3, content, 1)], [], [])
    with pytest.raises(JournalError, match="can't be read by this version"):
        finish(recover_runs(kept, lambda: History(1000, 10**6), 5.0))


async def test_every_record_names_its_actor(stage: Stage) -> None:
    """That is the node, the operator, or the service if a deadline or a consequence caused it."""
    a, _ = await stage.running("a", "b")
    await stage.engine.execute(RUN, commands.Restart("new data"), Actor(ActorKind.OPERATOR, "ann"))
    stage.engine.disconnect(a)
    await stage.later(2)
    records = [DecodedRecord(each.content) for each in stage.journal.durable if isinstance(each, Record)]
    told = [(type(record.fact()).__name__, str(record.actor())) for record in records]
    assert told[:4] == [
        ("RunCreated", "node a"),
        ("NodeJoined", "node a"),
        ("NodeJoined", "node b"),
        ("RoundFrozen", "service"),
    ]
    assert ("RestartRequested", "operator ann") in told
    assert ("RoundEnded", "service") in told
    assert ("NodeLost", "service") in told
