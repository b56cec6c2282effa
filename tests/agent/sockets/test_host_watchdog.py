"""The state of a host's watchdog, and the end of a job that requires one and has none for too long."""

from __future__ import annotations

import asyncio

from rallypoint.agent.core.core import NodeUnhealthy
from rallypoint.agent.sockets.watchdog import HostWatchdog, WatchdogChanged


class Job:
    """A job on this host."""

    def __init__(self, most: float | None) -> None:
        self.events: asyncio.Queue[WatchdogChanged | NodeUnhealthy] = asyncio.Queue()
        self.watchdog = HostWatchdog(most, self.events.put_nowait)


async def test_each_change_is_reported_once() -> None:
    """Another reason is no change, but is shown from then on."""
    job = Job(None)
    for trouble in ("no answer", "refused", "", "", "refused"):
        job.watchdog.note(trouble)
        assert job.watchdog.trouble == trouble
    changes = [job.events.get_nowait() for _ in range(job.events.qsize())]
    assert changes == [WatchdogChanged("no answer"), WatchdogChanged(""), WatchdogChanged("refused")]


async def test_workers_wait_for_a_watchdog_only_where_one_is_required() -> None:
    """They wait also if there is no watchdog at all."""
    await Job(None).watchdog.allows_workers()
    job = Job(60.0)
    waiting = asyncio.create_task(job.watchdog.allows_workers())
    job.watchdog.note("no answer")
    await asyncio.sleep(0)
    assert not waiting.done()
    job.watchdog.note("")
    await waiting
    await job.watchdog.allows_workers()


async def test_a_host_without_the_watchdog_that_its_job_requires_is_unhealthy() -> None:
    """The timeout must pass, and the latest reason is reported; a watchdog that comes back in time prevents it."""
    job = Job(0.02)
    job.watchdog.note("no answer")
    job.watchdog.note("")
    assert job.watchdog._giving_up is None
    job.watchdog.note("no answer")
    job.watchdog.note("refused")
    while isinstance(event := await job.events.get(), WatchdogChanged):
        pass
    assert event.detail == "no watchdog has guarded its workers for 0.02 s, and the job requires one: refused"
    without_limit = Job(None)
    without_limit.watchdog.note("no answer")
    assert without_limit.watchdog._giving_up is None
