"""Nothing is visible before it is durable; concurrent writes share commits; waiters end at once, or with an error."""

from __future__ import annotations

import asyncio

import pytest

from rallypoint.rendezvous.base.entries import Operation
from rallypoint.rendezvous.base.errors import Draining
from rallypoint.rendezvous.base.limits import StoreLimits
from rallypoint.rendezvous.base.refusals import JournalFailed, KeyWaitTimedOut, RoundNotBegun, StoreBusy
from rallypoint.rendezvous.core.commands import RoundOver, RunNotFound
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rendezvous.store.writes import Add, CompareSet, DeleteKey, Set
from rendezvous.store.store_fakes import RUN, WRITER, Rounds, TestJournal, open_store
from support.waiting import started

FOR_EVER = 3600.0


def set_(key: str, value: bytes = b"1", round: int = 1) -> Set:
    return Set(writer=WRITER, round=round, key=key, value=value)


async def test_nothing_is_published_before_it_is_durable() -> None:
    """While the commit is held back, no request returns, not even a failed compare, and no reader sees the value."""
    journal = TestJournal()
    store = open_store(journal)
    journal.hold()
    tasks = await started(
        store.get(RUN, 1, "k", FOR_EVER),
        store.wait(RUN, 1, ["k"], FOR_EVER),
        store.write(RUN, set_("k")),
        store.write(RUN, CompareSet(writer=WRITER, round=1, key="k", expected=b"other", desired=b"2")),
    )
    await journal.until_held()
    assert not any(task.done() for task in tasks)
    assert not store.check(RUN, 1, ["k"])
    assert store.list_keys(RUN, 1, "", "", 10) == []
    with pytest.raises(KeyWaitTimedOut):
        await store.get(RUN, 1, "k", 0)
    journal.hold_after()
    journal.release()
    value, _, _, comparison = await asyncio.gather(*tasks)
    assert value == b"1"
    assert comparison.value == b"1"
    assert journal.rows == {(RUN, 1, "k"): b"1"}


async def test_a_durable_write_is_not_visible_before_it_is_confirmed() -> None:
    journal = TestJournal()
    store = open_store(journal)
    journal.hold_after()
    (writing,) = await started(store.write(RUN, set_("k")))
    await journal.until_held()
    assert journal.rows
    assert not writing.done()
    assert not store.check(RUN, 1, ["k"])
    journal.release()
    await writing
    assert store.check(RUN, 1, ["k"])


async def test_concurrent_writes_share_a_commit() -> None:
    """Writes that arrive during one commit make up the next, each key in it once, in the order of arrival."""
    journal = TestJournal()
    store = open_store(journal)
    journal.hold()
    (first,) = await started(store.write(RUN, Add(writer=WRITER, round=1, key="n", amount=1)))
    await journal.until_held()
    others = await started(
        *(store.write(RUN, Add(writer=WRITER, round=1, key="n", amount=1)) for _ in range(100))
    )
    journal.release()
    assert await first == 1
    assert await asyncio.gather(*others) == list(range(2, 102))
    assert [len(commit) for commit in journal.commits] == [1, 1]
    assert journal.rows[RUN, 1, "n"] == b"101"


async def test_runs_do_not_wait_for_each_other() -> None:
    journal = TestJournal()
    store = open_store(journal, Rounds({"one": 1, "two": 1}))
    journal.hold()
    tasks = await started(store.write("one", set_("k")), store.write("two", set_("k")))
    assert journal.held_before == 2
    journal.release()
    await asyncio.gather(*tasks)


async def test_waiters_see_every_write_of_a_batch_in_order() -> None:
    """A key that is set and deleted in one commit was there: its waiters get the value."""
    journal = TestJournal()
    store = open_store(journal)
    journal.hold()
    (blocker, waiter, both) = await started(
        store.write(RUN, set_("other")),
        store.get(RUN, 1, "k", FOR_EVER),
        store.wait(RUN, 1, ["k", "later"], FOR_EVER),
    )
    await journal.until_held()
    await started(
        store.write(RUN, set_("k", b"brief")), store.write(RUN, DeleteKey(writer=WRITER, round=1, key="k"))
    )
    journal.release()
    await blocker
    assert await waiter == b"brief"
    await store.write(RUN, set_("later"))
    assert not both.done(), "k is gone again: both keys were never there at once"
    await store.write(RUN, set_("k"))
    await both


