"""A slot holds the latest state only, and its end comes after the state that waits in it."""

from __future__ import annotations

import asyncio

import pytest

from rallypoint.rendezvous.base.cooperative import LatestValue
from rendezvous.engine_fixtures import begun


async def test_a_reader_waits_for_a_value() -> None:
    """And gets it as soon as it is put."""
    slot: LatestValue[int] = LatestValue()
    (reading,) = await begun(slot.take())
    assert not reading.done()
    slot.put(1)
    assert await reading == 1


async def test_a_slow_reader_skips_values() -> None:
    """However many were put, only the latest waits."""
    slot: LatestValue[int] = LatestValue()
    for value in range(100_000):
        slot.put(value)
    assert await slot.take() == 99_999
    (reading,) = await begun(slot.take())
    assert not reading.done()
    reading.cancel()


async def test_the_end_comes_after_the_value_that_waits() -> None:
    """Every reader gets the last state."""
    slot: LatestValue[int] = LatestValue()
    slot.put(1)
    slot.end()
    assert [await slot.take(), await slot.take(), await slot.take()] == [1, None, None]


async def test_an_error_comes_after_the_value_that_waits() -> None:
    """And on every later read."""
    slot: LatestValue[int] = LatestValue()
    slot.put(1)
    slot.end(KeyError("why"))
    assert await slot.take() == 1
    for _ in range(2):
        with pytest.raises(KeyError, match="why"):
            await slot.take()


@pytest.mark.parametrize("error", [None, KeyError("why")])
async def test_the_end_wakes_a_waiting_reader(error: Exception | None) -> None:
    """With or without an error."""
    slot: LatestValue[int] = LatestValue()
    (reading,) = await begun(slot.take())
    slot.end(error)
    (outcome,) = await asyncio.gather(reading, return_exceptions=True)
    assert outcome is error


async def test_the_first_end_counts() -> None:
    """Later calls change nothing: no value, no other end."""
    slot: LatestValue[int] = LatestValue()
    slot.end()
    slot.end(KeyError("too late"))
    slot.put(1)
    assert await slot.take() is None


async def test_a_reader_that_gives_up_loses_nothing() -> None:
    """The next one gets the value."""
    slot: LatestValue[int] = LatestValue()
    (reading,) = await begun(slot.take())
    reading.cancel()
    slot.put(1)
    assert await slot.take() == 1
