"""The last events of a run are kept, within their bounds, and found by revision from either end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.journal.journal import Record
from rallypoint.rendezvous.runs.history import Histories, History


def record(revision: int, size: int = 1) -> Record:
    return Record("run", revision, bytes(size))


def filled(revisions: range, most_events: int = 1000, most_bytes: int = 10**6) -> History:
    history = History(most_events, most_bytes)
    for revision in revisions:
        history.add(record(revision))
    return history


def numbers(records: list[Record]) -> list[int]:
    return [each.revision for each in records]


def test_nothing_is_kept_at_first() -> None:
    """Every read returns nothing."""
    history = History(10, 10)
    assert (history.oldest, history.latest) == (0, 0)
    for revision in (0, 1, 5):
        assert history.after(revision, 10) == []
        assert list(history.before(revision)) == []


def test_the_oldest_go_past_the_number_of_events() -> None:
    """Of ten events, the last three are kept."""
    history = filled(range(1, 11), most_events=3)
    assert (history.oldest, history.latest) == (8, 10)
    assert numbers(history.after(0, 10)) == [8, 9, 10]


def test_the_oldest_go_past_the_number_of_bytes() -> None:
    """As many go as a large one needs, and no more."""
    history = History(1000, 100)
    for revision in range(1, 11):
        history.add(record(revision, 10))
    assert history.oldest == 1
    history.add(record(11, 25))
    assert numbers(history.after(0, 100)) == [4, 5, 6, 7, 8, 9, 10, 11]
    history.add(record(12, 6))
    assert history.oldest == 5


def test_one_event_is_kept_however_large() -> None:
    """A follower must be able to get past it."""
    history = filled(range(1, 4), most_bytes=100)
    history.add(record(4, 1000))
    assert (history.oldest, history.latest) == (4, 4)
    history.add(record(5, 1))
    assert (history.oldest, history.latest) == (5, 5)


@pytest.mark.parametrize("revision", [9, 10, 11, 14, 15, 18, 19, 20])
@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_after_a_revision_come_those_that_follow_it(revision: int, count: int) -> None:
    """They come in order, at most `count`, from any revision; after the last one there is none."""
    history = filled(range(10, 20))
    assert numbers(history.after(revision, count)) == list(range(max(10, revision + 1), 20))[:count]


@pytest.mark.parametrize("revision", [0, 1, 8])
def test_after_a_revision_that_is_no_longer_kept_come_the_oldest(revision: int) -> None:
    """A reader that must not miss any checks `oldest`."""
    assert numbers(filled(range(10, 20)).after(revision, 2)) == [10, 11]


@pytest.mark.parametrize("revision", [21, 30, 10**9])
def test_after_a_revision_that_was_never_given_out_comes_nothing(revision: int) -> None:
    """It is as after the last."""
    assert filled(range(10, 20)).after(revision, 5) == []


@pytest.mark.parametrize("revision", [9, 10, 11, 15, 19, 20, 21, 100])
def test_before_a_revision_come_the_newest_first(revision: int) -> None:
    """Only kept events are returned."""
    before = [each.revision for each in filled(range(10, 20)).before(revision)]
    assert before == list(range(min(19, revision - 1), 9, -1))


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=50),
    most_events=st.integers(1, 20),
    most_bytes=st.integers(1, 60),
)
def test_the_bounds_hold_and_nothing_is_left_out(sizes: list[int], most_events: int, most_bytes: int) -> None:
    """At any moment the latest events are kept, without gaps, and within the bounds or one event."""
    history = History(most_events, most_bytes)
    for revision, size in enumerate(sizes, 1):
        history.add(record(revision, size))
        kept = history.after(0, 1000)
        assert numbers(kept) == list(range(history.oldest, revision + 1))
        total = sum(len(each.content) for each in kept)
        assert len(kept) == 1 or (len(kept) <= most_events and total <= most_bytes)


def test_all_histories_together_are_bounded_and_the_short_ones_stay_whole() -> None:
    """A run with many events loses its own old ones, not those of the others."""
    histories = Histories(most_events=1_000, most_bytes=10_000, most_bytes_together=4_000)
    long, short = histories.open(), histories.open()
    for revision in range(1, 6):
        short.add(Record("short", revision, bytes(100)))
    for revision in range(1, 60):
        long.add(Record("long", revision, bytes(100)))
        histories.keep_within()
        assert histories.bytes <= 4_000
    assert (short.oldest, short.latest) == (1, 5)
    assert (long.oldest > 20, long.latest) == (True, 59)


def test_a_history_that_is_cleared_counts_no_more() -> None:
    """Its run was forgotten, and others can use the room."""
    histories = Histories(most_events=10, most_bytes=1_000, most_bytes_together=1_000)
    first = histories.open()
    first.add(Record("a", 1, bytes(500)))
    first.clear()
    assert (histories.bytes, first.latest) == (0, 0)