async def test_a_failed_commit_leaves_nothing_behind() -> None:
    """Writers get JournalFailed, readers see the old values, and the next store over the journal starts from them."""
    journal = TestJournal()
    store = open_store(journal)
    await store.write(RUN, Add(writer=WRITER, round=1, key="n", amount=1))
    journal.fails_with = OSError("no space left on device")
    operation = Operation("c", 0, 1)
    add = Add(writer=WRITER, round=1, key="n", amount=1, operation=operation)
    (waiter, *writers) = await started(
        store.get(RUN, 1, "k", FOR_EVER), store.write(RUN, add), store.write(RUN, set_("k"))
    )
    for writer in writers:
        with pytest.raises(JournalFailed, match="no space left on device"):
            await writer
    assert not waiter.done()
    assert await store.get(RUN, 1, "n", 0) == b"1"
    waiter.cancel()
    journal.fails_with = None
    assert await open_store(journal).write(RUN, add) == 2


async def test_a_failed_journal_is_reported_once_the_store_knows() -> None:
    """The process must receive the error even when only the store writes."""
    journal, told = TestJournal(), list[Exception]()
    store = StoreService(journal, Rounds(), on_journal_failure=told.append)
    journal.fails_with = OSError("no space left on device")
    with pytest.raises(JournalFailed):
        await store.write(RUN, set_("k"))
    assert told == [journal.fails_with]


async def test_a_cancelled_write_does_not_affect_others() -> None:
    journal = TestJournal()
    store = open_store(journal)
    journal.hold()
    in_flight, *queued = await started(store.write(RUN, Add(writer=WRITER, round=1, key="n", amount=1)))
    await journal.until_held()
    queued = await started(
        store.write(RUN, Add(writer=WRITER, round=1, key="n", amount=10)),
        store.write(RUN, Add(writer=WRITER, round=1, key="n", amount=100)),
    )
    in_flight.cancel()
    queued[0].cancel()
    journal.release()
    assert await queued[1] in (101, 111)
    assert journal.rows[RUN, 1, "n"] == b"%d" % queued[1].result()


async def test_a_wait_ends_on_time_and_names_the_missing_keys() -> None:
    store = open_store(TestJournal())
    await store.write(RUN, set_("a"))
    with pytest.raises(
        KeyWaitTimedOut, match=r"2 keys \('b', 'c'\) were not set in run 'digits' within 0.01 s"
    ):
        await store.wait(RUN, 1, ["b", "a", "c"], 0.01)
    with pytest.raises(KeyWaitTimedOut, match="key 'b' was not set"):
        await store.get(RUN, 1, "b", 0.01)
    many = [f"{n}" + "ä" * 500 for n in range(1000)]
    with pytest.raises(KeyWaitTimedOut, match="and 992 more") as refused:
        await store.wait(RUN, 1, many, 0)
    assert len(str(refused.value).encode()) < 2_000
    assert not store._runs[RUN].waits.rounds


async def test_a_waiter_that_goes_leaves_nothing_behind() -> None:
    store = open_store(TestJournal())
    (waiter,) = await started(store.get(RUN, 1, "k", FOR_EVER))
    assert store._runs[RUN].waits.rounds
    waiter.cancel()
    await asyncio.wait([waiter])
    assert not store._runs[RUN].waits.rounds


async def test_a_new_round_ends_the_old_one() -> None:
    """Waiters of the old round are refused at once, its data leaves memory and journal, the run's own stays. Of the
    old round, only repetitions of completed writes are answered."""
    journal, rounds = TestJournal(), Rounds()
    store = open_store(journal, rounds)
    operation = Operation("c", 0, 1)
    completed = Set(writer=WRITER, round=1, key="old", value=b"1", operation=operation)
    await store.write(RUN, completed)
    await store.write(RUN, set_("kept", round=0))
    old, own = await started(store.get(RUN, 1, "k", FOR_EVER), store.get(RUN, 0, "k", FOR_EVER))
    rounds.of[RUN] = 2
    store.forget_rounds_before(RUN, 2)
    with pytest.raises(RoundOver) as refused:
        await old
    assert refused.value.current_round == 2
    assert not own.done()
    for request in (store.get(RUN, 1, "old", 0), store.write(RUN, set_("k", round=1))):
        with pytest.raises(RoundOver):
            await request
    with pytest.raises(RoundOver):
        await store.write(RUN, Set(writer=WRITER, round=0, key="k", value=b"", writer_round=1))
    assert not store.check(RUN, 2, ["old"])
    await store.write(RUN, Set(writer=WRITER, round=0, key="k", value=b"", writer_round=2))
    await own
    await store.write(RUN, completed)
    assert {key for _, _, key in journal.rows} == {"kept", "k", operation.record_key}


