"""The event queue and the background tasks of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from rallypoint.agent.core import core
from rallypoint.agent.health.monitor import MaintenanceAnnounced
from rallypoint.agent.job.result import JobResult
from rallypoint.agent.sockets.watchdog import WatchdogChanged
from rallypoint.agent.workers.group import GroupEvent

QueuedEvent: TypeAlias = core.Event | GroupEvent | WatchdogChanged | MaintenanceAnnounced | JobResult
"""An event for the core, or one that `Job` handles itself; a JobResult ends the job without the core."""


class EventQueue(asyncio.Queue[QueuedEvent]):
    """The one queue into which all parts of a job put their events, on the event loop; `Job.run` takes them out.

    Events are handled in the order in which they were put, each completely before the next. Handling never waits: all
    events that are in the queue are handled before another task runs. The order in which the parts put them guarantees:

    - A worker's exit is in `WorkerGroup.workers` before its WorkersChanged, which comes before the failure or success
      that it causes.
    - A group whose workers all started has one WorkersStarted, before or after their exits. GroupBroken replaces the
      events of an exit that could not be handled, and ends the job.
    - A group has at most one FirstFailure, before any EarlierFailure. The report of a hang is noted before its worker
      is killed, so the failure contains it; if the worker outlives SIGKILL, NodeUnhealthy follows the failure.
    - The failures of exits come before the group's GroupStopped, and so does NodeUnhealthy if processes survive the
      stop. The next group starts after GroupStopped or GroupSucceeded, so exits are always those of the latest group.
    - GroupSucceeded comes after the sweep. If processes survive that, NodeUnhealthy follows: it can't undo the success.
    - Updates of the run come in the order of the stream. MembershipEnded is the last event of the membership; the cause
      comes before it: NodeUnhealthy if the service evicted this node as unhealthy, a JobResult if there was an error.
    """


class Background:
    """Runs tasks in the background; no error is lost."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        """`on_error` is called on the event loop with an exception that a task raised."""
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def end(self) -> None:
        """Cancel all running tasks, and return when they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)
