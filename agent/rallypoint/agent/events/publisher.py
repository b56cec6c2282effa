"""The events of a job on this host: recorded as they happen, and delivered to sinks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rallypoint.agent.core import core
from rallypoint.agent.events.handlers import EventDelivery, EventSink, open_event_log
from rallypoint.agent.events.recorder import AgentEvent, EventRecorder, JobIdentity, Timestamp, restart_line
from rallypoint.agent.failures.failure import WorkerFailure
from rallypoint.agent.spawner.protocol import WorkerExit
from rallypoint.rpc.logs import get_logger

if TYPE_CHECKING:
    from rallypoint.worker.metrics import Measurement


# Seconds that sinks get for the last events of a job. A local file needs none; a slower sink loses the last events.
_LAST_EVENTS = 2.0

_log = get_logger("rallypoint.agent")


def _now() -> Timestamp:
    # The spawner, another process, takes the times of workers' exits from the same monotonic clock.
    return Timestamp(time.monotonic(), time.time())


class JobEvents:
    """Records the events of one job on this host."""

    def __init__(
        self, subject: JobIdentity, *, event_log: str = "null", sinks: Sequence[EventSink] = ()
    ) -> None:
        """Open the sinks.

        Args:
            subject: The job and this host's part in it.
            event_log: Value of --event-log-handler.

        Raises:
            SettingError: The event log can't be opened; one line.
        """
        log = open_event_log(event_log)
        self._deliver = EventDelivery([*([log] if log is not None else []), *sinks])
        self._recorder = EventRecorder(subject, _now())

    @property
    def has_sinks(self) -> bool:
        """True if there is a sink for the events."""
        return self._deliver.has_sinks

    def decided(
        self,
        event: core.Event,
        before: core.AgentState,
        after: core.AgentState,
        effects: Sequence[core.Effect],
    ) -> None:
        """Record that the core took an event and changed its state."""
        self._emit(self._recorder.decided(event, before, after, effects, _now()))

    def workers_started(self, workers: Mapping[int, tuple[int, int]]) -> Mapping[str, float] | None:
        """Record that all workers of a round run; `workers`: rank and pid by local rank.

        Returns the seconds of each part of the recovery; None if the workers are being stopped already.
        """
        self._emit(self._recorder.workers_started(workers, _now()))
        return self._recorder.start_parts

    def worker_ended(self, rank: int, exit_: WorkerExit) -> None:
        """Record that a worker has ended with success, or because it was stopped."""
        self._emit(self._recorder.worker_ended(rank, exit_, _now()))

    def worker_failed(self, failure: WorkerFailure, exit_: WorkerExit | None) -> None:
        """Record that a worker has failed by itself; `exit_`: its exit, None if it never started, or does not end."""
        rank, kind, reason, at = failure.rank, failure.kind.name.lower(), failure.message, _now()
        if exit_ is None:
            pid = failure.pid
            self._emit(self._recorder.worker_lost(rank, failure.local_rank, pid, reason, at, kind=kind))
        else:
            self._emit(self._recorder.worker_failed(rank, exit_, kind, reason, at))

    def watchdog(self, up: bool, trouble: str) -> None:
        """Record that the watchdog of the workers here is up or down; `trouble`: the reason."""
        self._emit([self._recorder.watchdog(up, trouble, _now())])

    def measured(self, measurement: Measurement, rank: int) -> None:
        """Record a worker's own measurement."""
        details = {"name": measurement.name, "value": measurement.value, "raised": measurement.raised or None}
        self._emit([self._recorder.measured(measurement.seconds, _now(), rank=rank, **details)])

    def ended(self, exit_code: int, detail: str) -> None:
        """Record that the job is over on this host."""
        self._emit(self._recorder.ended(exit_code, detail, _now()))

    async def close(self) -> None:
        """Deliver the remaining events, in 2 s at most, and close the sinks. May be called again."""
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