async def test_a_write_under_way_when_its_round_ends_stays_nowhere() -> None:
    """Only its record stays; a repetition that came while it was under way is answered too."""
    journal, rounds = TestJournal(), Rounds()
    store = open_store(journal, rounds)
    journal.hold()
    write = Set(writer=WRITER, round=1, key="k", value=b"", operation=Operation("c", 0, 1))
    (late,) = await started(store.write(RUN, write))
    await journal.until_held()
    rounds.of[RUN] = 2
    store.forget_rounds_before(RUN, 2)
    queued = await started(store.write(RUN, set_("j", round=2)), store.write(RUN, write))
    journal.release()
    await asyncio.gather(late, *queued)
    assert store.list_keys(RUN, 2, "", "", 10) == ["j"]
    await store.drain()
    assert {key for _, _, key in journal.rows} == {"j", Operation("c", 0, 1).record_key}


async def test_a_write_decided_after_its_round_ended_is_refused() -> None:
    journal, rounds = TestJournal(), Rounds()
    store = open_store(journal, rounds)
    journal.hold()
    await started(store.write(RUN, set_("first")))
    await journal.until_held()
    (queued,) = await started(store.write(RUN, set_("second")))
    rounds.of[RUN] = 2
    journal.release()
    with pytest.raises(RoundOver):
        await queued


async def test_a_large_round_goes_from_the_journal_bit_by_bit() -> None:
    """Its deletions never fill a commit that a write waits for."""
    journal, rounds = TestJournal(), Rounds()
    store = open_store(journal, rounds)
    await asyncio.gather(*(store.write(RUN, set_(f"{n}")) for n in range(600)))
    rounds.of[RUN] = 2
    journal.commits.clear()
    store.forget_rounds_before(RUN, 2)
    await store.write(RUN, set_("new", round=2))
    await store.drain()
    assert list(journal.rows) == [(RUN, 2, "new")]
    assert [len(commit) for commit in journal.commits] == [251, 250, 100]


async def test_a_restarted_store_goes_on() -> None:
    """It restores values and completed writes from the journal alone, and no value of rounds that are over."""
    journal, rounds = TestJournal(), Rounds()
    before = open_store(journal, rounds)
    add = Add(writer=WRITER, round=1, key="n", amount=1, operation=Operation("c", 0, 1))
    assert await before.write(RUN, add) == 1
    await before.write(RUN, set_("own", round=0))
    after = open_store(journal, rounds)
    assert await after.write(RUN, add) == 1
    assert await after.get(RUN, 1, "n", 0) == b"1"
    assert await after.get(RUN, 0, "own", 0) == b"1"
    rounds.of[RUN] = 2
    later = open_store(journal, rounds)
    await later.write(RUN, set_("k", round=2))
    assert await later.write(RUN, add) == 1
    await later.drain()
    assert {key for _, _, key in journal.rows} == {"own", "k", Operation("c", 0, 1).record_key}


async def test_unknown_runs_and_rounds() -> None:
    store = open_store(TestJournal(), Rounds({RUN: 1, "new": 0}))
    with pytest.raises(RunNotFound):
        await store.write("other", set_("k"))
    with pytest.raises(RunNotFound):
        store.check("other", 0, ["k"])
    with pytest.raises(RoundNotBegun):
        await store.get("new", 1, "k", FOR_EVER)
    await store.write("new", set_("k", round=0))
    store.forget_rounds_before("other", 3)
    assert "other" not in store._runs


async def test_the_queue_of_writes_is_bounded() -> None:
    journal = TestJournal()
    store = open_store(journal, limits=StoreLimits(queued_bytes=10))
    journal.hold()
    tasks = await started(store.write(RUN, set_("k", b"x" * 100)))
    await journal.until_held()
    tasks += await started(
        store.write(RUN, set_("k", b"x" * 100))
        # Alone in the queue: of any size.
    )
    with pytest.raises(StoreBusy) as refused:
        await store.write(RUN, set_("k"))
    assert refused.value.retry_after > 0
    journal.release()
    await asyncio.gather(*tasks)
    await store.write(RUN, set_("k"))


async def test_a_draining_store_ends_waits_and_finishes_writes() -> None:
    journal = TestJournal()
    store = open_store(journal)
    journal.hold()
    waiter, writer = await started(store.get(RUN, 1, "k", FOR_EVER), store.write(RUN, set_("j")))
    await journal.until_held()
    (draining,) = await started(store.drain())
    with pytest.raises(Draining):
        await waiter
    with pytest.raises(Draining):
        await store.write(RUN, set_("k"))
    assert not draining.done()
    journal.release()
    await draining
    await writer


async def test_a_commit_under_way_outlives_a_drain_whose_grace_is_over() -> None:
    """It becomes durable, and its writer gets a successful reply."""
    journal = TestJournal()
    store = open_store(journal)
    journal.hold()
    (writer,) = await started(store.write(RUN, set_("j")))
    await journal.until_held()
    (draining,) = await started(store.drain())
    draining.cancel()
    await asyncio.wait([draining])
    journal.release()
    await writer
    assert list(journal.rows) == [(RUN, 1, "j")]
