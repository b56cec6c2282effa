"""The decisions of writes: the semantics of torch's stores, and repetition."""

from __future__ import annotations

from zlib import crc32

import pytest

from rallypoint.rendezvous.base.entries import Operation
from rallypoint.rendezvous.base.limits import MAX_VALUE_BYTES, StoreLimits
from rallypoint.rendezvous.base.refusals import (
    NotAnInteger,
    OperationReused,
    OperationSuperseded,
    ValueTooLarge,
)
from rallypoint.rendezvous.store.core import RunDraft, RunSpaces
from rallypoint.rendezvous.store.writes import (
    Add,
    Append,
    CompareSet,
    Comparison,
    DeleteKey,
    MultiSet,
    Set,
    Write,
    decide,
)
from rendezvous.store.store_fakes import WRITER


class Space:
    """One space, to write to directly."""

    def __init__(self) -> None:
        self.draft = RunDraft(RunSpaces("run"), StoreLimits())

    def do(self, write: Write[object]) -> object:
        return decide(self.draft, write, 1)

    def get(self, key: str) -> bytes | None:
        return self.draft.value(0, key)


def named(slot: int, sequence: int) -> Operation:
    return Operation("client", slot, sequence)


def test_add_counts_from_nothing_and_keeps_decimal_ascii() -> None:
    space = Space()
    assert space.do(Add(writer=WRITER, round=0, key="n", amount=5)) == 5
    assert space.do(Add(writer=WRITER, round=0, key="n", amount=-7)) == -2
    assert space.get("n") == b"-2"
    space.do(Set(writer=WRITER, round=0, key="n", value=b"41"))
    assert space.do(Add(writer=WRITER, round=0, key="n", amount=1)) == 42
    assert space.do(Add(writer=WRITER, round=0, key="n", amount=0)) == 42
    assert space.do(Add(writer=WRITER, round=0, key="edge", amount=2**63 - 1)) == 2**63 - 1


@pytest.mark.parametrize(
    "value", [b"", b"1.5", b" 1", b"1_000", "\u0661".encode(), b"9" * 19, b"0x1", b"\xff"]
)
def test_add_refuses_a_value_that_is_no_integer(value: bytes) -> None:
    space = Space()
    space.do(Set(writer=WRITER, round=0, key="n", value=value))
    with pytest.raises(NotAnInteger):
        space.do(Add(writer=WRITER, round=0, key="n", amount=1))
    assert space.get("n") == value


def test_append_is_that_of_torch() -> None:
    """An absent key counts as empty and is there afterwards, also if nothing was appended."""
    space = Space()
    assert space.do(Append(writer=WRITER, round=0, key="k", value=b"ab")) == 2
    assert space.do(Append(writer=WRITER, round=0, key="k", value=b"")) == 2
    assert space.do(Append(writer=WRITER, round=0, key="k", value=b"c\x00")) == 4
    assert space.get("k") == b"abc\x00"
    assert space.do(Append(writer=WRITER, round=0, key="empty", value=b"")) == 0
    assert space.get("empty") == b""
    space.do(Add(writer=WRITER, round=0, key="n", amount=4))
    space.do(Append(writer=WRITER, round=0, key="n", value=b"2"))
    assert space.do(Add(writer=WRITER, round=0, key="n", amount=0)) == 42


def test_append_goes_to_the_largest_value_and_no_further() -> None:
    space = Space()
    space.do(Set(writer=WRITER, round=0, key="k", value=b"x" * (MAX_VALUE_BYTES - 1)))
    assert space.do(Append(writer=WRITER, round=0, key="k", value=b"y")) == MAX_VALUE_BYTES
    with pytest.raises(ValueTooLarge, match=r"4,177,921 bytes long; a value has at most 4,177,920"):
        space.do(Append(writer=WRITER, round=0, key="k", value=b"z"))
    assert space.do(Append(writer=WRITER, round=0, key="k", value=b"")) == MAX_VALUE_BYTES


def test_several_values_take_effect_as_one_write() -> None:
    space = Space()
    write = MultiSet(writer=WRITER, round=0, entries={"a": b"1", "b": b""}, operation=named(0, 1))
    space.do(write)
    assert (space.get("a"), space.get("b")) == (b"1", b"")
    space.do(Set(writer=WRITER, round=0, key="a", value=b"2"))
    space.do(write)
    assert space.get("a") == b"2", "a repetition changes nothing"
    with pytest.raises(OperationReused):
        space.do(MultiSet(writer=WRITER, round=0, entries={"a": b"1", "c": b""}, operation=named(0, 1)))


