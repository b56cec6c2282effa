"""Waiters are woken by the key that completes their wait, and only then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.store.waits import SpaceWaiters

KEYS = ["a", "b", "c"]


@given(
    waits=st.lists(st.sets(st.sampled_from(KEYS), min_size=1), max_size=5),
    changes=st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), max_size=15),
)
def test_a_waiter_is_woken_when_all_its_keys_are_there_at_once(
    waits: list[set[str]], changes: list[tuple[str, bool]]
) -> None:
    """The result is that of a model that checks all waits after every change."""
    waiting: SpaceWaiters[int] = SpaceWaiters()
    for number, keys in enumerate(waits):
        waiting.add(keys, keys, number)
    present: set[str] = set()
    open_waits = dict(enumerate(waits))
    for key, is_set in changes:
        (present.add if is_set else present.discard)(key)
        told: list[int] = []
        if is_set:
            told = [waiter.reply for waiter in waiting.key_set(key)]
        else:
            waiting.key_deleted(key)
        expected = [number for number, keys in open_waits.items() if keys <= present]
        for number in expected:
            del open_waits[number]
        assert told == expected
        assert {waiter.reply: waiter.missing for waiter in waiting} == {
            number: keys - present for number, keys in open_waits.items()
        }


def test_nothing_is_left_of_a_waiter_that_went() -> None:
    waiting: SpaceWaiters[str] = SpaceWaiters()
    waiter = waiting.add(["a", "b"], ["a"], "one")
    waiting.discard(waiter)
    waiting.discard(waiter)
    assert len(waiting) == 0
    assert waiting.key_set("a") == []
    assert not waiting._by_key
