"""The groups of workers of a host follow one another: an event of one never counts for the next."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any, ClassVar

from rallypoint.agent.core import core
from rallypoint.agent.workers.groups import WorkerGroups
from rallypoint.agent.workers.processes import StopReport
from support.waiting import until


class SlowToSweep:
    """A group whose workers have ended; their remaining processes die slowly."""

    names: tuple[str, ...] = ()
    workers: ClassVar[dict[int, Any]] = {}
    assignment = SimpleNamespace(round=1)

    def __init__(self) -> None:
        self.swept = asyncio.Event()

    async def stop(self, number: int, _timeout: float) -> StopReport:
        """Stop the group; the sweep sends SIGKILL, an ordinary stop another signal first."""
        if number == signal.SIGKILL:
            await self.swept.wait()
        return StopReport()


async def test_a_success_that_a_stop_has_overtaken_is_not_reported() -> None:
    """Its round is over, and the workers of the next may run when the sweep ends: they have not succeeded."""
    told: list[Any] = []
    tasks: list[asyncio.Task[None]] = []
    groups = WorkerGroups(None, None, told.append, lambda work: tasks.append(asyncio.create_task(work)))  # type: ignore[arg-type]
    groups.group = group = SlowToSweep()  # type: ignore[assignment]
    groups.sweep()
    await asyncio.sleep(0)
    groups.stop("a new round is being formed", signal.SIGTERM, 1.0)
    await until(lambda: bool(told), "the end of the stop")
    group.swept.set()
    await tasks[0]
    assert told == [core.GroupStopped()]
