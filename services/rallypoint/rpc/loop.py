"""The event loop of every process that uses gRPC, and a clock that advances while the machine is suspended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program's main coroutine under uvloop and close the loop after it. One per process.

    Ctrl-C cancels `main`; when its clean-up is done, the process ends with exit code 130 and without
    a traceback. A `main` that handles SIGINT itself, such as `Server.serve_until_signal`, continues to do so.

    Returns:
        The result of `main`.

    Raises:
        SystemExit: with code 130, after Ctrl-C.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(main)
        except KeyboardInterrupt:
            # 128 + SIGINT, as a shell reports for a program that Ctrl-C ended.
            raise SystemExit(130) from None


def boot_time() -> float:
    """Return the seconds of a monotonic clock that also advances while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
