"""A DeadlineQueue returns items as a sorted list would, names the next wake-up in time, and keeps no dropped item."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.timer.core.countdown import DeadlineQueue

# Twentieths of a second, so that many share a slot.
TIMES = st.integers(-5, 20).map(lambda number: number / 20)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("schedule"), st.integers(0, 4), TIMES),
        st.tuples(st.just("drop"), st.integers(0, 4), st.just(0.0)),
        st.tuples(st.just("pop"), st.just(0), TIMES),
    ),
    max_size=60,
)


@given(STEPS)
def test_items_are_returned_in_the_order_of_a_sorted_list(steps: list[tuple[str, int, float]]) -> None:
    """Order is by deadline, then by scheduling; an item has one deadline at most. Time may step back."""
    queue: DeadlineQueue[int] = DeadlineQueue()
    model: list[tuple[float, int, int]] = []
    for serial, (kind, item, when) in enumerate(steps):
        if kind == "schedule":
            queue.schedule(item, when)
            model = sorted([entry for entry in model if entry[2] != item] + [(when, serial, item)])
        elif kind == "drop":
            queue.drop(item)
            model = [entry for entry in model if entry[2] != item]
        else:
            for _, _, expected in [entry for entry in model if entry[0] <= when]:
                assert queue.pop_due(when) == expected
            assert queue.pop_due(when) is None
            model = [entry for entry in model if entry[0] > when]
        assert len(queue) == len(model)
        look = queue.earliest()
        assert (look is None) == (not model)
        if look is not None:
            assert model[0][0] - 0.25 < look <= model[0][0]


@given(st.lists(TIMES, min_size=1, max_size=20))
def test_looking_when_asked_to_finds_each_on_time(deadlines: list[float]) -> None:
    """There is at most one look in vain for each item found."""
    queue: DeadlineQueue[int] = DeadlineQueue()
    for item, when in enumerate(deadlines):
        queue.schedule(item, when)
    looks = found = 0
    while (now := queue.earliest()) is not None:
        looks += 1
        while (due := queue.pop_due(now)) is not None:
            assert deadlines[due] == now
            found += 1
    assert found == len(deadlines)
    assert looks <= 2 * found


def test_an_item_that_is_moved_shortly_before_it_is_due_comes_at_its_new_time() -> None:
    """This holds though its old entry comes up first, and after another item's."""
    queue: DeadlineQueue[str] = DeadlineQueue()
    queue.schedule("begins the slot", 1.0)
    assert queue.pop_due(1.0) == "begins the slot"
    queue.schedule("moved", 1.0625)
    queue.schedule("moved", 1.1875)
    queue.schedule("other", 1.03125)
    assert queue.pop_due(1.125) == "other"
    assert queue.pop_due(1.125) is None
    assert queue.pop_due(1.1875) == "moved"


def test_a_dropped_item_is_not_kept() -> None:
    """100,000 timers of an hour, acquired and released one by one beside one that stays, leave no entries."""
    queue: DeadlineQueue[int] = DeadlineQueue()
    queue.schedule(-1, 1e6)
    for number in range(100_000):
        queue.schedule(number, 3600.0 + number)
        queue.drop(number)
        assert len(queue._slots) == 1
        assert len(queue._order) <= 100
    assert queue.earliest() == 1e6


def test_an_item_dropped_shortly_before_it_is_due_is_not_kept_for_long() -> None:
    """Timers of less than a slot leave their entries for no longer than that."""
    queue: DeadlineQueue[int] = DeadlineQueue()
    for number in range(10_000):
        now = number / 1000
        assert queue.pop_due(now) is None, "it was dropped"
        queue.schedule(number, now + 0.1)
        queue.drop(number)
        assert len(queue._heap) <= 500
    assert queue.earliest() is None
    assert len(queue._heap) == 0