def test_requests_that_run_together_have_other_fingerprints() -> None:
    """The borders between keys and values make a difference."""
    several: list[dict[str, bytes]] = [
        {"a": b"", "b": b""},
        {"b": b"", "a": b""},
        {"ab": b""},
        {"a": b"b"},
        {"a": b"b", "c": b"d"},
        {"a": b"bc", "d": b""},
        {"a": b"12", "b": b"3"},
        {"a": b"1", "b": b"23"},
        {"a": b"x", "b": b""},
        {"a 0 b": b"x"},
    ]
    assert len(
        {MultiSet(writer=WRITER, round=0, entries=entries).fingerprint() for entries in several}
    ) == len(several)


def test_fingerprints_are_those_that_journals_keep() -> None:
    """A write that is repeated over an upgrade is recognised by a record of the version before."""
    kept: list[tuple[Write[object], bytes]] = [
        (Set(writer=WRITER, round=0, key="k", value=b"v"), b"Setkv"),
        (Add(writer=WRITER, round=0, key="k", amount=-7), b"Addk-7"),
        (CompareSet(writer=WRITER, round=0, key="k", expected=b"a", desired=b"b"), b"CompareSetk1 ab"),
        (DeleteKey(writer=WRITER, round=0, key="k"), b"Deletek"),
    ]
    for write, summed in kept:
        assert write.fingerprint() == crc32(summed)


@pytest.mark.parametrize(
    ("present", "expected", "swapped", "after"),
    [
        (None, b"", True, b"new"),
        (None, b"old", False, None),
        (b"", b"", True, b"new"),
        (b"old", b"old", True, b"new"),
        (b"old", b"", False, b"old"),
        (b"old", b"other", False, b"old"),
    ],
)
def test_compare_set_is_that_of_torch(
    present: bytes | None, expected: bytes, swapped: bool, after: bytes | None
) -> None:
    space = Space()
    if present is not None:
        space.do(Set(writer=WRITER, round=0, key="k", value=present))
    answer = space.do(CompareSet(writer=WRITER, round=0, key="k", expected=expected, desired=b"new"))
    assert answer == Comparison(swapped, after)
    assert space.get("k") == after


def test_delete_returns_if_the_key_was_there() -> None:
    space = Space()
    assert space.do(DeleteKey(writer=WRITER, round=0, key="k")) is False
    space.do(Set(writer=WRITER, round=0, key="k", value=b""))
    assert space.do(DeleteKey(writer=WRITER, round=0, key="k")) is True
    assert space.get("k") is None


def test_a_repeated_write_is_answered_as_before_after_other_writes() -> None:
    space = Space()
    add = Add(writer=WRITER, round=0, key="n", amount=1, operation=named(0, 1))
    assert space.do(add) == 1
    assert space.do(Add(writer=WRITER, round=0, key="n", amount=1, operation=named(1, 1))) == 2
    assert space.do(add) == 1
    assert space.get("n") == b"2"
    delete = DeleteKey(writer=WRITER, round=0, key="n", operation=named(0, 2))
    assert space.do(delete) is True
    space.do(Set(writer=WRITER, round=0, key="n", value=b"7"))
    assert space.do(delete) is True
    assert space.get("n") == b"7"


def test_a_write_that_comes_after_a_later_one_of_its_slot_is_refused() -> None:
    space = Space()
    space.do(Add(writer=WRITER, round=0, key="n", amount=1, operation=named(0, 2)))
    with pytest.raises(OperationSuperseded, match="operation 1 of slot client/0 comes too late"):
        space.do(Add(writer=WRITER, round=0, key="n", amount=1, operation=named(0, 1)))
    assert space.get("n") == b"1"


@pytest.mark.parametrize(
    "other",
    [
        Set(writer=WRITER, round=0, key="n", value=b"1", operation=named(0, 1)),
        Add(writer=WRITER, round=0, key="n", amount=2, operation=named(0, 1)),
        Add(writer=WRITER, round=0, key="m", amount=1, operation=named(0, 1)),
        DeleteKey(writer=WRITER, round=0, key="n", operation=named(0, 1)),
    ],
)
def test_another_write_with_a_used_number_is_refused(other: Write[object]) -> None:
    """Otherwise a request with a number that was used before would be lost without an error."""
    space = Space()
    space.do(Add(writer=WRITER, round=0, key="n", amount=1, operation=named(0, 1)))
    with pytest.raises(OperationReused):
        space.do(other)


def test_slots_and_clients_count_apart_and_spaces_together() -> None:
    space = Space()
    for operation, round in [
        (named(0, 1), 0),
        (named(1, 1), 0),
        (Operation("other", 0, 1), 0),
        (named(0, 2), 1),
    ]:
        space.do(Add(writer=WRITER, round=round, key="n", amount=1, operation=operation))
    assert space.get("n") == b"3"
    assert space.draft.value(1, "n") == b"1"
    with pytest.raises(OperationReused):
        space.do(Add(writer=WRITER, round=0, key="n", amount=1, operation=named(0, 2)))
