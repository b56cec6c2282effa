"""No two objects of a journal share a key on etcd, and no run's range has a key of another, with any names."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.etcd.values import prefix_end
from rallypoint.rendezvous.journal.etcd.keys import (
    HEAD,
    STAGED,
    CheckpointKey,
    EntryKey,
    PackKey,
    checkpoint_key,
    entry_key,
    era_prefix,
    pack_key,
    parse,
    part_key,
    parts_end,
    staged_key,
)

# Text that protobuf accepts, above all text that looks like a part of a key.
_TEXTS = st.text(st.sampled_from("/%a0.\x00ü-") | st.characters(exclude_categories=["Cs"]), max_size=8)
_NUMBERS = st.integers(0, 2**62)


@given(_TEXTS, _NUMBERS, _NUMBERS, st.integers(-1, 2**62), _TEXTS)
def test_a_key_identifies_its_contents(run_id: str, era: int, first: int, round_: int, name: str) -> None:
    """Also that of a further part."""
    for key, parsed in (
        (checkpoint_key(run_id), CheckpointKey(run_id)),
        (pack_key(run_id, era, first), PackKey(run_id, era, first)),
        (entry_key(run_id, era, round_, name), EntryKey(run_id, era, round_, name)),
    ):
        assert parse(key) == (parsed, None)
        assert parse(part_key(key, 3)) == (parsed, key)
        assert key < part_key(key, 1) < part_key(key, 0xFFFF) < parts_end(key)


@given(_TEXTS, _TEXTS, st.integers(0, 20), st.integers(0, 20), _TEXTS)
def test_the_range_of_an_era_has_that_era_of_that_run_in_it_and_nothing_else(
    run_id: str, other: str, era: int, other_era: int, name: str
) -> None:
    """A run is forgotten by deleting one range."""
    begin = era_prefix(run_id, era)
    end = prefix_end(begin)
    same = (run_id, era) == (other, other_era)
    for key in (pack_key(other, other_era, 1), entry_key(other, other_era, 0, name)):
        assert (begin <= key < end) == same
    assert not begin <= checkpoint_key(other) < end
    assert not begin <= HEAD < end
    assert not begin <= staged_key(0) < end


@given(_TEXTS, st.lists(_NUMBERS, max_size=10))
def test_packs_are_in_the_order_of_their_revisions(run_id: str, revisions: list[int]) -> None:
    """And further parts of one before the next one."""
    keys = sorted(pack_key(run_id, 0, revision) for revision in revisions)
    assert keys == [pack_key(run_id, 0, revision) for revision in sorted(revisions)]
    for key, later in pairwise(keys):
        assert key == later or parts_end(key) <= later


@given(_TEXTS, _TEXTS, _TEXTS)
def test_further_parts_of_one_entry_are_no_other_entry_s(run_id: str, name: str, other: str) -> None:
    """A name may end like a part."""
    key, another = entry_key(run_id, 0, 1, name), entry_key(run_id, 0, 1, other)
    assert name == other or not part_key(key, 0) <= another < parts_end(key)


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"other",
        b"runs/a",
        b"runs/a/x/records/1",
        b"runs/a/0/other/1",
        b"runs/a/0/records/1/1/1",
        b"\xff",
    ],
)
def test_a_key_of_no_known_kind_is_refused(key: bytes) -> None:
    """It is foreign, or damaged."""
    with pytest.raises(ValueError, match="is not a journal key"):
        parse(key)


def test_staged_parts_are_a_range_of_their_own() -> None:
    """One deletion removes them."""
    assert STAGED <= staged_key(0) < staged_key(0xFFFF) < prefix_end(STAGED)
