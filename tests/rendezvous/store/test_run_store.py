"""Batches are bounded and take turns; a forgotten run leaves nothing behind, also with a commit under way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.rendezvous.base.entries import Operation, Writer
from rallypoint.rendezvous.base.limits import StoreLimits
from rallypoint.rendezvous.base.refusals import JournalFailed, KeyWaitTimedOut
from rallypoint.rendezvous.core.commands import LeaseLost, NodeIsEvicted, RunNotFound
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rendezvous.store.writes import Append, MultiSet, Set
from rendezvous.store.store_fakes import RUN, WRITER, Rounds, TestJournal, open_store
from support.waiting import started

FOR_EVER = 3600.0
OPERATION = Operation("c", 0, 1)


def set_(key: str, value: bytes = b"1", operation: Operation | None = None) -> Set:
    return Set(writer=WRITER, round=1, key=key, value=value, operation=operation)


async def idle(store: StoreService) -> None:
    """Return when nothing is left to write."""
    while tasks := [run.committing for run in store._runs.values() if run.committing is not None]:
        await asyncio.wait(tasks)
    await started()  # their done callbacks


def sizes(journal: TestJournal) -> list[int]:
    return [len(commit) for commit in journal.commits]


async def batches_of(limits: StoreLimits, *writes: Any) -> list[int]:
    """The number of entries of each commit, when all writes wait before it begins."""
    journal = TestJournal()
    store = open_store(journal, limits=limits)
    journal.hold()
    tasks = await started(store.write(RUN, set_("first")))
    await journal.until_held()
    tasks += await started(*(store.write(RUN, write) for write in writes))
    journal.release()
    await asyncio.gather(*tasks)
    return sizes(journal)[1:]


async def test_a_batch_has_so_many_writes_and_entries() -> None:
    limits = StoreLimits(batch_entries=3)
    assert await batches_of(limits, *(set_(f"{n}") for n in range(7))) == [3, 3, 1]
    several = MultiSet(writer=WRITER, round=1, entries={f"m{n}": b"" for n in range(10)})
    assert await batches_of(limits, set_("a"), several, set_("b")) == [11, 1], "a write is never cut"


async def test_a_batch_has_so_many_bytes() -> None:
    """Bytes of requests and bytes of results both count: an Append of one byte may write megabytes."""
    large = b"x" * 1_000
    limits = StoreLimits(batch_bytes=2_500)
    assert await batches_of(limits, *(set_(f"{n}", large) for n in range(5))) == [3, 2]
    appends = [Append(writer=WRITER, round=1, key="k", value=b"y") for _ in range(4)]
    # Each commit has the key once, so the limit shows only in the number of commits.
    assert await batches_of(limits, set_("k", large), *appends) == [1, 1]
    same = [set_("k", large) for _ in range(6)]
    assert await batches_of(limits, *same) == [1, 1]


async def test_runs_take_turns() -> None:
    """A run with very many writes, over a journal that commits at once, does not block the others."""
    many, few = "many", "few"
    store = open_store(TestJournal(), Rounds({many: 1, few: 1}), StoreLimits(batch_entries=10))
    crowd = await started(*(store.write(many, set_(f"{n}")) for n in range(1_000)))
    await store.write(few, set_("k"))
    assert sum(task.done() for task in crowd) < 100
    await asyncio.gather(*crowd)


async def forgotten(store: StoreService, journal: TestJournal, rounds: Rounds) -> None:
    """Forget the run as the rest of the service does: in the journal, then, in one step, everywhere."""
    journal.drop_run(RUN)
    del rounds.of[RUN]
    store.forget_run(RUN)


async def test_a_forgotten_run_is_gone() -> None:
    """Its waiting and later requests are refused; nothing of it stays in memory; nothing is written."""
    journal, rounds = TestJournal(), Rounds()
    store = open_store(journal, rounds)
    await asyncio.gather(*(store.write(RUN, set_(f"{n}")) for n in range(2_500)))
    waiting = await started(
        store.get(RUN, 1, "k", FOR_EVER),
        store.wait(RUN, 0, ["k", "j"], FOR_EVER),
        store.multi_get(RUN, 1, ["0", "j"], FOR_EVER),
    )
    journal.commits.clear()
    await forgotten(store, journal, rounds)
    for task in waiting:
        with pytest.raises(RunNotFound):
            await task
    with pytest.raises(RunNotFound):
        await store.write(RUN, set_("k"))
    with pytest.raises(RunNotFound):
        store.check(RUN, 1, ["0"])
    await idle(store)
    assert not store._runs
    assert not journal.commits, "the journal drops the run's entries by itself"


async def test_a_run_that_comes_again_begins_empty() -> None:
    journal, rounds = TestJournal(), Rounds()
    store = open_store(journal, rounds)
    await store.write(RUN, set_("old", operation=OPERATION))
    await forgotten(store, journal, rounds)
    rounds.of[RUN] = 1
    assert store.list_keys(RUN, 1, "", "", 10) == []
    await store.write(RUN, set_("new", operation=OPERATION))
    await idle(store)
    assert store.list_keys(RUN, 1, "", "", 10) == ["new"]
    assert {key for _, _, key in journal.rows} == {"new", OPERATION.record_key}


@pytest.mark.parametrize("late", ["before", "after"])
@pytest.mark.parametrize("again", [False, True], ids=["gone", "comes-again"])
async def test_a_commit_under_way_when_its_run_is_forgotten_stays_nowhere(late: str, again: bool) -> None:
    """It may become durable before or after the journal drops the run: its entries are deleted, except those that
    the next run of that name has set again."""
    journal, rounds = TestJournal(), Rounds()
    store = open_store(journal, rounds)
    (journal.hold if late == "before" else journal.hold_after)()
    (old,) = await started(
        store.write(
            RUN, MultiSet(writer=WRITER, round=1, entries={"a": b"old", "b": b"old"}, operation=OPERATION)
        )
    )
    await journal.until_held()
    (queued,) = await started(store.write(RUN, set_("queued")))
    await forgotten(store, journal, rounds)
    tasks = []
    if again:
        rounds.of[RUN] = 1
        tasks = await started(store.write(RUN, set_("a", b"new")), store.get(RUN, 1, "b", 0.05))
    journal.release()
    for task in (old, queued):
        with pytest.raises(RunNotFound):
            await task
    await idle(store)
    if again:
        writing, reading = tasks
        await writing
        with pytest.raises(KeyWaitTimedOut, match="key 'b' was not set"):
            await reading
        assert await store.get(RUN, 1, "a", 0) == b"new"
        assert journal.rows == {(RUN, 1, "a"): b"new"}
    else:
        assert not journal.rows
        assert not store._runs


async def test_the_next_start_deletes_entries_that_a_forgotten_run_left() -> None:
    """It is deleted in small steps and stays invisible, also when the run comes again meanwhile."""
    journal, rounds = TestJournal(), Rounds({})
    left = {f"{n}": b"old" for n in range(2_500)} | {OPERATION.record_key: b"1 1 1 1"}
    journal.rows = {(RUN, 1, key): value for key, value in left.items()}
    store = open_store(journal, rounds)
    rounds.of[RUN] = 1
    await store.write(RUN, set_("2000", b"new", OPERATION))
    assert store.list_keys(RUN, 1, "", "", 10) == ["2000"]
    await idle(store)
    assert set(journal.rows) == {(RUN, 1, "2000"), (RUN, 1, OPERATION.record_key)}
    assert max(sizes(journal)) <= 252
    del rounds.of[RUN]
    gone = open_store(journal, rounds)
    await idle(gone)
    assert not journal.rows
    assert not gone._runs


async def test_a_journal_that_fails_while_a_run_is_forgotten() -> None:
    journal, rounds = TestJournal(), Rounds()
    store = open_store(journal, rounds)
    journal.hold()
    (writing,) = await started(store.write(RUN, set_("k")))
    await journal.until_held()
    await forgotten(store, journal, rounds)
    journal.fails_with = OSError("no space left on device")
    journal.release()
    with pytest.raises(JournalFailed):
        await writing
    await idle(store)
    assert not store._runs


async def test_an_unknown_run_may_be_forgotten() -> None:
    store = open_store(TestJournal())
    store.forget_run("other")
    assert not store._runs


steps = st.lists(
    st.sampled_from(["set a", "set b", "set c", "multi", "forget", "come", "hold", "late", "release", "kill"])
)


@settings(max_examples=200)
@given(steps=steps)
def test_journal_and_store_agree_after_any_history_of_the_run(steps: Sequence[str]) -> None:
    """Writes, commits held back before and after they are durable, the run forgotten and come again, the store
    killed: in the end the journal holds the values that readers see, and none of a run that does not exist."""

    async def carry_out() -> None:
        journal, rounds = TestJournal(), Rounds()
        store = open_store(journal, rounds)
        tasks: list[asyncio.Task[Any]] = []
        sequence = 0
        for step in steps:
            match step.split():
                case ["set", key]:
                    sequence += 1
                    operation = Operation("c", 0, sequence)
                    tasks += await started(store.write(RUN, set_(key, b"%d" % sequence, operation)))
                case ["multi"]:
                    sequence += 1
                    entries = dict.fromkeys("abc", b"%d" % sequence)
                    tasks += await started(
                        store.write(RUN, MultiSet(writer=WRITER, round=0, entries=entries))
                    )
                case ["forget"] if RUN in rounds.of:
                    await forgotten(store, journal, rounds)
                case ["come"]:
                    rounds.of[RUN] = 1
                case ["hold"]:
                    journal.hold()
                case ["late"]:
                    journal.hold_after()
                case ["release"]:
                    journal.release()
                    await started()
                case ["kill"]:
                    rows, dead = dict(journal.rows), journal
                    dead.fails_with = OSError("dead")
                    dead.release()
                    await idle(store)
                    journal = TestJournal()
                    journal.rows = rows
                    store = open_store(journal, rounds)
        journal.release()
        await idle(store)
        await asyncio.gather(*tasks, return_exceptions=True)
        if RUN not in rounds.of:
            assert not journal.rows
            assert not store._runs
            return
        seen = {
            (RUN, round, key): await store.get(RUN, round, key, 0)
            for round in (0, 1)
            for key in store.list_keys(RUN, round, "", "", 10)
        }
        kept = {place: value for place, value in journal.rows.items() if not place[2].startswith("\x01")}
        assert seen == kept
        restored = open_store(journal, rounds)
        run, again = store._runs.get(RUN), restored._runs.get(RUN)
        records = [dict(each.spaces.operations) if each else {} for each in (run, again)]
        assert records[0] == records[1]

    asyncio.run(carry_out())


async def test_a_lost_lease_is_refused_when_the_write_is_decided() -> None:
    """A node that held its lease when it sent the write, and lost it during the commit before, writes nothing; a
    repetition of an earlier write under that lease is refused too."""
    journal, lost = TestJournal(), set[int]()

    def check_lease(run_id: str, node_id: str, lease: int, token: bytes) -> None:
        if lease in lost:
            raise LeaseLost(run_id, node_id, lease, 8)

    store = StoreService(journal, Rounds(check=check_lease))
    written = Set(round=0, key="k", value=b"1", writer=Writer("node", 7), operation=OPERATION)
    await store.write(RUN, written)
    journal.hold()
    (blocker,) = await started(store.write(RUN, set_("first")))
    await journal.until_held()
    late = Set(round=0, key="k", value=b"2", writer=Writer("node", 7))
    in_time = Set(round=0, key="j", value=b"3", writer=Writer("node", 8))
    stale, fresh, nobody = await started(*(store.write(RUN, each) for each in (late, in_time, set_("o"))))
    lost.add(7)
    journal.release()
    with pytest.raises(LeaseLost, match="no longer holds lease 7 in run 'digits': lease 8 superseded it"):
        await stale
    await asyncio.gather(blocker, fresh, nobody)
    with pytest.raises(LeaseLost):
        await store.write(RUN, written)
    assert await store.get(RUN, 0, "k", 0) == b"1"


async def test_a_write_for_an_evicted_node_gets_lease_lost() -> None:
    """It is refused as for any node that is out of the run: the others go on without its workers."""

    def check_lease(run_id: str, node_id: str, lease: int, token: bytes) -> None:
        raise NodeIsEvicted(run_id, node_id, "bad memory")

    store = StoreService(TestJournal(), Rounds(check=check_lease))
    write = Set(round=0, key="k", value=b"1", writer=Writer("node", 7))
    with pytest.raises(LeaseLost, match=r"an operator took the node out \(bad memory\)") as refused:
        await store.write(RUN, write)
    assert (refused.value.node_id, refused.value.lease, refused.value.current) == ("node", 7, None)


async def test_a_write_that_waits_counts_the_size_of_its_entries() -> None:
    """A MultiSet of very many small entries is no small write."""
    several = MultiSet(writer=WRITER, round=1, entries={f"{n}": b"" for n in range(100)})
    assert several.queued_bytes > 100 * 128
