"""The events of a job on this host: told as they happen, handed to whoever wants them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.agent.core import core
from rallypoint.agent.events.handlers import EventDelivery, EventSink, open_event_log
from rallypoint.agent.events.recorder import (
    PARTS,
    AgentEvent,
    EventRecorder,
    GroupState,
    JobIdentity,
    Source,
    Timestamp,
    restart_line,
)
from rallypoint.agent.failures.failure import WorkerFailure
from rallypoint.agent.spawner.protocol import WorkerExit
from rallypoint.rpc.logs import get_logger

if TYPE_CHECKING:
    from rallypoint.worker.metrics import Measurement

__all__ = ["PARTS", "AgentEvent", "EventSink", "GroupState", "JobEvents", "JobIdentity", "Source"]

# Seconds that sinks get for the last events of a job. A local file needs none; who waits for more loses its end.
_LAST_EVENTS = 2.0

_log = get_logger("rallypoint.agent")


def _now() -> Timestamp:
    # Workers' exits are timed by the same monotonic clock, in another process.
    return Timestamp(time.monotonic(), time.time())


class JobEvents:
    """Records what happens to one job on this host."""

    def __init__(
        self,
        subject: JobIdentity,
        *,
        event_log: str = "null",
        sinks: Sequence[EventSink] = (),
        clock: Callable[[], Timestamp] = _now,
        deliver: EventDelivery | None = None,
    ) -> None:
        """Open the sinks.

        Args:
            subject: The job and this host's part in it.
            event_log: A file or a name, as of --event-log.
            sinks: Called with each event.
            clock: What time it is.
            deliver: In place of event log and sinks.

        Raises:
            SettingError: The event log can't be had; one line.
        """
        if deliver is None:
            log = open_event_log(event_log)
            deliver = EventDelivery([*([log] if log is not None else []), *sinks])
        self._clock = clock
        self._deliver = deliver
        self._recorder = EventRecorder(subject, clock())

    @property
    def has_sinks(self) -> bool:
        """Whether anybody gets them."""
        return self._deliver.has_sinks

    @property
    def group_state(self) -> GroupState:
        """State of the group of workers, in torch's terms."""
        return self._recorder.group_state

    def decided(
        self,
        event: core.Event,
        before: core.AgentState,
        after: core.AgentState,
        effects: Sequence[core.Effect],
    ) -> None:
        """The core took an event, and came from one state to another."""
        self._emit(self._recorder.decided(event, before, after, effects, self._clock()))

    def workers_started(self, workers: Mapping[int, tuple[int, int]]) -> None:
        """All workers of a round run; `workers`: rank and pid by local rank."""
        self._emit(self._recorder.workers_started(workers, self._clock()))

    def worker_ended(self, rank: int, how: WorkerExit) -> None:
        """A worker has ended with success, or because it was stopped."""
        self._emit(self._recorder.worker_ended(rank, how, self._clock()))

    def worker_failed(self, failure: WorkerFailure, how: WorkerExit | None) -> None:
        """A worker has failed by itself; `how` it ended, None if it never started, or does not end."""
        rank, kind, reason, at = failure.rank, failure.kind.value, failure.message, self._clock()
        if how is None:
            pid = failure.pid
            self._emit(self._recorder.worker_lost(rank, failure.local_rank, pid, reason, at, kind=kind))
        else:
            self._emit(self._recorder.worker_failed(rank, how, kind, reason, at))

    def record(self, name: str, duration: float | None = None, **details: Any) -> None:
        """Something else happened, as that the host is drained.

        Args:
            name: What, in capital letters.
            duration: Seconds that it took, if it took any.
            details: What belongs to it; values that JSON has.
        """
        self._emit([self._recorder.happened(name, self._clock(), duration, **details)])

    def watchdog(self, up: bool, trouble: str) -> None:
        """The watchdog of the workers here came, or went; `trouble`: why."""
        self._emit([self._recorder.watchdog(up, trouble, self._clock())])

    def measured(self, measurement: Measurement, rank: int) -> None:
        """A worker measured something of its own."""
        details = {"name": measurement.name, "value": measurement.value, "raised": measurement.raised or None}
        self._emit([self._recorder.measured(measurement.seconds, self._clock(), rank=rank, **details)])

    def ended(self, exit_code: int, detail: str) -> None:
        """The job is over on this host."""
        self._emit(self._recorder.ended(exit_code, detail, self._clock()))

    async def close(self) -> None:
        """Deliver what is left, in some seconds at most, and close the sinks. May be called again."""
        deliver, self._deliver = self._deliver, EventDelivery(())
        if not deliver.under_way:
            deliver.close(0.0)
        elif not await asyncio.to_thread(deliver.close, _LAST_EVENTS):
            _log.warning("the last events are lost: their sinks are too slow", timeout=_LAST_EVENTS)

    def _emit(self, events: Iterable[AgentEvent]) -> None:
        for event in events:
            if event.name == "RESTARTED":
                _log.info(restart_line(event), round=event.round)
            self._deliver(event)
