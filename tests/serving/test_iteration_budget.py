"""Of many tasks that are woken at once, a few go on in each iteration of the event loop, in order."""

from __future__ import annotations

import asyncio

from rallypoint.serving.flow import IterationBudget


async def test_a_few_tasks_go_on_in_each_iteration() -> None:
    """Those that came first; what else the loop has to do comes between."""
    budget, went_on = IterationBudget(2), list[int]()

    async def go_on(number: int) -> None:
        await budget.take()
        went_on.append(number)

    tasks = [asyncio.create_task(go_on(number)) for number in range(7)]
    seen = []
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        seen.append(len(went_on))
    assert went_on == [*range(7)]
    assert max(after - before for before, after in zip([0, *seen], seen, strict=False)) <= 2


async def test_a_task_that_was_cancelled_takes_no_turn() -> None:
    budget, went_on = IterationBudget(1), list[int]()

    async def go_on(number: int) -> None:
        await budget.take()
        went_on.append(number)

    tasks = [asyncio.create_task(go_on(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert went_on == [0, 3]


async def test_an_unused_budget_waits_for_nothing() -> None:
    """Not even for an iteration, after any pause."""
    budget = IterationBudget(1)
    for _ in range(3):
        taking = budget.take()
        try:
            taking.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waits")
        for _ in range(3):
            await asyncio.sleep(0)
