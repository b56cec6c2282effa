"""A bounded wait ends in time, whoever else waits, and takes no cancellation for its own that is another's."""

from __future__ import annotations

import asyncio

import pytest

from rallypoint.serving.flow import bounded


async def test_what_comes_in_time_is_returned() -> None:
    """And what it raises is raised."""
    assert await bounded(asyncio.sleep(0, "answer"), 60.0) == "answer"

    async def fail() -> None:
        raise ValueError("it broke")

    with pytest.raises(ValueError, match="it broke"):
        await bounded(fail(), 60.0)


async def test_what_does_not_come_is_given_up() -> None:
    """It is cancelled, and its task goes on, not cancelled itself."""
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await bounded(never, 0.01)
    assert never.cancelled()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_each_has_its_own_time_though_many_share_the_timer() -> None:
    """Those that began later end later, and those that are done are not ended at all."""
    loop = asyncio.get_running_loop()

    async def waited(begin: float) -> float:
        await asyncio.sleep(begin)
        began = loop.time()
        with pytest.raises(TimeoutError):
            await bounded(loop.create_future(), 0.05)
        return loop.time() - began

    async def done(begin: float) -> float:
        await asyncio.sleep(begin)
        await bounded(asyncio.sleep(0), 0.05)
        await asyncio.sleep(0.2)
        return 0.05

    times = await asyncio.gather(*(waited(n / 100) if n % 2 else done(n / 100) for n in range(10)))
    assert min(times) >= 0.05 - 1e-3


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    """Who was cancelled must not go on."""
    never = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(bounded(never, 60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_waits_that_are_over_are_not_kept() -> None:
    """Ten thousand in a row leave no queue behind."""
    from rallypoint.serving import flow as module

    for _ in range(10_000):
        await bounded(asyncio.sleep(0), 61.0)
    assert len(module._waits[asyncio.get_running_loop()][61.0]._waits) <= 1
