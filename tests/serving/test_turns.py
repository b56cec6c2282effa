"""A few of many operations run at the same time, in order; a slow operation does not delay the others."""

from __future__ import annotations

import asyncio

from rallypoint.serving.flow import Turns
from support.waiting import PATIENCE

LONG = 3600.0


async def test_a_few_operations_run_at_a_time_in_order() -> None:
    turns, began, most, running = Turns(2, LONG), list[int](), 0, 0

    async def operate(number: int) -> None:
        nonlocal most, running
        async with turns.turn():
            began.append(number)
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(operate(number) for number in range(7)))
    assert began == [*range(7)]
    assert most == 2


async def test_an_operation_that_takes_long_gives_its_place_up() -> None:
    """It does so once: when it ends later, it frees no second place."""
    turns, over = Turns(1, 0.01), asyncio.Event()

    async def stall() -> None:
        async with turns.turn():
            await over.wait()

    stalled = asyncio.create_task(stall())
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE):
        await turns.take()
    over.set()
    await stalled
    waiting = asyncio.create_task(turns.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    turns.give_back()
    await waiting


async def test_an_operation_that_was_cancelled_takes_no_place() -> None:
    """It may wait, or get its turn in the same moment."""
    turns, began = Turns(1, LONG), list[int]()
    await turns.take()

    async def operate(number: int) -> None:
        async with turns.turn():
            began.append(number)

    tasks = [asyncio.create_task(operate(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    turns.give_back()
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert began == [2, 3]


async def test_an_operation_that_fails_gives_its_place_back() -> None:
    turns = Turns(1, LONG)
    for _ in range(3):
        try:
            async with turns.turn():
                raise ValueError
        except ValueError:
            pass
    async with asyncio.timeout(PATIENCE):
        await turns.take()
