"""Standing the timer service up: alone in a process, or beside other services in one."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from rallypoint.serving.server import Registration
from rallypoint.timer.errors import translate
from rallypoint.timer.servicer import TimerServicer
from rallypoint.timer.v1 import timer_service_pb2_grpc
from rallypoint.timer.values import TimerSettings
from rallypoint.timer.watchdog import Watchdog

__all__ = ["DEFAULT_PORT", "SERVICE_NAME", "timer_registration", "translate"]

DEFAULT_PORT = 29410
SERVICE_NAME = "rallypoint.timer.v1.TimerService"


def timer_registration(
    settings: TimerSettings | None = None, clock: Callable[[], float] = time.monotonic
) -> Registration:
    """A timer service of its own, to be given to a `rallypoint.serving.server.Server` with `translate`.

    Args:
        settings: bounds and durations.
        clock: monotonic seconds.
    """
    return registration_of(Watchdog(settings, clock))


def registration_of(watchdog: Watchdog) -> Registration:
    """The service of a watchdog that the caller keeps in hand."""

    async def drain() -> None:
        watchdog.drain()

    servicer = TimerServicer(watchdog)
    add = partial(timer_service_pb2_grpc.add_TimerServiceServicer_to_server, servicer)
    return Registration(SERVICE_NAME, add, drain)
