"""No transaction of any commit is larger than etcd's limits."""

from __future__ import annotations

import pytest

from rallypoint.etcd.values import Delete, Put, Txn, to_txn
from rallypoint.rendezvous.journal.etcd.commit import (
    CLEAR_STAGING,
    Change,
    CommitStep,
    Cost,
    cost,
    plan,
    unstage,
)
from rallypoint.rendezvous.journal.etcd.keys import PART_BYTES
from rendezvous.journal.entries import change, checkpoint, forgotten, record

# etcd's default limits; the head and the comparisons need some of it.
_OPERATIONS = 128
_BYTES = int(1.5 * 1024 * 1024)


def _puts(count: int, size: int, key: int = 10) -> list[Change]:
    return [Put(b"%0*d" % (key, n), b"x" * size) for n in range(count)]


@pytest.mark.parametrize(
    "changes",
    [
        _puts(98, 10),
        _puts(99, 10),
        _puts(1000, 10),
        _puts(1000, 10, key=6_000),
        _puts(1, PART_BYTES),
        _puts(2, PART_BYTES),
        _puts(40, PART_BYTES),
        [*_puts(60, 10), *_puts(5, PART_BYTES - 7), *_puts(60, 10_000), *([Delete(b"a", b"b")] * 200)],
    ],
    ids=["all of one", "one more", "many", "long keys", "a part", "two parts", "many parts", "all kinds"],
)
def test_every_step_is_one_that_etcd_takes(changes: list[Change]) -> None:
    """With room for the head and the comparisons; and all steps together make all changes."""
    steps = plan(changes)
    for step in steps:
        assert len(step.changes) <= _OPERATIONS - 2
        assert to_txn(Txn([], step.changes)).ByteSize() <= _BYTES - 64 * 1024
    done = [each for step in steps for each in step.changes if not each.key.startswith(b"staged/")]
    assert done == changes


def test_changes_that_fit_are_one_transaction() -> None:
    """Nothing is staged without need; an empty commit is one too, because it checks the owner."""
    assert plan(_puts(98, 100)) == [CommitStep(_puts(98, 100))]
    assert plan([]) == [CommitStep([])]


def test_a_commit_that_does_not_fit_is_durable_with_its_last_staged_part() -> None:
    """Before that the head does not mention it; after that it does until the last of it is in its final key."""
    changes = [*_puts(150, 10_000), Delete(b"one"), Delete(b"from", b"to")]
    steps = plan(changes)
    assert [(step.durable, step.staged_parts) for step in steps] == [
        (False, 0),
        (True, 2),
        (True, 2),
        (True, 0),
    ]
    staged = [put.value for step in steps[:2] for put in step.changes if isinstance(put, Put)]
    assert [each for part in staged for each in unstage(part)] == changes
    assert steps[-1].changes[-1] == CLEAR_STAGING


def test_calls_go_together_as_long_as_they_fit() -> None:
    """By their approximate size."""
    assert cost([record(n) for n in range(1, 1001)]).changes == 1
    assert cost([record(1), record(1, "b"), change("k", b""), checkpoint(1, 1), forgotten(1)]).changes == 7
    assert cost([change("k", b"x" * PART_BYTES)]).changes == 2
    assert cost([change("k", b"x" * 1000)]).size > 1000
    assert Cost(98, 1024 * 1024).fits
    assert not (Cost(98, 0) + Cost(1, 0)).fits
    assert not (Cost(1, 1024 * 1024) + Cost(1, 1)).fits
