"""Properties of the spaces: they follow from the durable entries alone, and a batch is its writes one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.base.cooperative import finish
from rallypoint.rendezvous.base.entries import RESERVED, Operation, OperationRecord, StoreChange
from rallypoint.rendezvous.base.limits import StoreLimits
from rallypoint.rendezvous.base.refusals import (
    IntegerOverflow,
    NotAnInteger,
    OperationReused,
    OperationSuperseded,
    RoundNotBegun,
    RunStoreFull,
    TooManyKeys,
)
from rallypoint.rendezvous.core.commands import Refused, RoundOver
from rallypoint.rendezvous.store.core import RunDraft, RunSpaces, entry_bytes
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

RUN, ROUND = "run", 3
LIMITS = StoreLimits()

keys = st.sampled_from(["a", "b", "ä"])
rounds = st.sampled_from([0, ROUND])
values = st.sampled_from([b"", b"1", b"-7", b"x" * 300])
operations = st.none() | st.builds(
    Operation, client_id=st.sampled_from(["one", "two"]), slot=st.integers(0, 2), sequence=st.integers(1, 9)
)
common: dict[str, st.SearchStrategy[object]] = {
    "writer": st.just(WRITER),
    "round": rounds,
    "operation": operations,
}
writes: st.SearchStrategy[Write[object]] = st.one_of(
    st.builds(Set, key=keys, value=values, **common),
    st.builds(Add, key=keys, amount=st.integers(-3, 3), **common),
    st.builds(Append, key=keys, value=values, **common),
    st.builds(MultiSet, entries=st.dictionaries(keys, values, min_size=1), **common),
    st.builds(CompareSet, key=keys, expected=values, desired=values, **common),
    st.builds(DeleteKey, key=keys, **common),
)


def commit(run: RunSpaces, batch: list[Write[object]], limits: StoreLimits = LIMITS) -> list[object]:
    """Carry a batch out; return the answers, refusals by their text."""
    draft = RunDraft(run, limits)
    answers: list[object] = []
    for write in batch:
        try:
            answers.append(decide(draft, write, ROUND))
        except Refused as refusal:
            answers.append(f"{type(refusal).__name__}: {refusal}")
    records = draft.records()
    for change in [*chain.from_iterable(draft.steps()), *records]:
        run.apply(change)
    return answers


def values_of(run: RunSpaces) -> dict[int, dict[str, bytes]]:
    """The values of each space that has some."""
    return {
        round: {key: run.value(round, key) or b"" for key in run.keys(round, "", "", 100)}
        for round in run.rounds
    }


def contents(run: RunSpaces) -> tuple[dict[int, dict[str, bytes]], list[tuple[str, OperationRecord]]]:
    """All values of the spaces, and the records in their order of use."""
    return values_of(run), list(run.operations.items())


@given(batch=st.lists(writes, max_size=25), data=st.data())
def test_a_batch_is_its_writes_one_by_one(batch: list[Write[object]], data: st.DataObject) -> None:
    """Answers and contents do not depend on how writes are cut into batches."""
    limits = StoreLimits(run_bytes=1_000, run_keys=4)
    together, cut = RunSpaces(RUN), RunSpaces(RUN)
    answers = commit(together, batch, limits)
    apart: list[object] = []
    rest = batch
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        apart += commit(cut, rest[:size], limits)
        rest = rest[size:]
    assert apart == answers
    assert contents(cut) == contents(together)


def by_hand(spaces: dict[int, dict[str, bytes]], write: Write[object]) -> object:
    """Apply a write to plain dicts; return the answer, or the name of the refusal."""
    space = spaces[write.round]
    match write:
        case Set(key=key, value=value):
            space[key] = value
            return None
        case MultiSet(entries=entries):
            space.update(entries)
            return None
        case Append(key=key, value=value):
            space[key] = space.get(key, b"") + value
            return len(space[key])
        case Add(key=key, amount=amount):
            try:
                total = int(space.get(key, b"0")) + amount
            except ValueError:
                return "NotAnInteger"
            space[key] = b"%d" % total
            return total
        case CompareSet(key=key, expected=expected, desired=desired):
            swapped = space.get(key, b"") == expected
            if swapped:
                space[key] = desired
            return Comparison(swapped, space.get(key))
        case DeleteKey(key=key):
            return space.pop(key, None) is not None
        case _:
            raise AssertionError(write)


@given(batches=st.lists(st.lists(writes, max_size=8), max_size=6))
def test_the_spaces_are_dicts(batches: list[list[Write[object]]]) -> None:
    """Below all limits and without repetitions, answers and contents are those of plain dicts, in order."""
    run, spaces = RunSpaces(RUN), dict[int, dict[str, bytes]]({0: {}, ROUND: {}})
    for batch in batches:
        fresh = [replace(write, operation=None) for write in batch]
        answers = [
            answer.partition(":")[0] if isinstance(answer, str) else answer for answer in commit(run, fresh)
        ]
        assert answers == [by_hand(spaces, write) for write in fresh]
        assert contents(run) == ({round: space for round, space in spaces.items() if space}, [])
        for round, space in spaces.items():
            assert run.keys(round, "", "", 100) == sorted(space)
        assert run.used_keys == sum(map(len, spaces.values()))
        assert run.used_bytes == sum(
            entry_bytes(*item) for space in spaces.values() for item in space.items()
        )


@given(batches=st.lists(st.lists(writes, max_size=8), max_size=5), data=st.data())
def test_restored_spaces_are_the_spaces(batches: list[list[Write[object]]], data: st.DataObject) -> None:
    """One row per key, in any order, restores everything: values, records, their order of use, bytes."""
    run = RunSpaces(RUN)
    rows: dict[tuple[int, str], StoreChange] = {}
    for batch in batches:
        draft = RunDraft(run, LIMITS)
        for write in batch:
            try:
                decide(draft, write, ROUND)
            except Refused:
                continue
        entries = draft.values() + draft.records()
        for change in [*chain.from_iterable(draft.steps()), *draft.records()]:
            run.apply(change)
        for entry in entries:
            rows.pop((entry.round, entry.key), None)
            if entry.value is not None:
                rows[entry.round, entry.key] = entry
    restored = finish(RunSpaces.restore(RUN, data.draw(st.permutations(list(rows.values())))))
    assert contents(restored) == contents(run)
    assert restored.used_bytes == run.used_bytes
    assert run.used_bytes == sum(
        entry_bytes(row.key, row.value) for row in rows.values() if not row.key.startswith(RESERVED)
    )
    assert restored.stamp <= run.stamp


@given(batch=st.lists(writes, max_size=20), repeated=st.data())
def test_a_repeated_write_takes_effect_once(batch: list[Write[object]], repeated: st.DataObject) -> None:
    """A write sent again right after, in its batch or a later one, changes nothing and has the same answer."""
    run = RunSpaces(RUN)
    for number, write in enumerate(batch):
        named = replace(write, operation=Operation("client", 0, number + 1))
        copies = repeated.draw(st.integers(1, 3))
        answers = commit(run, [named] * copies)
        before = contents(run)
        answers += commit(run, [named])
        assert contents(run) == before
        assert all(answer == answers[0] for answer in answers)


def test_a_refused_write_leaves_no_trace() -> None:
    run = RunSpaces(RUN)
    commit(run, [Set(writer=WRITER, round=0, key="a", value=b"text")])
    before = contents(run)
    draft = RunDraft(run, StoreLimits(run_bytes=200))
    operation = Operation("client", 0, 1)
    with pytest.raises(NotAnInteger, match="'a' holds b'text'"):
        decide(draft, Add(writer=WRITER, round=0, key="a", amount=1, operation=operation), ROUND)
    with pytest.raises(RunStoreFull, match="past its limit of 200"):
        decide(draft, Set(writer=WRITER, round=0, key="b", value=b"x" * 100, operation=operation), ROUND)
    with pytest.raises(IntegerOverflow):
        decide(draft, Add(writer=WRITER, round=0, key="c", amount=2**63, operation=operation), ROUND)
    assert not draft.steps()
    assert not draft.values()
    assert not draft.records()
    assert contents(run) == before


def test_a_full_store_still_shrinks() -> None:
    """A write that adds no bytes is never refused as too large; a record of a deletion counts nothing."""
    run = RunSpaces(RUN)
    commit(run, [Set(writer=WRITER, round=0, key="a", value=b"12345678")])
    full = StoreLimits(run_bytes=run.used_bytes)
    operation = Operation("client" * 10, 0, 1)
    assert commit(run, [Set(writer=WRITER, round=0, key="a", value=b"87654321")], full) == [None]
    assert commit(run, [DeleteKey(writer=WRITER, round=0, key="a", operation=operation)], full) == [True]
    assert run.used_bytes == 0


@pytest.mark.parametrize(
    ("limits", "refusal", "match"),
    [
        (StoreLimits(run_bytes=3 * 129 + 1), RunStoreFull, "past its limit of 388"),
        (StoreLimits(run_keys=3), TooManyKeys, "more than the 3 keys"),
    ],
)
def test_several_values_are_set_all_or_none(limits: StoreLimits, refusal: type[Refused], match: str) -> None:
    """This holds when only the last is too much, and with other writes of the batch before and after."""
    run = RunSpaces(RUN)
    draft = RunDraft(run, limits)
    decide(draft, Set(writer=WRITER, round=0, key="a", value=b""), ROUND)
    before = draft.steps().copy(), draft.values()
    with pytest.raises(refusal, match=match):
        decide(
            draft, MultiSet(writer=WRITER, round=0, entries={"a": b"", "b": b"", "c": b"", "d": b""}), ROUND
        )
    assert (draft.steps(), draft.values()) == before
    decide(draft, MultiSet(writer=WRITER, round=0, entries={"a": b"", "b": b"", "c": b""}), ROUND)
    assert [change.key for step in draft.steps() for change in step] == ["a", "a", "b", "c"]
    assert len(draft.steps()[-1]) == 3, "a write is told as one"


def test_a_run_that_is_full_of_keys_goes_on_with_those_it_has() -> None:
    run, limits = RunSpaces(RUN), StoreLimits(run_keys=2)
    two: list[Write[object]] = [
        Set(writer=WRITER, round=0, key="a", value=b""),
        Set(writer=WRITER, round=ROUND, key="a", value=b""),
    ]
    assert commit(run, two, limits) == [None, None]
    assert commit(run, [Set(writer=WRITER, round=0, key="a", value=b"longer")], limits) == [None]
    (answer,) = commit(run, [Set(writer=WRITER, round=0, key="b", value=b"")], limits)
    assert str(answer).startswith("TooManyKeys")
    assert commit(
        run,
        [DeleteKey(writer=WRITER, round=ROUND, key="a"), Set(writer=WRITER, round=0, key="b", value=b"")],
        limits,
    ) == [True, None]
    fewer = StoreLimits(run_keys=1)  # a limit that was lowered over a restart
    assert commit(run, [MultiSet(writer=WRITER, round=0, entries={"a": b"", "b": b""})], fewer) == [None]


def test_past_and_future_rounds_are_refused() -> None:
    run = RunSpaces(RUN)
    run.check_round(0, ROUND)
    run.check_round(ROUND, ROUND)
    with pytest.raises(RoundOver, match="round 2 of run 'run' is over; round 3 takes its place"):
        run.check_round(2, ROUND)
    with pytest.raises(RoundNotBegun):
        run.check_round(4, ROUND)
    with pytest.raises(RoundNotBegun):
        run.check_round(1, 0)
    with pytest.raises(RoundOver):  # a writer of an old round, in the run's own space
        decide(RunDraft(run, LIMITS), Set(writer=WRITER, round=0, key="a", value=b"", writer_round=2), ROUND)


def test_a_round_that_is_over_is_gone_for_good() -> None:
    """Only the records of its writes stay."""
    run = RunSpaces(RUN)
    operation = Operation("client", 0, 1)
    commit(
        run,
        [
            Set(writer=WRITER, round=0, key="kept", value=b"1"),
            Set(writer=WRITER, round=ROUND, key="a", value=b"2", operation=operation),
        ],
    )
    deletions = list(run.forget_rounds_before(ROUND + 1))
    assert deletions == [StoreChange(RUN, ROUND, "a", None)]
    assert run.rounds == [0]
    assert run.holds(ROUND, operation.record_key)
    with pytest.raises(RoundOver):  # also for a caller that still thinks the round current
        run.check_round(ROUND, ROUND)
    run.apply(StoreChange(RUN, ROUND, "late", b"3"))
    assert run.rounds == [0]


def test_forgotten_spaces_are_empty_at_once_and_let_go_of_bit_by_bit() -> None:
    """The deletions for the journal name each value and record once."""
    run = RunSpaces(RUN)
    operation = Operation("client", 0, 1)
    commit(
        run,
        [
            Set(writer=WRITER, round=0, key="a", value=b"1"),
            Set(writer=WRITER, round=ROUND, key="b", value=b"2", operation=operation),
        ],
    )
    assert run.holds(0, "a")
    assert run.holds(ROUND, operation.record_key)
    deletions = run.forget()
    assert (run.rounds, run.used_bytes, run.holds(0, "a")) == ([], 0, False)
    commit(run, [Set(writer=WRITER, round=0, key="a", value=b"new")])
    assert next(deletions) == StoreChange(RUN, 0, "a", None)
    assert {change.key for change in deletions} == {"b", operation.record_key}
    assert run.value(0, "a") == b"new"


def test_records_are_bounded_and_the_longest_unused_go() -> None:
    run, limits = RunSpaces(RUN), StoreLimits(operations=3)

    def write(slot: int, sequence: int) -> Write[object]:
        return Add(writer=WRITER, round=0, key="a", amount=1, operation=Operation("c", slot, sequence))

    commit(run, [write(0, 1), write(1, 1), write(2, 1)], limits)
    commit(run, [write(0, 2)], limits)  # slot 1 is now the one unused for longest
    commit(run, [write(3, 1), write(0, 3)], limits)
    assert [key.rpartition("/")[2] for key in run.operations] == ["2", "3", "0"]
    kept = [StoreChange(RUN, 0, k, r.encode()) for k, r in run.operations.items()]
    restored = finish(RunSpaces.restore(RUN, kept))
    commit(restored, [write(4, 1)], limits)
    assert [key.rpartition("/")[2] for key in restored.operations] == ["3", "0", "4"]


def named(round: int, sequence: int, writer_round: int = 0) -> Write[object]:
    """A write of one slot that counts in the space of a round."""
    operation = Operation("client", 0, sequence)
    return Add(writer=WRITER, round=round, writer_round=writer_round, key="n", amount=1, operation=operation)


@pytest.mark.parametrize("write", [named(ROUND, 1), named(0, 1, writer_round=ROUND)])
def test_a_completed_write_is_answered_again_after_the_end_of_its_round(write: Write[object]) -> None:
    """It has its outcome and no second effect, also after a restore. A write that was not completed is refused."""
    run = RunSpaces(RUN)
    rows = {(change.round, change.key): change for change in committed(run, write)}
    for deletion in run.forget_rounds_before(ROUND + 1):
        del rows[deletion.round, deletion.key]
    for spaces in (run, finish(RunSpaces.restore(RUN, rows.values()))):
        draft = RunDraft(spaces, LIMITS)
        assert decide(draft, write, ROUND + 1) == 1
        assert not [*draft.values(), *draft.records()]
        with pytest.raises(RoundOver):
            decide(draft, replace(write, operation=Operation("client", 0, 2)), ROUND + 1)
        with pytest.raises(RoundOver):
            decide(draft, replace(write, operation=None), ROUND + 1)


def committed(run: RunSpaces, write: Write[object]) -> list[StoreChange]:
    """Carry a write out; return the changes for a journal."""
    draft = RunDraft(run, LIMITS)
    decide(draft, write, ROUND)
    changes = [*draft.values(), *draft.records()]
    for change in changes:
        run.apply(change)
    return changes


@pytest.mark.parametrize(("early", "late"), [(0, ROUND), (ROUND, 0)])
def test_a_delayed_write_takes_no_effect_after_a_later_one_to_another_space(early: int, late: int) -> None:
    """This holds also after a restore. Two writes with one number are refused, as within one space."""
    run = RunSpaces(RUN)
    rows: dict[tuple[int, str], StoreChange] = {}
    for write in (named(early, 1), named(late, 3)):
        for change in committed(run, write):
            rows[change.round, change.key] = change
    kept = [change for change in rows.values() if change.value is not None]
    assert sum(change.key.startswith(RESERVED) for change in kept) == 1, "one record for each slot"
    for spaces in (run, finish(RunSpaces.restore(RUN, kept))):
        before = contents(spaces)
        draft = RunDraft(spaces, LIMITS)
        with pytest.raises(OperationSuperseded):
            decide(draft, named(early, 2), ROUND)
        with pytest.raises(OperationReused):
            decide(draft, named(early, 3), ROUND)
        assert decide(draft, named(late, 3), ROUND) == 1
        assert contents(spaces) == before


def test_records_of_versions_that_kept_one_for_each_space() -> None:
    """The later write of the slot counts; only the other's record is to be deleted."""
    key = Operation("client", 0, 1).record_key
    earlier = StoreChange(RUN, 0, key, OperationRecord(4, 1, 0, 0).encode())
    later = StoreChange(RUN, ROUND, key, OperationRecord(5, 2, 0, 0).encode())
    for rows in ([earlier, later], [later, earlier]):
        run = finish(RunSpaces.restore(RUN, rows))
        assert [(record.sequence, record.round) for record in run.operations.values()] == [(5, ROUND)]
        assert run.outdated() == [replace(earlier, value=None)]
        assert run.outdated() == []
        assert run.stamp == 2


def test_keys_come_in_pages_in_order() -> None:
    run = RunSpaces(RUN)
    names = ["b/2", "a", "b/10", "b/1", "c"]
    commit(
        run,
        [
            Set(writer=WRITER, round=0, key=key, value=b"", operation=Operation("c", 0, n + 1))
            for n, key in enumerate(names)
        ],
    )
    assert run.keys(0, "", "", 10) == ["a", "b/1", "b/10", "b/2", "c"]
    assert run.keys(0, "b/", "", 2) == ["b/1", "b/10"]
    assert run.keys(0, "b/", "b/10", 2) == ["b/2"]
    assert run.keys(1, "", "", 10) == []
