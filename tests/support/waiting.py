"""Waiting for a condition that no event announces: of processes, files and servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0
"""Seconds that a test waits, before it fails, for a change that takes milliseconds on an idle machine."""


def wait_until(condition: Callable[[], bool], what: str, timeout: float = PATIENCE) -> float:
    """Wait until a condition holds; return the seconds it took.

    Raises:
        AssertionError: It did not hold within `timeout` seconds; the message has `what`.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout:
            raise AssertionError(f"waited {timeout:g} s in vain for: {what}")
        time.sleep(0.002)
    return time.monotonic() - began


async def until(
    condition: Callable[[], bool], what: str = "the condition", timeout: float = PATIENCE
) -> float:
    """As `wait_until`, without blocking the event loop."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout:
            raise AssertionError(f"waited {timeout:g} s in vain for: {what}")
        await asyncio.sleep(0.002)
    return time.monotonic() - began


async def started(*awaitables: Any) -> list[asyncio.Task[Any]]:
    """Start tasks, and return them when each has run until it waits for something."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks
