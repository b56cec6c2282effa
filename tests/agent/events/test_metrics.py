"""The metrics of an agent have its rounds, restarts and workers, and nothing of jobs that have ended."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from rallypoint.agent.events.metrics import AgentMetrics
from rallypoint.agent.events.recorder import AgentEvent, JobIdentity, Source

SUBJECT = JobIdentity("run-1", "a", "trainer", 3)


class Scraped:
    """The metrics of an agent that gets its events from the test."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics = AgentMetrics(self._registry)
        self.subject = SUBJECT

    def hears(
        self,
        name: str,
        source: Source = Source.AGENT,
        /,
        *,
        duration: float | None = None,
        restart_count: int = 0,
        **details: object,
    ) -> None:
        """Process an event of round 2."""
        self._metrics(AgentEvent(name, source, 1e6, self.subject, 2, restart_count, duration, details))

    def figure(self, name: str, /, **labels: str) -> float | None:
        """Return the value that Prometheus would scrape; None: there is none."""
        return self._registry.get_sample_value(f"rallypoint_{name}", {"role": "trainer", **labels})


def test_rounds_and_restarts_are_histograms_of_seconds() -> None:
    """Each part has a value, and so has the total."""
    scraped = Scraped()
    scraped.hears("RENDEZVOUS", duration=0.25)
    assert scraped.figure("agent_rendezvous_seconds_sum") == 0.25
    assert scraped.figure("agent_round", run_id="run-1") == 2
    for part in ("DETECTED", "TOLD", "STOPPED", "REFORMED", "STARTED"):
        scraped.hears(part, duration=0.5)
        assert scraped.figure("agent_restart_seconds_sum", part=part.lower()) == 0.5
    scraped.hears("RESTARTED", duration=2.0)
    assert scraped.figure("agent_restart_seconds_count", part="total") == 1
    assert scraped.figure("agent_restart_seconds_bucket", part="total", le="3.0") == 1
    assert scraped.figure("agent_restart_seconds_bucket", part="total", le="1.0") == 0


def test_workers_are_counted_by_their_state_in_the_latest_round() -> None:
    """A new round begins with none."""
    scraped = Scraped()

    def workers() -> list[float | None]:
        states = ("running", "succeeded", "failed", "terminated")
        return [scraped.figure("agent_workers", run_id="run-1", state=state) for state in states]

    scraped.hears("RENDEZVOUS", duration=0.1)
    for local_rank in range(4):
        scraped.hears("START", Source.WORKER, local_rank=local_rank)
    assert workers() == [4, 0, 0, 0]
    scraped.hears("FAILED", Source.WORKER, local_rank=0, kind="signal")
    scraped.hears("TERMINATED", Source.WORKER, local_rank=1)
    scraped.hears("SUCCEEDED", Source.WORKER, local_rank=2)
    assert workers() == [1, 1, 1, 1]
    assert scraped.figure("agent_worker_failures_total", kind="signal") == 1
    scraped.hears("RENDEZVOUS", duration=0.1)
    assert workers() == [0, 0, 0, 0]


def test_states_health_drains_and_remaining_restarts() -> None:
    """Exactly one state is 1 at a time."""
    scraped = Scraped()
    scraped.hears("AGENT_STATE", restart_count=1, state="HEALTHY")
    assert scraped.figure("agent_remaining_restarts", run_id="run-1") == 2
    scraped.hears("AGENT_STATE", restart_count=5, state="UNHEALTHY", unfit=True)
    assert scraped.figure("agent_state", run_id="run-1", state="HEALTHY") == 0
    assert scraped.figure("agent_state", run_id="run-1", state="UNHEALTHY") == 1
    assert scraped.figure("agent_remaining_restarts", run_id="run-1") == 0
    assert scraped.figure("agent_health_failures_total") == 1
    scraped.hears("AGENT_STATE", state="STOPPED")
    scraped.hears("AGENT_STATE", state="UNHEALTHY", reason="a worker failed")
    assert scraped.figure("agent_health_failures_total") == 1
    scraped.hears("DRAINING")
    assert scraped.figure("agent_drains_total") == 1


def test_remaining_restarts_of_a_budget_that_refills_are_unknown() -> None:
    """A job of a month would seem to have none left, although all its restarts were weeks ago."""
    scraped = Scraped()
    scraped.subject = replace(SUBJECT, max_restarts=None)
    scraped.hears("AGENT_STATE", restart_count=20, state="HEALTHY")
    scraped.hears("RENDEZVOUS", restart_count=20, duration=0.1)
    assert scraped.figure("agent_remaining_restarts", run_id="run-1") is None


def test_ends_of_jobs_are_counted_as_torchelastic_does_and_their_gauges_go() -> None:
    """A stopped job has neither succeeded nor failed; a daemon shows no workers of a job that has ended."""
    scraped = Scraped()
    for name, restarts in (
        ("SUCCEEDED", 0),
        ("SUCCEEDED", 2),
        ("FAILED", 0),
        ("FAILED", 1),
        ("TERMINATED", 1),
    ):
        scraped.hears("RENDEZVOUS", duration=0.1)
        scraped.hears("AGENT_STATE", state="HEALTHY")
        scraped.hears("START", Source.WORKER, local_rank=0)
        scraped.hears("MEASURED", Source.WORKER, name="loss", value=1.5, rank=3)
        assert scraped.figure("worker_value", run_id="run-1", rank="3", name="loss") == 1.5
        scraped.hears(name, restart_count=restarts)
        assert scraped.figure("agent_workers", run_id="run-1", state="running") is None
        assert scraped.figure("agent_state", run_id="run-1", state="HEALTHY") is None
        assert scraped.figure("worker_value", run_id="run-1", rank="3", name="loss") is None
    assert scraped.figure("agent_run_total") == 5
    for how in ("success", "failed"):
        for retries in ("no", "with"):
            assert scraped.figure(f"agent_run_{how}_{retries}_retries_total") == 1


def test_measurements_have_a_bounded_number_of_names() -> None:
    """A program that puts its step into the name must not fill the memory of all servers that store metrics."""
    scraped = Scraped()
    scraped.hears("MEASURED", Source.WORKER, name="save", duration=2.0)
    scraped.hears("MEASURED", Source.WORKER, name="save", duration=1.0, raised=True)
    assert scraped.figure("worker_seconds_sum", name="save") == 3.0
    assert scraped.figure("worker_errors_total", name="save") == 1
    for step in range(500):
        scraped.hears("MEASURED", Source.WORKER, name=f"step {step}", duration=0.1)
    assert scraped.figure("worker_seconds_count", name="step 198") == 1
    assert scraped.figure("worker_seconds_count", name="step 300") is None
    assert scraped.figure("worker_seconds_count", name="other") == 301
    scraped.hears("MEASURED", Source.WORKER, name="save", duration=1.0)
    assert scraped.figure("worker_seconds_count", name="save") == 3


def test_events_without_a_metric_are_ignored() -> None:
    """New events may be added at any time."""
    Scraped().hears("SOMETHING_NEW")


def test_the_state_of_the_watchdog_is_one_metric() -> None:
    """It exists from the first known state to the end of the job."""
    scraped = Scraped()
    assert scraped.figure("agent_watchdog_up", run_id="run-1") is None
    for up in (True, False, True):
        scraped.hears("WATCHDOG", up=up)
        assert scraped.figure("agent_watchdog_up", run_id="run-1") == up
    scraped.hears("SUCCEEDED")
    assert scraped.figure("agent_watchdog_up", run_id="run-1") is None
