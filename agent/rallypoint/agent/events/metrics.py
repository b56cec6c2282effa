"""Prometheus metrics from the events of an agent's jobs; docs/metrics.md has the table."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rallypoint.agent.events.handlers import EventSink
from rallypoint.agent.events.recorder import PARTS, AgentEvent, GroupState, Source
from rallypoint.serving.metrics import serve_metrics

# Seconds, from a restart of tiny workers to one that waits for hosts; each about three times the previous one.
_DURATIONS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

_WORKER_STATES = ("running", "succeeded", "failed", "terminated")

# Limit for the names of workers' measurements; further names are counted as one. A program that puts the number of its
# step into a name would fill the memory of every metrics database.
_MOST_NAMES = 200
_OTHER_NAMES = "other"


@asynccontextmanager
async def metrics_at(address: str) -> AsyncIterator[EventSink]:
    """Serve metrics at `http://ADDRESS/metrics` for as long as the context lasts.

    Args:
        address: A value of `--metrics-address`: HOST:PORT.

    Yields:
        A sink for the events of jobs, for their `JobConfig.event_sinks`.

    Raises:
        SettingError: It is not an address, or can't be bound; one line.
    """
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)
    async with serve_metrics(address, registry):
        yield metrics


class AgentMetrics:
    """An event sink that counts. One for all jobs of an agent, one after the other or at the same time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """`registry`: receives the metrics."""
        self._formations = Histogram(
            "rallypoint_agent_rendezvous_seconds",
            "Time that it took to form a round, as this node saw it.",
            ["role"],
            buckets=_DURATIONS,
            registry=registry,
        )
        self._restarts = Histogram(
            "rallypoint_agent_restart_seconds",
            "Parts of restarts; part 'total' is from the failure to all workers of this host running again.",
            ["role", "part"],
            buckets=_DURATIONS,
            registry=registry,
        )
        self._workers = Gauge(
            "rallypoint_agent_workers",
            "Workers of the latest round on this host, by state.",
            ["run_id", "role", "state"],
            registry=registry,
        )
        self._state = Gauge(
            "rallypoint_agent_state",
            "1 for the state that the group of workers is in, 0 for the others.",
            ["run_id", "role", "state"],
            registry=registry,
        )
        self._round = Gauge(
            "rallypoint_agent_round", "Number of the latest round.", ["run_id", "role"], registry=registry
        )
        self._remaining = Gauge(
            "rallypoint_agent_remaining_restarts",
            "Restarts for a failure that the run has left.",
            ["run_id", "role"],
            registry=registry,
        )
        self._watchdog = Gauge(
            "rallypoint_agent_watchdog_up",
            "1 while a watchdog guards the workers of this host, 0 while none does.",
            ["run_id", "role"],
            registry=registry,
        )
        self._failures = Counter(
            "rallypoint_agent_worker_failures_total",
            "Workers of this host that failed, by kind of failure.",
            ["role", "kind"],
            registry=registry,
        )
        self._drains = Counter(
            "rallypoint_agent_drains_total", "Jobs that were drained.", ["role"], registry=registry
        )
        self._unhealthy = Counter(
            "rallypoint_agent_health_failures_total",
            "Times that this host was found unhealthy.",
            ["role"],
            registry=registry,
        )
        self._runs = {
            name: Counter(f"rallypoint_agent_{name}", text, ["role"], registry=registry)
            for name, text in (
                ("run_total", "Jobs that have ended on this host."),
                ("run_success_no_retries_total", "Jobs that succeeded without a restart for a failure."),
                ("run_success_with_retries_total", "Jobs that succeeded with one or more."),
                ("run_failed_no_retries_total", "Jobs that failed without a restart."),
                ("run_failed_with_retries_total", "Jobs that failed in spite of one or more."),
            )
        }
        self._measured = Histogram(
            "rallypoint_worker_seconds",
            "Durations that workers measured, by name (rallypoint.worker.metrics).",
            ["role", "name"],
            buckets=_DURATIONS,
            registry=registry,
        )
        self._values = Gauge(
            "rallypoint_worker_value",
            "Last value that workers recorded under a name, by rank.",
            ["run_id", "role", "rank", "name"],
            registry=registry,
        )
        self._errors = Counter(
            "rallypoint_worker_errors_total",
            "Measured calls of workers that raised, by name.",
            ["role", "name"],
            registry=registry,
        )
        self._names: set[str] = set()
        self._states: dict[str, dict[int, str]] = {}
        self._takers: dict[tuple[Source, str], Callable[[AgentEvent], None]] = {
            (Source.AGENT, "AGENT_STATE"): self._changed,
            (Source.AGENT, "RENDEZVOUS"): self._formed,
            (Source.AGENT, "RESTARTED"): self._restarted,
            (Source.AGENT, "DRAINING"): self._draining,
            (Source.AGENT, "WATCHDOG"): self._guarded,
            (Source.AGENT, "SUCCEEDED"): self._over,
            (Source.AGENT, "FAILED"): self._over,
            (Source.AGENT, "TERMINATED"): self._over,
            (Source.WORKER, "START"): self._worker,
            (Source.WORKER, "SUCCEEDED"): self._worker,
            (Source.WORKER, "TERMINATED"): self._worker,
            (Source.WORKER, "FAILED"): self._worker,
            (Source.WORKER, "MEASURED"): self._measure,
        }

    def __call__(self, event: AgentEvent) -> None:
        """Count an event."""
        role = event.subject.role
        if event.source is Source.AGENT and event.name.lower() in PARTS:
            self._restarts.labels(role, event.name.lower()).observe(event.duration or 0.0)
            return
        take = self._takers.get((event.source, event.name))
        if take is not None:
            take(event)

    def _changed(self, event: AgentEvent) -> None:
        state = event.details["state"]
        for each in GroupState:
            self._state.labels(event.subject.run_id, event.subject.role, each.value).set(each.value == state)
        if state == GroupState.UNHEALTHY.value and event.details.get("unfit"):
            self._unhealthy.labels(event.subject.role).inc()
        self._budget(event)

    def _budget(self, event: AgentEvent) -> None:
        if event.subject.max_restarts is None:
            return  # only the rendezvous service knows which restarts are still within the window
        left = max(0, event.subject.max_restarts - event.restart_count)
        self._remaining.labels(event.subject.run_id, event.subject.role).set(left)

    def _formed(self, event: AgentEvent) -> None:
        self._formations.labels(event.subject.role).observe(event.duration or 0.0)
        self._round.labels(event.subject.run_id, event.subject.role).set(event.round)
        self._states[event.subject.run_id] = {}
        self._show_workers(event)
        self._budget(event)

    def _restarted(self, event: AgentEvent) -> None:
        self._restarts.labels(event.subject.role, "total").observe(event.duration or 0.0)

    def _draining(self, event: AgentEvent) -> None:
        self._drains.labels(event.subject.role).inc()

    def _guarded(self, event: AgentEvent) -> None:
        self._watchdog.labels(event.subject.run_id, event.subject.role).set(event.details["up"])

    def _worker(self, event: AgentEvent) -> None:
        state = "running" if event.name == "START" else event.name.lower()
        self._states.setdefault(event.subject.run_id, {})[event.details["local_rank"]] = state
        self._show_workers(event)
        if event.name == "FAILED":
            self._failures.labels(event.subject.role, event.details.get("kind", "unknown")).inc()

    def _show_workers(self, event: AgentEvent) -> None:
        states = list(self._states[event.subject.run_id].values())
        for state in _WORKER_STATES:
            self._workers.labels(event.subject.run_id, event.subject.role, state).set(states.count(state))

    def _over(self, event: AgentEvent) -> None:
        role = event.subject.role
        self._runs["run_total"].labels(role).inc()
        if event.name != "TERMINATED":  # a job that left on request has neither succeeded nor failed
            how = "success" if event.name == "SUCCEEDED" else "failed"
            retries = "with" if event.restart_count else "no"
            self._runs[f"run_{how}_{retries}_retries_total"].labels(role).inc()
        self._states.pop(event.subject.run_id, None)
        self._forget(event.subject.run_id)

    def _forget(self, run_id: str) -> None:
        """Remove the gauges of a run: the agent may run on, and would show workers of old jobs."""
        for gauge in (self._workers, self._state, self._round, self._remaining, self._values, self._watchdog):
            gauge.remove_by_labels({"run_id": run_id})

    def _measure(self, event: AgentEvent) -> None:
        role, name = event.subject.role, str(event.details["name"])
        if name not in self._names:
            if len(self._names) >= _MOST_NAMES:
                name = _OTHER_NAMES
            self._names.add(name)
        if event.duration is not None:
            self._measured.labels(role, name).observe(event.duration)
            if event.details.get("raised"):
                self._errors.labels(role, name).inc()
        elif "value" in event.details:
            rank = str(event.details.get("rank", ""))
            self._values.labels(event.subject.run_id, role, rank, name).set(event.details["value"])
