"""Standing the timer service up: alone in a process, or beside other services in one."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from rallypoint.serving.server import Registration
from rallypoint.timer.errors import translate
from rallypoint.timer.servicer import TimerServicer
from rallypoint.timer.v1 import timer_service_pb2_grpc
from rallypoint.timer.values import TimerSettings
from rallypoint.timer.watchdog import Watchdog

__all__ = ["DEFAULT_PORT", "SERVICE_NAME", "timer_registration", "timer_service", "translate"]

DEFAULT_PORT = 29410
SERVICE_NAME = "rallypoint.timer.v1.TimerService"


@asynccontextmanager
async def timer_service(
    settings: TimerSettings | None = None,
    *,
    learned: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> AsyncIterator[Registration]:
    """A timer service for as long as the context lasts; yields what a `Server` is to serve, with `translate`.

    Args:
        settings: bounds and durations.
        learned: the file in which it keeps what it learns; None: in memory only.
        clock: monotonic seconds.
        wall_clock: Unix seconds: by them what was learned grows old in the file.

    Raises:
        SettingError: the file can't be used; one line.
    """
    watchdog = Watchdog(settings, clock)
    if learned is None:
        yield registration_of(watchdog)
        return
    # Here and not at the top: the agent of a job has a timer service inside, and keeps nothing.
    from rallypoint.timer.learned_file import LearnedFile  # noqa: PLC0415
    from rallypoint.timer.learned_keeper import keep_learned  # noqa: PLC0415

    async with keep_learned(watchdog, LearnedFile(learned, wall_clock)):
        yield registration_of(watchdog)


def timer_registration(
    settings: TimerSettings | None = None, clock: Callable[[], float] = time.monotonic
) -> Registration:
    """A timer service that keeps all in memory, for a `rallypoint.serving.server.Server` with `translate`.

    Args:
        settings: bounds and durations.
        clock: monotonic seconds.
    """
    return registration_of(Watchdog(settings, clock))


def registration_of(watchdog: Watchdog) -> Registration:
    """The service of a watchdog that the caller keeps in hand."""

    servicer = TimerServicer(watchdog)
    add = partial(timer_service_pb2_grpc.add_TimerServiceServicer_to_server, servicer)
    return Registration(SERVICE_NAME, add, servicer.drain)
