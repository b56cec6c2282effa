"""Waiting for a condition that no event announces: of processes, networks and third-party servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PATIENCE = 120.0
"""Seconds to wait for a change that takes a moment on an idle machine."""

_LOOK = 0.02


async def until(what: str, look: Callable[[], Awaitable[str]], timeout: float = PATIENCE) -> None:
    """Wait until a check returns no complaint.

    Args:
        `what`: The awaited condition.
        look: Returns a complaint about something that is still missing; empty: nothing is.
        timeout: Seconds.

    Raises:
        AssertionError: There still was one after `timeout`; the message has the last complaint.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    while missing := await look():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"waited {timeout:g} s in vain for {what}: {missing}")
        await asyncio.sleep(_LOOK)
