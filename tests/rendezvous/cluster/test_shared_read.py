"""One read serves all its callers, and none gets a value from before its call."""

from __future__ import annotations

import asyncio

import pytest

from rallypoint.rendezvous.cluster.lookup import SharedRead


class _Source:
    """Reads that the test ends; each returns its number."""

    def __init__(self) -> None:
        self.begun = 0
        self.ends: dict[int, asyncio.Future[int]] = {}

    async def read(self) -> int:
        self.begun += 1
        number = self.begun
        self.ends[number] = asyncio.get_running_loop().create_future()
        return await self.ends[number]


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_calls_during_a_read_share_the_next_one() -> None:
    """The pending read may have begun before their call: its value would be stale for them."""
    source = _Source()
    shared = SharedRead(source.read)
    first = asyncio.create_task(shared.read())
    await _turns()
    later = [asyncio.create_task(shared.read()) for _ in range(5)]
    await _turns()
    assert source.begun == 1
    source.ends[1].set_result(1)
    await _turns()
    assert first.result() == 1
    assert source.begun == 2
    assert not any(task.done() for task in later)
    source.ends[2].set_result(2)
    assert await asyncio.gather(*later) == [2] * 5


async def test_a_cancelled_call_does_not_affect_the_others() -> None:
    """A caller's deadline is its own."""
    source = _Source()
    shared = SharedRead(source.read)
    impatient, patient = (asyncio.create_task(shared.read()) for _ in range(2))
    await _turns()
    impatient.cancel()
    await _turns()
    source.ends[1].set_result(1)
    assert await patient == 1


async def test_a_failed_read_fails_only_the_calls_that_share_it() -> None:
    """The next read is a new attempt."""
    source = _Source()
    shared = SharedRead(source.read)
    failing = [asyncio.create_task(shared.read()) for _ in range(2)]
    await _turns()
    next_one = asyncio.create_task(shared.read())
    source.ends[1].set_exception(OSError("away"))
    for task in failing:
        with pytest.raises(OSError, match="away"):
            await task
    await _turns()
    source.ends[2].set_result(2)
    assert await next_one == 2
