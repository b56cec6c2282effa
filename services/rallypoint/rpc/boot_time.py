"""A clock that suspends don't stop."""

from __future__ import annotations

import time


def boot_time() -> float:
    """Seconds of a monotonic clock that also counts while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
