"""The clock, the sleep and the randomness of a client's attempts: tests and simulations bring their own."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rallypoint.rpc.backoff import LONGEST_BACKOFF, Backoff


@dataclass(frozen=True, slots=True)
class Pace:
    """Clock, sleep and randomness of a client.

    Attributes:
        clock: Monotonic time, seconds.
        sleep: Waits for a number of seconds.
        draw: Returns a number from 0 to 1, for the jitter.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    draw: Callable[[], float] = random.random

    def backoff(self, longest: float = LONGEST_BACKOFF) -> Backoff:
        """Return a back-off with this randomness; `longest` in seconds."""
        return Backoff(self.draw, longest=longest)
