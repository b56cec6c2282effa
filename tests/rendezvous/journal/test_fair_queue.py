"""A turn takes some items of every run, in the order of their arrival, and none is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.journal.commit_loop import FairQueue


def test_a_long_queue_keeps_no_short_one_waiting() -> None:
    """The first few of each run, in any order of arrival."""
    turns: FairQueue[str] = FairQueue(2)
    for item in ("a1", "a2", "a3", "b1", "a4"):
        turns.put(item[0], item)
    assert [*turns.take()] == ["a1", "a2", "b1"]
    assert turns
    assert [*turns.take()] == ["a3", "a4"]
    assert not turns
    assert [*turns.take()] == []


@given(
    most=st.integers(1, 4),
    runs=st.lists(st.sampled_from("abc"), max_size=40),
    pauses=st.sets(st.integers(0, 40)),
)
def test_everything_is_taken_once_and_in_order(most: int, runs: list[str], pauses: set[int]) -> None:
    """With any mix of put and take; no turn takes more of a run than its limit."""
    turns: FairQueue[tuple[str, int]] = FairQueue(most)
    taken: list[tuple[str, int]] = []

    def take() -> None:
        turn = [*turns.take()]
        assert all(sum(run == each for run, _ in turn) <= most for each in "abc")
        taken.extend(turn)

    for number, run in enumerate(runs):
        turns.put(run, (run, number))
        if number in pauses:
            take()
    while turns:
        take()
    assert sorted(taken, key=lambda item: item[1]) == list(zip(runs, range(len(runs)), strict=True))
    for each in "abc":
        of_run = [number for run, number in taken if run == each]
        assert of_run == sorted(of_run)
