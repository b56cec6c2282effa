"""Entries become few keys, all within etcd's limits, and obsolete entries are deleted with them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rallypoint.etcd.values import Delete, Put
from rallypoint.rendezvous.journal.etcd.commit import Change, Packing, SpaceContents
from rallypoint.rendezvous.journal.etcd.keys import PART_BYTES, checkpoint_key, entry_key, pack_key
from rallypoint.rendezvous.journal.journal import Entry, OutOfSequenceError
from rendezvous.journal.entries import change, checkpoint, forgotten, record
from rendezvous.journal.model import Model, random_call


def _pack(contents: SpaceContents, entries: Sequence[Entry]) -> list[Change]:
    packing = Packing(contents)
    for entry in entries:
        packing.add(entry)
    return packing.changes()


def _puts(changes: Sequence[Change]) -> list[bytes]:
    return [each.key for each in changes if isinstance(each, Put)]


def test_a_thousand_joins_are_one_key() -> None:
    """Entries that arrive together are packed, run by run."""
    contents = SpaceContents()
    changes = _pack(contents, [record(n, run) for n in range(1, 1001) for run in ("a", "b")])
    assert _puts(changes) == [pack_key("a", 0, 1), pack_key("b", 0, 1)]
    assert contents.pack_count == 2


def test_nothing_is_kept_in_memory_of_a_state_that_had_no_run() -> None:
    """For any number of names that a client uses for states."""
    contents = SpaceContents()
    states = [change("state", b"x", -1, f"run {number}") for number in range(100)]
    assert _puts(_pack(contents, states)) == [entry_key(state.run_id, 0, -1, "state") for state in states]
    assert len(_pack(contents, [replace(state, value=None) for state in states])) == len(states)
    assert contents == SpaceContents()


def test_a_pack_is_no_larger_than_the_limit_of_a_key() -> None:
    """A record that is larger is alone in its pack, in parts."""
    entries: list[Entry] = [
        *(record(n, padding=100_000) for n in range(1, 11)),
        record(11, padding=2 * PART_BYTES),
        record(12),
    ]
    changes = _pack(SpaceContents(), entries)
    assert max(len(each.value) for each in changes if isinstance(each, Put)) <= PART_BYTES + 64
    assert [key for key in _puts(changes) if key == pack_key("run", 0, 12)]
    assert len(_puts(changes)) == 2 + 3 + 1


def test_entries_replaced_or_dropped_within_a_commit_are_never_written() -> None:
    """Only the final values are."""
    entries: list[Entry] = [
        record(1),
        record(2),
        change("k", b"1"),
        change("k", b"2"),
        checkpoint(1, 2),
        checkpoint(2, 3),
    ]
    assert _puts(_pack(SpaceContents(), entries)) == [checkpoint_key("run"), entry_key("run", 0, 1, "k")]


def test_a_pack_stays_whole_as_long_as_a_record_of_it_is_kept() -> None:
    """And is deleted with the last."""
    contents = SpaceContents()
    _pack(contents, [record(n) for n in range(1, 6)])
    _pack(contents, [record(n) for n in range(6, 11)])
    assert _pack(contents, [checkpoint(10, 4)])[1:] == []
    assert contents.packs == {"run": [1, 6]}
    assert _pack(contents, [checkpoint(10, 6)])[1:] == [Delete(pack_key("run", 0, 1), pack_key("run", 0, 6))]
    assert contents.packs == {"run": [6]}
    assert _pack(contents, [checkpoint(10, 11)])[1:] == [
        Delete(pack_key("run", 0, 6), pack_key("run", 0, 11))
    ]
    assert contents.packs == {"run": []}
    assert contents.pack_count == 0


def test_parts_that_a_smaller_value_does_not_need_are_deleted() -> None:
    """So are those of a value that is deleted."""
    contents = SpaceContents()
    _pack(contents, [change("k", b"x" * (3 * PART_BYTES))])
    key = entry_key("run", 0, 1, "k")
    assert Delete(key + b"/0002", key + b"0") in _pack(contents, [change("k", b"x" * (2 * PART_BYTES))])
    assert Delete(key + b"/0001", key + b"0") in _pack(contents, [change("k", None)])
    assert _pack(contents, [change("k", None)]) == [Delete(key)]


def test_to_forget_a_run_is_one_deletion() -> None:
    """For any number of keys; later entries, also in the same commit, have other keys."""
    contents = SpaceContents()
    _pack(contents, [record(1), *(change(f"k{n}", b"x") for n in range(500))])
    changes = _pack(contents, [forgotten(1), record(2), change("k0", b"new")])
    assert len([each for each in changes if isinstance(each, Delete)]) == 1
    assert _puts(changes) == [checkpoint_key("run"), pack_key("run", 1, 2), entry_key("run", 1, 1, "k0")]


def test_an_entry_out_of_sequence_is_refused() -> None:
    """As by every journal."""
    with pytest.raises(OutOfSequenceError, match="comes where record 1 is due"):
        _pack(SpaceContents(), [record(2)])


def test_no_key_is_touched_twice() -> None:
    """etcd refuses a transaction that puts a key twice, or puts one in a range that it deletes."""
    draw = random.Random(0)
    model, contents = Model(), SpaceContents()
    deletions = 0
    for _ in range(400):
        call = random_call(draw, model)
        model = model.after(call)
        changes = _pack(contents, call)
        puts = _puts(changes)
        assert len(puts) == len(set(puts))
        for each in changes:
            if isinstance(each, Delete):
                deletions += 1
                end = each.end or each.key + b"\0"
                assert each.key < end
                assert not [key for key in puts if each.key <= key < end]
    assert deletions > 100
