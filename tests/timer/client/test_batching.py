"""Changes are sent in batches, and none is sent too late."""

from __future__ import annotations

import asyncio
import math

import pytest

from rallypoint.timer.client.pacing import Batching


@pytest.mark.parametrize(
    ("after", "seconds"), [(math.inf, 5.0), (600.0, 5.0), (20.0, 2.0), (0.5, 0.05), (0.01, 0.01)]
)
async def test_a_timer_is_sent_within_a_tenth_of_its_duration(after: float, seconds: float) -> None:
    """It is not sent sooner than is useful, nor later than other changes."""
    news = Batching(linger=5.0)
    began = asyncio.get_running_loop().time()
    news.note(after)
    assert news._due - began == pytest.approx(seconds, abs=0.005)


async def test_a_more_urgent_change_takes_the_others_along() -> None:
    """A short timer, or an end, does not wait for the change that came before it."""
    news = Batching(linger=3600.0)
    news.note()
    waiting = asyncio.create_task(news.gathered())
    await asyncio.sleep(0)
    assert not waiting.done()
    news.note(0.02)
    await waiting
    news.note()
    news.hurry()
    await news.gathered()


async def test_nothing_is_sent_without_a_change() -> None:
    """`gathered` returns once per batch of changes."""
    news = Batching(linger=0.0)
    news.note()
    await news.gathered()
    waiting = asyncio.create_task(news.gathered())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    news.note()
    await waiting
