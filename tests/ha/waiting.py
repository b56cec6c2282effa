"""Waiting until something is so that nobody tells of: of processes, networks and other people's servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PATIENCE = 120.0
"""Seconds that are waited for what takes a moment on an idle machine."""

_LOOK = 0.02


async def until(what: str, look: Callable[[], Awaitable[str]], timeout: float = PATIENCE) -> None:
    """Look until there is nothing to complain about.

    Args:
        what: What is waited for.
        look: Says what is still missing; empty: nothing.
        timeout: Seconds.

    Raises:
        AssertionError: It did not come to that; the message has the last complaint.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    while missing := await look():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"waited {timeout:g} s in vain for {what}: {missing}")
        await asyncio.sleep(_LOOK)
