"""However much work there is, and for however many callers, the event loop gets a turn after each time slice."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from rallypoint.rendezvous.base.cooperative import CooperativeRunner, Work
from rendezvous.turn_counter import TickingClock, Turns, counting


class _Parts:
    """Work, and counts of its progress."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.under_way = 0
        self.most_at_once = 0
        self.closed = 0

    def work(self, parts: int, error: Exception | None = None) -> Work[int]:
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            for _ in range(parts):
                self.turns.did(1)
                yield
            if error is not None:
                raise error
            return parts
        finally:
            self.under_way -= 1
            self.closed += 1


@pytest.fixture
def slices() -> CooperativeRunner:
    """A runner whose parts take a millisecond each."""
    return CooperativeRunner(TickingClock(0.001))


async def test_others_have_their_turns(slices: CooperativeRunner) -> None:
    """After every time slice, which is some ten milliseconds."""
    async with counting() as turns:
        assert await slices.carry_out(_Parts(turns).work(1_000)) == 1_000
    assert turns.taken >= 100
    assert turns.most <= 10


async def test_one_work_is_done_at_a_time(slices: CooperativeRunner) -> None:
    """One slice for each of many works in one turn would hold the loop for as long as all of them together."""
    async with counting() as turns:
        parts = _Parts(turns)
        done = await asyncio.gather(*(slices.carry_out(parts.work(100 + each)) for each in range(16)))
    assert done == [100 + each for each in range(16)]
    assert parts.most_at_once == 1
    assert turns.most <= 20


async def test_work_that_fails_or_is_cancelled_lets_the_next_begin(slices: CooperativeRunner) -> None:
    """Its generator is closed."""
    async with counting() as turns:
        parts = _Parts(turns)
        with pytest.raises(KeyError):
            await slices.carry_out(parts.work(50, KeyError("run")))
        first, second, third = [asyncio.create_task(slices.carry_out(parts.work(50))) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        second.cancel()
        assert await third == 50
        for task in (first, second):
            with suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()
    assert parts.under_way == 0
    assert parts.closed == 3, "what never began needs no end"
