"""Countdown timers for workers: `with rallypoint.timer.expires(after=60): ...`.

This package is what a worker process imports, so importing it loads neither gRPC nor asyncio. The service and
its client are in modules of their own.
"""

from rallypoint.timer.process import TimerClient
from rallypoint.timer.scoped_client import Client
from rallypoint.timer.worker import configure, expires, progress

__all__ = ["Client", "TimerClient", "configure", "expires", "progress"]
