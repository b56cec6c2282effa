"""The history of a job on one host, as a sequence of events with durations.

Pure: from the core's decisions and the workers' exits, with their times, it makes the events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from rallypoint.agent.core import core
from rallypoint.agent.spawner.protocol import WorkerExit
from rallypoint.rendezvous.core.state import Phase, explain_parts

PARTS = ("detected", "told", "stopped", "reformed", "started")
"""Parts of a restart, in the order in which they begin."""


class Source(Enum):
    """The subject of an event; torch's names."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class GroupState(Enum):
    """State of an agent's group of workers; torch's names.

    Attributes:
        UNKNOWN: the rendezvous service has not responded yet.
        INIT: waits for its first round.
        HEALTHY: all workers run.
        UNHEALTHY: a worker has failed, or its host is unhealthy; the others are being stopped.
        STOPPED: no worker runs; waits for another round, or leaves.
        SUCCEEDED: the workers here have succeeded.
        FAILED: the job is over, and has failed.
    """

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class Timestamp(NamedTuple):
    """A time in monotonic seconds, for durations, and in Unix seconds, for people."""

    monotonic: float
    unix: float


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The job of an event; `max_restarts`: over the whole run, None if they are counted in a window."""

    run_id: str
    node_id: str
    role: str
    max_restarts: int | None


@dataclass(frozen=True, slots=True)
class AgentEvent:
    """An event; docs/metrics.md has the table of names.

    Attributes:
        name: as "START", "RENDEZVOUS", "RESTARTED".
        source: the agent or a worker.
        time: in Unix seconds by this host's clock.
        round: its round; 0: none yet.
        restart_count: restarts for a failure, over the whole run, as far as is known.
        duration: seconds that it took; None if unknown.
        details: its other fields; the values are JSON values.
    """

    name: str
    source: Source
    time: float
    subject: JobIdentity
    round: int = 0
    restart_count: int = 0
    duration: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """Return the event as one flat JSON object, without unknown fields."""
        record = {
            "time": round(self.time, 6),
            "event": self.name,
            "source": self.source.value,
            "run_id": self.subject.run_id,
            "node_id": self.subject.node_id,
            "role": self.subject.role,
            "round": self.round,
            "restart_count": self.restart_count,
        }
        if self.duration is not None:
            record["duration"] = round(self.duration, 6)
        return record | dict(self.details)


class _RestartTiming:
    """A restart under way, and the seconds of each part of it so far."""

    def __init__(self, began: float, known: float, *, failed_here: bool) -> None:
        self.began = began
        self.known = known
        self.stopped: float | None = None
        # True until the run has ended the round for a failure on this host.
        self.untold = failed_here
        self.parts: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> float:
        """Add seconds to a part: it may run several times, as when a round ends before its workers start."""
        self.parts[part] = self.parts.get(part, 0.0) + seconds
        return seconds


class EventRecorder:
    """Makes the events of one job on one host. Every method returns the events that follow from its arguments."""

    def __init__(self, subject: JobIdentity, begun: Timestamp) -> None:
        """`begun`: when the job began to join."""
        self.group_state = GroupState.UNKNOWN
        self._subject = subject
        self._begun = self._stands_since = self._waits_since = self._ranked_at = begun.monotonic
        self._start_requested = self._examined_since = self._watchdog_since = begun.monotonic
        self._stopping = False
        self._started_at: dict[int, float] = {}
        self._failed_at: float | None = None
        self._restart: _RestartTiming | None = None
        # Seconds of each part until the workers of the round ran; None: they do not, or are being stopped.
        self.start_parts: Mapping[str, float] | None = None
        self._round = 0
        self._restart_count = 0

    def decided(
        self,
        event: core.Event,
        before: core.AgentState,
        after: core.AgentState,
        effects: Sequence[core.Effect],
        at: Timestamp,
    ) -> list[AgentEvent]:
        """The core took an event and changed its state."""
        events = []
        self._restart_count = after.restart_count
        if isinstance(event, core.RunUpdated) and self.group_state is GroupState.UNKNOWN:
            events += self._stand(GroupState.INIT, at)
        stops = next((effect for effect in effects if isinstance(effect, core.StopWorkers)), None)
        if stops is not None:
            self._stopping = True
        if _is_spare(before) and not _is_spare(after):
            self._waits_since = at.monotonic
        events += self._record_health_check(event, before, after, at)
        events += self._follow_restart(event, before, after, stops, at)
        if isinstance(event, core.GroupStopped):
            events += self._stand(GroupState.STOPPED, at)
        elif isinstance(event, core.GroupSucceeded) and before.workers is core.Workers.RUNNING:
            events += self._stand(GroupState.SUCCEEDED, at)
        return events + [each for effect in effects for each in self._carried_out(effect, at)]

    def _carried_out(self, effect: core.Effect, at: Timestamp) -> list[AgentEvent]:
        if isinstance(effect, core.SendConfirm):
            self._ranked_at = at.monotonic
        elif isinstance(effect, core.CheckHealth):
            self._examined_since = at.monotonic
        elif isinstance(effect, core.StartWorkers):
            return self._ranks_known(effect.assignment, at)
        return []

    def _record_health_check(
        self, event: core.Event, before: core.AgentState, after: core.AgentState, at: Timestamp
    ) -> list[AgentEvent]:
        """Return the events about the host: health checks, and the start of a drain."""
        events = []
        if isinstance(event, core.NodeUnhealthy) and before.unhealthy is None:
            events += self._stand(GroupState.UNHEALTHY, at, unfit=True, reason=event.detail)
        if after.draining is not None and before.draining is None:
            events.append(self._event("DRAINING", at, None, reason=after.draining))
        if before.examining and not after.examining:
            events.append(self._event("EXAMINED", at, at.monotonic - self._examined_since))
        return events

    def _follow_restart(
        self,
        event: core.Event,
        before: core.AgentState,
        after: core.AgentState,
        stops: core.StopWorkers | None,
        at: Timestamp,
    ) -> list[AgentEvent]:
        now, events = at.monotonic, []
        if isinstance(event, core.GroupFailed) and stops is not None:
            failed_at = now if self._failed_at is None else min(self._failed_at, now)
            events += self._stand(GroupState.UNHEALTHY, at, reason=stops.detail)
            if self._restart is None:
                self._restart = _RestartTiming(failed_at, now, failed_here=True)
            events.append(self._part("detected", now - failed_at, at))
        elif stops is not None or _round_is_over(before, after):
            if self._restart is None:
                self._restart = _RestartTiming(now, now, failed_here=False)
            elif stops is not None:
                self._restart.known = now
        restart = self._restart
        if restart is None:
            return events
        if after.workers is core.Workers.ABSENT and restart.stopped is None:
            restart.stopped = now
            if before.workers is core.Workers.STOPPING:
                events.append(self._part("stopped", now - restart.known, at))
        elif after.workers is not core.Workers.ABSENT and stops is not None:
            restart.stopped = None
        if restart.untold and isinstance(event, core.RunUpdated) and not _is_in_round(after):
            restart.untold = False
            events.append(self._part("told", now - restart.known, at))
        if not _continues(after):
            self._restart = None
        return events

    def _ranks_known(self, assignment: core.Assignment, at: Timestamp) -> list[AgentEvent]:
        """A round was formed, and this node's workers are about to be started."""
        now, restart = at.monotonic, self._restart
        since = self._waits_since
        if restart is not None:
            since = restart.stopped if restart.stopped is not None else restart.known
        self._round, self._start_requested = assignment.round, now
        self._stopping, self._failed_at = False, None
        self._started_at.clear()
        ranks: dict[str, Any] = {
            "group_rank": assignment.group_rank,
            "group_world_size": assignment.group_world_size,
            "base_rank": assignment.base_rank,
            "world_size": assignment.world_size,
        }
        events = [
            self._event("RENDEZVOUS", at, now - since, **ranks),
            self._event("ASSIGN_WORKER_RANKS", at, now - self._ranked_at, **ranks),
        ]
        if restart is not None:
            events.append(self._part("reformed", now - since, at))
        return events

    def workers_started(self, workers: Mapping[int, tuple[int, int]], at: Timestamp) -> list[AgentEvent]:
        """All workers of the round run; `workers`: rank and pid by local rank."""
        events = [
            event for rank, (number, pid) in workers.items() for event in self._start(rank, number, pid, at)
        ]
        self.start_parts = None
        if self._stopping:
            return events
        events += self._stand(GroupState.HEALTHY, at)
        restart, self._restart = self._restart, None
        seconds = at.monotonic - self._start_requested
        self.start_parts = {"started": seconds}
        if restart is not None:
            restart.add("started", seconds)
            events.append(self._event("STARTED", at, seconds))
            parts = {part: round(restart.parts[part], 6) for part in PARTS if part in restart.parts}
            events.append(self._event("RESTARTED", at, at.monotonic - restart.began, parts=parts))
            self.start_parts = parts
        return events

    def worker_ended(self, rank: int, exit_: WorkerExit, at: Timestamp) -> list[AgentEvent]:
        """A worker has ended with success, or because it was stopped."""
        name = "SUCCEEDED" if exit_.succeeded else "TERMINATED"
        return self._ended(name, rank, exit_, at, **_exit(exit_))

    def worker_failed(
        self, rank: int, exit_: WorkerExit, kind: str, reason: str, at: Timestamp
    ) -> list[AgentEvent]:
        """A worker has failed by itself.

        Args:
            kind: the kind of failure, in one word.
            reason: one line for people.
            at: when that became known.
        """
        if self._failed_at is None:
            self._failed_at = exit_.at
        return self._ended("FAILED", rank, exit_, at, **_exit(exit_), kind=kind, reason=reason)

    def worker_lost(
        self, rank: int, local_rank: int, pid: int, reason: str, at: Timestamp, *, kind: str
    ) -> list[AgentEvent]:
        """A worker could not be started (`pid` 0), or can't be killed."""
        where: dict[str, Any] = {"rank": rank, "local_rank": local_rank, "pid": pid or None}
        return [self._event("FAILED", at, None, Source.WORKER, **where, kind=kind, reason=reason)]

    def watchdog(self, up: bool, trouble: str, at: Timestamp) -> AgentEvent:
        """The watchdog of the workers is up or down from now on."""
        since, self._watchdog_since = self._watchdog_since, at.monotonic
        return self._event("WATCHDOG", at, at.monotonic - since, up=up, reason=trouble)

    def measured(self, duration: float | None, at: Timestamp, **details: Any) -> AgentEvent:
        """A worker made a measurement of its own."""
        return self._event("MEASURED", at, duration, Source.WORKER, **details)

    def ended(self, exit_code: int, detail: str, at: Timestamp) -> list[AgentEvent]:
        """The job is over on this host."""
        name, standing = "FAILED", GroupState.FAILED
        if exit_code == 0:
            name, standing = "SUCCEEDED", GroupState.SUCCEEDED
        elif exit_code > 128:
            name, standing = "TERMINATED", GroupState.STOPPED
        seconds = at.monotonic - self._begun
        events = self._stand(standing, at, reason=detail)
        return [*events, self._event(name, at, seconds, exit_code=exit_code, reason=detail)]

    def _stand(self, standing: GroupState, at: Timestamp, **details: Any) -> list[AgentEvent]:
        if standing is self.group_state:
            return []
        previous, since = self.group_state, self._stands_since
        self.group_state, self._stands_since = standing, at.monotonic
        change: dict[str, Any] = {"state": standing.value, "previous": previous.value}
        return [self._event("AGENT_STATE", at, at.monotonic - since, **change, **details)]

    def _start(self, local_rank: int, rank: int, pid: int, at: Timestamp) -> list[AgentEvent]:
        if local_rank in self._started_at:
            return []
        self._started_at[local_rank] = at.monotonic
        who: dict[str, Any] = {"rank": rank, "local_rank": local_rank, "pid": pid}
        return [self._event("START", at, at.monotonic - self._start_requested, Source.WORKER, **who)]

    def _ended(
        self, name: str, rank: int, exit_: WorkerExit, at: Timestamp, **details: Any
    ) -> list[AgentEvent]:
        # A worker that ends at once does so before the start of the other workers has returned.
        events = self._start(exit_.local_rank, rank, exit_.pid, at)
        lived = max(0.0, exit_.at - self._started_at[exit_.local_rank])
        return [*events, self._event(name, at, lived, Source.WORKER, rank=rank, **details)]

    def _part(self, part: str, seconds: float, at: Timestamp) -> AgentEvent:
        assert self._restart is not None, "a part belongs to a restart"
        return self._event(part.upper(), at, self._restart.add(part, seconds))

    def _event(
        self,
        name: str,
        at: Timestamp,
        duration: float | None,
        source: Source = Source.AGENT,
        /,
        **details: Any,
    ) -> AgentEvent:
        known = {key: value for key, value in details.items() if value is not None and value != ""}
        return AgentEvent(
            name, source, at.unix, self._subject, self._round, self._restart_count, duration, known
        )


