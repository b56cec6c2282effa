"""Timers of equal scopes have distinct names at the service, and many timers don't make the search expensive."""

from __future__ import annotations

import os
from random import Random

from rallypoint.agent.sockets.timer_tables import HeldTimer, Holders, TimerLimits, _WorkerTimers
from support.remembered_timers import RememberedTimers

PLENTY = 1024


class Counted(dict[str, HeldTimer]):
    """Count the look-ups of names."""

    asked = 0

    def __contains__(self, name: object) -> bool:
        self.asked += 1
        return super().__contains__(name)


class Crowd:
    """Timers of one worker."""

    def __init__(self) -> None:
        self.timers = Counted()
        self.worker = _WorkerTimers("0@1", self.timers)

    def enter(self, scope: str) -> str:
        name = self.worker.free_name(scope)
        assert name not in self.timers
        self.timers[name] = HeldTimer(scope, name, 1, 0, None)
        return name

    def leave(self, name: str) -> None:
        self.worker.drop(self.timers[name])


def test_the_lowest_free_number_is_taken() -> None:
    """So the service sees one timer that starts again, and not the end of one and the start of another."""
    crowd = Crowd()
    assert [crowd.enter("s") for _ in range(5)] == ["s", "s~2", "s~3", "s~4", "s~5"]
    for name in ("s~4", "s", "s~2", "s~5"):
        crowd.leave(name)
    assert [crowd.enter("s") for _ in range(5)] == ["s", "s~2", "s~4", "s~5", "s~6"]


def test_a_scope_may_be_called_as_another_ones_second() -> None:
    """Programs choose the names of their scopes."""
    crowd = Crowd()
    assert [crowd.enter(scope) for scope in ("s~2", "s", "s", "s~2")] == ["s~2", "s", "s~3", "s~2~2"]
    crowd.leave("s~2")
    assert crowd.enter("s") == "s~4"
    for name in list(crowd.timers):
        crowd.leave(name)
    assert [crowd.enter("s") for _ in range(2)] == ["s", "s~2"]


def test_a_name_costs_little_among_many_of_the_same_scope() -> None:
    """A thousand tasks of a program enter and leave one line of it between two reads of the agent."""
    crowd, random = Crowd(), Random(7)
    for _ in range(PLENTY):
        crowd.enter("s")
    assert crowd.timers.asked < 10 * PLENTY
    for _ in range(20):
        crowd.timers.asked = 0
        for name in random.sample(list(crowd.timers), PLENTY // 2):
            crowd.leave(name)
        for _ in range(PLENTY // 2):
            crowd.enter("s")
        assert crowd.timers.asked < 10 * PLENTY


def test_nothing_is_kept_of_unused_scopes() -> None:
    """Names of scopes may contain numbers that never occur again."""
    crowd = Crowd()
    for number in range(100):
        for name in [crowd.enter(f"step {number}") for _ in range(4)]:
            crowd.leave(name)
    assert not crowd.timers
    assert not crowd.worker.free_from


def test_a_holder_gives_its_names_back() -> None:
    """It does so at the end of its timers, and at its own end."""
    timers = RememberedTimers()
    holders = Holders(timers, rank_of=lambda _: 0, limits=TimerLimits(), clock=lambda: 1.0)
    first, second = (holders.open("0@1", os.getpid()) for _ in range(2))
    for key, holder in enumerate((first, second, second)):
        holder.acquire(key, "s", 60.0, 0.0, signal=0)
    assert sorted(timers.held) == [("0@1", "s"), ("0@1", "s~2"), ("0@1", "s~3")]
    first.close()
    second.release(1)
    second.acquire(7, "s", 60.0, 0.0, signal=0)
    second.acquire(8, "s", 60.0, 0.0, signal=0)
    assert sorted(timers.held) == [("0@1", "s"), ("0@1", "s~2"), ("0@1", "s~3")]
    second.close()
    assert timers.held == {}
