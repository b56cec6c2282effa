"""Obsolete entries are deleted in small steps, each once, and never one in use."""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.store.store import StoreSweep


def deletions(*keys: str) -> list[StoreChange]:
    return [StoreChange("run", 1, key, None) for key in keys]


def nothing_lives(round: int, key: str) -> bool:
    return False


def test_deletions_come_in_their_order_and_once() -> None:
    sweep = StoreSweep()
    assert not sweep
    sweep.add(deletions("a", "b", "c"))
    sweep.add(deletions("d"))
    assert [each.key for each in sweep.take(2, nothing_lives)] == ["a", "b"]
    assert [each.key for each in sweep.take(5, nothing_lives)] == ["c", "d"]
    assert not sweep


def test_a_key_in_use_again_is_not_deleted() -> None:
    """This is checked when the deletion is made, not when it is added."""
    sweep = StoreSweep()
    living = {(1, "a")}
    sweep.add(deletions("a", "b"))
    living.add((1, "b"))
    living.remove((1, "a"))
    assert sweep.take(2, lambda round, key: (round, key) in living) == deletions("a")


def test_nothing_is_looked_at_before_its_time() -> None:
    looked: list[str] = []

    def lazily() -> Iterator[StoreChange]:
        for deletion in deletions("a", "b", "c", "d"):
            looked.append(deletion.key)
            yield deletion

    sweep = StoreSweep()
    sweep.add(lazily())
    assert looked == ["a"]
    sweep.take(2, nothing_lives)
    assert looked == ["a", "b"]


def test_nothing_to_do_is_nothing_to_do() -> None:
    sweep = StoreSweep()
    sweep.add([])
    assert not sweep


def test_take_all_leaves_nothing() -> None:
    sweep = StoreSweep()
    sweep.add(deletions("a", "b"))
    assert list(sweep.take_all()) == deletions("a", "b")
    assert not sweep