def _exit(exit_: WorkerExit) -> dict[str, Any]:
    return {
        "local_rank": exit_.local_rank,
        "pid": exit_.pid,
        "exit_code": exit_.exit_code,
        "signal": exit_.signal,
        "user_seconds": round(exit_.user_seconds, 3),
        "system_seconds": round(exit_.system_seconds, 3),
        "max_rss": exit_.max_rss,
    }


def _is_in_round(state: core.AgentState) -> bool:
    """True if the round that was started last continues, as far as is known."""
    last = state.assignment
    return state.phase is Phase.FINAL and last is not None and last.round == state.started


def _round_is_over(before: core.AgentState, after: core.AgentState) -> bool:
    """True if the run has ended the round, and this node's workers had ended already."""
    return bool(after.started) and _is_in_round(before) and not _is_in_round(after)


def _continues(state: core.AgentState) -> bool:
    """True if workers will run here again, as far as is known."""
    if state.leaving is not None or state.left or state.out:
        return False
    if state.unhealthy is not None or state.draining is not None:
        return False
    return state.phase is not Phase.CLOSED and not _is_spare(state)


def _is_spare(state: core.AgentState) -> bool:
    """True if the other nodes run without this one."""
    return state.phase is Phase.FINAL and state.assignment is None


def restart_line(event: AgentEvent) -> str:
    """Describe a RESTARTED event: its duration, and those of its parts."""
    return f"running again after {event.duration or 0.0:.2f} s ({explain_parts(event.details['parts'])})"
