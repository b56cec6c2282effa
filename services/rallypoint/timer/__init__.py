"""Countdown timers for workers: `with rallypoint.timer.expires(after=60): ...`.

Worker processes import this package, so it loads neither gRPC nor asyncio. The service and its client are modules
of their own.
"""

from rallypoint.timer.worker.expires import Client, configure, expires, progress
from rallypoint.timer.worker.process import TimerClient

__all__ = ["Client", "TimerClient", "configure", "expires", "progress"]
