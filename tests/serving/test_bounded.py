"""A bounded wait ends in time, with any number of others, and does not take a cancellation by others for its own."""

from __future__ import annotations

import asyncio

import pytest

from rallypoint.serving.flow import bounded


async def test_a_result_in_time_is_returned() -> None:
    """Its exception is raised as well."""
    assert await bounded(asyncio.sleep(0, "answer"), 60.0) == "answer"

    async def fail() -> None:
        raise ValueError("it broke")

    with pytest.raises(ValueError, match="it broke"):
        await bounded(fail(), 60.0)


async def test_a_wait_without_a_result_is_given_up() -> None:
    """The wait is cancelled; its task goes on and is not cancelled."""
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await bounded(never, 0.01)
    assert never.cancelled()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_each_has_its_own_time_though_many_share_the_timer() -> None:
    """Later waits end later, and completed waits are not cancelled."""
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


async def test_an_outer_cancellation_stays_a_cancellation() -> None:
    """A task that was cancelled must not go on."""
    never = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(bounded(never, 60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_waits_that_are_over_are_not_kept() -> None:
    """Ten thousand in sequence leave no queue behind."""
    from rallypoint.serving import flow as module

    for _ in range(10_000):
        await bounded(asyncio.sleep(0), 61.0)
    assert len(module._waits[asyncio.get_running_loop()][61.0]._waits) <= 1
