"""A wait for keys returns values of one moment; the number of waiters is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.base.limits import FRAME_BYTES, MAX_MULTI_BYTES, MAX_VALUE_BYTES, StoreLimits
from rallypoint.rendezvous.base.refusals import AnswerTooLarge, KeyWaitTimedOut, TooManyWaiters
from rallypoint.rendezvous.core.commands import RoundOver
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rendezvous.store.writes import DeleteKey, MultiSet, Set
from rendezvous.store.store_fakes import RUN, WRITER, Rounds, TestJournal, open_store
from support.waiting import started

FOR_EVER = 3600.0


async def set_(store: StoreService, **entries: bytes) -> None:
    for key, value in entries.items():
        await store.write(RUN, Set(writer=WRITER, round=1, key=key, value=value))


async def test_several_values_come_in_the_order_of_their_keys() -> None:
    store = open_store(TestJournal())
    await set_(store, a=b"1", b=b"2")
    assert await store.multi_get(RUN, 1, ["b", "a", "b"], 0) == [b"2", b"1", b"2"]
    with pytest.raises(KeyWaitTimedOut, match="key 'c' was not set"):
        await store.multi_get(RUN, 1, ["a", "c"], 0)


async def test_several_values_are_those_of_the_moment_when_all_were_there() -> None:
    """They are not those from when each was set, nor from when the reader woke; several writes come in between."""
    journal = TestJournal()
    store = open_store(journal)
    await set_(store, a=b"first")
    (reading,) = await started(store.multi_get(RUN, 1, ["a", "b"], FOR_EVER))
    journal.hold()
    tasks = await started(set_(store, other=b""))
    await journal.until_held()
    tasks += await started(set_(store, a=b"2"), set_(store, b=b"2"), set_(store, a=b"3"))
    tasks += await started(store.write(RUN, DeleteKey(writer=WRITER, round=1, key="b")))
    journal.release()
    assert await reading == [b"2", b"2"]
    await asyncio.gather(*tasks)
    (again,) = await started(store.multi_get(RUN, 1, ["a", "b"], FOR_EVER))
    assert not again.done()
    await set_(store, b=b"4")
    assert await again == [b"3", b"4"]


async def test_no_reader_sees_half_of_several_values() -> None:
    """This holds also for a reader that waited for the first of them."""
    store = open_store(TestJournal())
    await set_(store, b=b"old")
    both, one = await started(
        store.multi_get(RUN, 1, ["a", "b"], FOR_EVER), store.multi_get(RUN, 1, ["b", "c"], FOR_EVER)
    )
    await store.write(RUN, MultiSet(writer=WRITER, round=1, entries={"a": b"new", "b": b"new", "c": b"new"}))
    assert await both == [b"new", b"new"]
    assert await one == [b"new", b"new"]


async def test_an_answer_that_is_too_large_reports_how_many_keys_fit() -> None:
    """One byte more than fits is refused; the error has the number of keys that fit."""
    store = open_store(TestJournal())
    last = MAX_MULTI_BYTES - (MAX_VALUE_BYTES + FRAME_BYTES) - FRAME_BYTES
    await set_(store, a=b"x" * MAX_VALUE_BYTES, b=b"y" * last, c=b"y" * (last + 1), d=b"")
    assert len(await store.multi_get(RUN, 1, ["a", "b"], 0)) == 2
    with pytest.raises(
        AnswerTooLarge, match=r"3 keys take 4,186,129 bytes, .* at most 4,186,112; .* first 1 fit"
    ) as refused:
        await store.multi_get(RUN, 1, ["a", "c", "d"], 0)
    assert refused.value.fitting == 1
    with pytest.raises(AnswerTooLarge):
        await store.multi_get(RUN, 1, ["a", "a"], 0)


async def test_the_number_of_waiters_is_bounded() -> None:
    """One more is refused for now; a waiter that ends in any way makes room; a key that is there needs none."""
    rounds = Rounds()
    store = open_store(TestJournal(), rounds, StoreLimits(waiters=2))
    first, second = await started(store.get(RUN, 1, "k", FOR_EVER), store.get(RUN, 0, "k", FOR_EVER))
    with pytest.raises(TooManyWaiters) as refused:
        await store.get(RUN, 1, "j", FOR_EVER)
    assert (refused.value.waiters, refused.value.waited_keys) == (2, 2)
    assert refused.value.retry_after > 0
    with pytest.raises(KeyWaitTimedOut):
        await store.get(RUN, 1, "j", 0)
    second.cancel()
    await asyncio.wait([second])
    with pytest.raises(KeyWaitTimedOut):
        await store.get(RUN, 1, "j", 0.01)
    (third,) = await started(store.get(RUN, 1, "j", FOR_EVER))
    await set_(store, k=b"")
    await first
    assert await store.get(RUN, 1, "k", FOR_EVER) == b""
    rounds.of[RUN] = 2
    store.forget_rounds_before(RUN, 2)
    with pytest.raises(RoundOver):
        await third
    assert store._runs[RUN].waits.waiters == 0


async def test_the_number_of_waited_keys_is_bounded() -> None:
    store = open_store(TestJournal(), limits=StoreLimits(waited_keys=3))
    (alone,) = await started(store.wait(RUN, 1, ["a", "b", "c", "d"], FOR_EVER))
    assert not alone.done(), "alone, as many as a request may have"
    with pytest.raises(TooManyWaiters):
        await store.wait(RUN, 1, ["a"], FOR_EVER)
    await store.write(RUN, MultiSet(writer=WRITER, round=1, entries=dict.fromkeys("abcd", b"")))
    await alone
    tasks = await started(store.wait(RUN, 1, ["e", "f"], FOR_EVER), store.wait(RUN, 1, ["g"], FOR_EVER))
    assert not any(task.done() for task in tasks)
    with pytest.raises(TooManyWaiters):
        await store.wait(RUN, 1, ["g"], FOR_EVER)
    await set_(store, e=b"", f=b"", g=b"")
    await asyncio.gather(*tasks)


async def test_a_waiter_cancelled_just_before_the_write_does_not_affect_others() -> None:
    """It is cancelled, but not yet awake, when the key is set: the others get the value."""
    store = open_store(TestJournal())
    gone, stays = await started(store.get(RUN, 1, "k", FOR_EVER), store.get(RUN, 1, "k", FOR_EVER))
    run = store._runs[RUN]
    gone.cancel()
    step = [StoreChange(RUN, 1, "k", b"1")]
    run.spaces.apply(step[0])
    run.waits.settle(run.spaces, step)
    assert await stays == b"1"
    await asyncio.wait([gone])
    assert gone.cancelled()
    assert not run.waits.rounds


async def test_a_wait_that_timed_out_names_the_key_missing_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds also when the key is set before the waiter is awake."""
    timers: list[Callable[[], None]] = []

    def call_later(delay: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        timers.append(partial(callback, *args))
        return asyncio.TimerHandle(0.0, callback, args, loop)

    loop = asyncio.get_running_loop()
    store = open_store(TestJournal())
    monkeypatch.setattr(loop, "call_later", call_later)
    (waiting,) = await started(store.get(RUN, 1, "k", FOR_EVER))
    monkeypatch.undo()
    timers[0]()
    run = store._runs[RUN]
    step = [StoreChange(RUN, 1, "k", b"1")]
    run.spaces.apply(step[0])
    run.waits.settle(run.spaces, step)
    with pytest.raises(KeyWaitTimedOut, match="key 'k' was not set"):
        await waiting


async def test_runs_have_waiters_of_their_own() -> None:
    store = open_store(TestJournal(), Rounds({"one": 1, "two": 1}), StoreLimits(waiters=1))
    tasks = await started(store.get("one", 1, "k", FOR_EVER), store.get("two", 1, "k", FOR_EVER))
    assert not any(task.done() for task in tasks)
    await store.drain()
    await asyncio.wait(tasks)
    for task in tasks:
        task.exception()
