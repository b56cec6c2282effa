"""A DeadlineQueue gives out what a sorted list would, and holds no more than twice what lives in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.timer.deadlines import DeadlineQueue

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("schedule"), st.integers(0, 9), st.integers(0, 20)),
        st.tuples(st.just("drop"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("pop"), st.just(0), st.integers(0, 20)),
    ),
    max_size=60,
)


@given(STEPS)
def test_gives_out_what_a_sorted_list_would(steps: list[tuple[str, int, int]]) -> None:
    """Order is by deadline, then by scheduling; an item has one deadline at most."""
    queue: DeadlineQueue[int] = DeadlineQueue()
    model: list[tuple[int, int, int]] = []
    for serial, (kind, item, when) in enumerate(steps):
        if kind == "schedule":
            queue.schedule(item, when)
            model = sorted([entry for entry in model if entry[2] != item] + [(when, serial, item)])
        elif kind == "drop":
            queue.drop(item)
            model = [entry for entry in model if entry[2] != item]
        else:
            expected = model.pop(0)[2] if model and model[0][0] <= when else None
            assert queue.pop_due(when) == expected
        assert queue.earliest() == (model[0][0] if model else None)
        assert len(queue) == len(model)


def test_stale_entries_are_swept() -> None:
    """100,000 timers of an hour, acquired and released one after the other, don't pile up."""
    queue: DeadlineQueue[int] = DeadlineQueue()
    for number in range(100_000):
        queue.schedule(number, 3600.0 + number)
        queue.drop(number)
        assert len(queue._heap) <= 100
    assert queue.earliest() is None
