"""A run comes up when its deadline is due, once, and runs that are not due cost nothing."""

from __future__ import annotations

import random

import pytest

from rallypoint.rendezvous.runs.runs import Schedule


def test_the_earliest_comes_first() -> None:
    """Runs that are not due yet stay."""
    schedule = Schedule()
    assert (schedule.next(), schedule.due(1e9)) == (None, [])
    for run_id, deadline in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        schedule.put(run_id, deadline)
    assert schedule.next() == 1.0
    assert schedule.due(0.9) == []
    assert schedule.due(2.0) == ["a", "b"]
    assert schedule.next() == 3.0


@pytest.mark.parametrize("deadline", [1.0, 9.0])
def test_a_deadline_takes_the_place_of_the_one_before(deadline: float) -> None:
    """It may be earlier or later; the run comes up once."""
    schedule = Schedule()
    schedule.put("a", 5.0)
    schedule.put("a", deadline)
    assert schedule.next() == deadline
    assert schedule.due(deadline - 0.1) == []
    assert schedule.due(100.0) == ["a"]
    assert (schedule.next(), schedule.due(100.0)) == (None, [])


def test_a_run_without_a_deadline_never_comes_up() -> None:
    """This holds also if it had one; None is allowed for a run that never had one."""
    schedule = Schedule()
    schedule.put("a", 5.0)
    schedule.put("a", None)
    schedule.put("b", None)
    assert (schedule.next(), schedule.due(100.0)) == (None, [])


def test_a_deadline_that_comes_back_counts_once() -> None:
    """It moves away and back again."""
    schedule = Schedule()
    for deadline in (5.0, 9.0, 5.0):
        schedule.put("a", deadline)
    assert schedule.due(5.0) == ["a"]
    schedule.put("a", 9.0)
    assert schedule.due(8.9) == []
    assert schedule.due(9.0) == ["a"]


def test_it_does_what_a_plain_table_does() -> None:
    """For random deadlines, the runs that are due are those of a table of the latest deadlines."""
    draw = random.Random(5)
    schedule, table, now = Schedule(), dict[str, float](), 0.0
    for _ in range(5_000):
        run_id = f"run{draw.randrange(20)}"
        deadline = draw.choice([None, now, now + draw.randrange(10)])
        schedule.put(run_id, deadline)
        table.pop(run_id, None)
        if deadline is not None:
            table[run_id] = deadline
        assert schedule.next() == min(table.values(), default=None)
        if draw.random() < 0.2:
            now += draw.randrange(4)
            due = {run_id: deadline for run_id, deadline in table.items() if deadline <= now}
            came = schedule.due(now)
            assert sorted(came) == sorted(due)
            assert [due[run_id] for run_id in came] == sorted(due.values())
            for run_id in came:
                del table[run_id]


def test_deadlines_that_move_often_do_not_pile_up() -> None:
    """A run that is moved a million times before it comes up costs no more memory than one that is moved once."""
    schedule = Schedule()
    for number in range(10_000):
        schedule.put("a", 1e6 - number)
        schedule.put("b", 1e6 + number)
    assert len(schedule._queue) < 200
    assert schedule.due(1e6 + 9_999) == ["a", "b"]
