"""The steps of a job become events, each with its duration."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.agent.core import core
from rallypoint.agent.events.recorder import (
    AgentEvent,
    EventRecorder,
    GroupState,
    JobIdentity,
    Source,
    Timestamp,
    restart_line,
)
from rallypoint.agent.spawner.protocol import WorkerExit
from rallypoint.rendezvous.core.state import Phase

SUBJECT = JobIdentity("run-1", "a", "trainer", 3)
# Unix seconds at time 0 of the monotonic clock.
EPOCH = 1_000_000.0


def _seat(round_: int, group_world_size: int = 2) -> core.Assignment:
    return core.Assignment(round_, 0, group_world_size, 0, 2 * group_world_size, 0, 4, "host", 29500, round_)


def _exit(local_rank: int, at: float, code: int = 0, *, during_stop: bool = False) -> WorkerExit:
    returned, number = (None, -code) if code < 0 else (code, None)
    time = EPOCH + at
    return WorkerExit(local_rank, 100 + local_rank, returned, number, at, time, during_stop=during_stop)


class RecordedJob:
    """An event recorder, with the core whose decisions it gets and a clock of the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.state = core.AgentState()
        self.chronicle = EventRecorder(SUBJECT, self._at())
        self.events: list[AgentEvent] = []

    def _at(self) -> Timestamp:
        return Timestamp(self.now, EPOCH + self.now)

    def hears(self, now: float, event: core.Event) -> None:
        """Pass an event to the core."""
        self.now, before = now, self.state
        self.state, effects = core.decide(before, event)
        self.events += self.chronicle.decided(event, before, self.state, effects, self._at())

    def update(self, now: float, phase: Phase, round_: int = 0, restart_count: int = 0) -> None:
        """Pass an update of the run to the core; round 0: this node has no assignment."""
        seat = _seat(round_) if round_ else None
        self.hears(now, core.RunUpdated(phase, seat, restart_count, "why"))

    def started(self, now: float) -> None:
        """Report that both workers have started."""
        self.now = now
        self.events += self.chronicle.workers_started({0: (0, 100), 1: (1, 101)}, self._at())

    def ends(self, now: float, how: WorkerExit) -> None:
        """Report that a worker has ended with success, or was stopped."""
        self.now = now
        self.events += self.chronicle.worker_ended(how.local_rank, how, self._at())

    def fails(self, now: float, how: WorkerExit) -> None:
        """Report that a worker has failed, also to the core."""
        self.now = now
        self.events += self.chronicle.worker_failed(how.local_rank, how, "signal", "it died", self._at())
        self.hears(now, core.GroupFailed())

    def runs(self) -> None:
        """Run round 1 from second 4 on."""
        self.update(1.0, Phase.JOINABLE)
        self.update(2.0, Phase.FROZEN, 1)
        self.update(3.0, Phase.FINAL, 1)
        self.started(4.0)
        assert self.chronicle.group_state is GroupState.HEALTHY

    def told(self, *names: str) -> list[tuple[str, Any]]:
        """Return names and durations of the events since the last call, or of some names only."""
        found = [(each.name, each.duration) for each in self.events if not names or each.name in names]
        self.events = []
        return found


@pytest.fixture
def job() -> RecordedJob:
    return RecordedJob()


def _details(job: RecordedJob, name: str) -> dict[str, Any]:
    (event,) = [each for each in job.events if each.name == name]
    return dict(event.details)


def test_a_first_round_is_formed_ranked_and_started(job: RecordedJob) -> None:
    """RENDEZVOUS lasts from the join to the last confirmation, ranking from the ranks to that, a start to exec."""
    job.runs()
    assert [(each.source, each.name, each.duration) for each in job.events] == [
        (Source.AGENT, "AGENT_STATE", 1.0),
        (Source.AGENT, "RENDEZVOUS", 3.0),
        (Source.AGENT, "ASSIGN_WORKER_RANKS", 1.0),
        (Source.WORKER, "START", 1.0),
        (Source.WORKER, "START", 1.0),
        (Source.AGENT, "AGENT_STATE", 3.0),
    ]
    assert job.events[-1].as_record() == {
        "time": EPOCH + 4,
        "event": "AGENT_STATE",
        "source": "AGENT",
        "run_id": "run-1",
        "node_id": "a",
        "role": "trainer",
        "round": 1,
        "restart_count": 0,
        "duration": 3.0,
        "state": "HEALTHY",
        "previous": "INIT",
    }
    assert _details(job, "RENDEZVOUS") == {
        "group_rank": 0,
        "group_world_size": 2,
        "base_rank": 0,
        "world_size": 4,
    }


def test_the_parts_of_a_restart_after_a_failure_here(job: RecordedJob) -> None:
    """It lasts from the death of the worker until all run again; the run's update arrives while the others stop."""
    job.runs()
    job.told()
    job.fails(10.1, _exit(1, 10.0, -9))
    assert job.told() == [
        ("FAILED", 6.0),
        ("AGENT_STATE", pytest.approx(6.1)),
        ("DETECTED", pytest.approx(0.1)),
    ]
    job.update(10.3, Phase.FROZEN, 2, restart_count=1)
    assert job.told() == [("TOLD", pytest.approx(0.2))]
    job.ends(10.5, _exit(0, 10.5, -15, during_stop=True))
    job.hears(10.6, core.GroupStopped())
    assert job.told() == [
        ("TERMINATED", 6.5),
        ("STOPPED", pytest.approx(0.5)),
        ("AGENT_STATE", pytest.approx(0.5)),
    ]
    job.update(11.0, Phase.FINAL, 2, restart_count=1)
    assert job.told() == [
        ("RENDEZVOUS", pytest.approx(0.4)),
        ("ASSIGN_WORKER_RANKS", pytest.approx(0.4)),
        ("REFORMED", pytest.approx(0.4)),
    ]
    job.started(12.0)
    (restarted,) = [each for each in job.events if each.name == "RESTARTED"]
    assert restarted.duration == pytest.approx(2.0)
    assert (restarted.round, restarted.restart_count) == (2, 1)
    assert restarted.details["parts"] == pytest.approx(
        {"detected": 0.1, "told": 0.2, "stopped": 0.5, "reformed": 0.4, "started": 1.0}
    )
    assert restart_line(restarted) == (
        "running again after 2.00 s (detected 0.10, told 0.20, stopped 0.50, re-formed 0.40, started 1.00)"
    )


def test_a_failure_on_another_host_has_only_local_parts(job: RecordedJob) -> None:
    """This host can't know the detection time of the others; it measures only its own steps."""
    job.runs()
    job.update(10.0, Phase.JOINABLE)
    job.hears(10.5, core.GroupStopped())
    job.update(11.0, Phase.FROZEN, 2)
    job.update(11.5, Phase.FINAL, 2)
    job.told()
    job.started(12.0)
    parts = _details(job, "RESTARTED")["parts"]
    assert parts == pytest.approx({"stopped": 0.5, "reformed": 1.0, "started": 0.5})


def test_workers_that_had_succeeded_are_started_again_without_being_stopped(job: RecordedJob) -> None:
    """A worker of another host failed before the end of the run."""
    job.runs()
    for local_rank in (0, 1):
        job.ends(8.0, _exit(local_rank, 8.0))
    job.hears(8.0, core.GroupSucceeded())
    assert job.chronicle.group_state is GroupState.SUCCEEDED
    job.told()
    job.update(10.0, Phase.FROZEN, 2, restart_count=1)
    job.update(10.5, Phase.FINAL, 2, restart_count=1)
    job.started(11.0)
    assert _details(job, "RESTARTED")["parts"] == pytest.approx({"reformed": 0.5, "started": 0.5})


def test_a_round_that_falls_apart_before_it_starts_belongs_to_the_same_restart(job: RecordedJob) -> None:
    """Users wait until workers run, with any number of rounds before that."""
    job.runs()
    job.fails(10.0, _exit(0, 10.0, 1))
    job.update(10.0, Phase.FROZEN, 2)
    job.hears(10.5, core.GroupStopped())
    job.update(11.0, Phase.JOINABLE)  # another node was lost
    job.update(15.0, Phase.FROZEN, 3)
    job.update(16.0, Phase.FINAL, 3)
    job.started(16.5)
    (restarted,) = [each for each in job.events if each.name == "RESTARTED"]
    assert restarted.duration == pytest.approx(6.5)
    assert restarted.details["parts"]["reformed"] == pytest.approx(5.5)
    assert restarted.details["parts"]["stopped"] == pytest.approx(0.5)


def test_a_round_that_ends_while_its_workers_are_started(job: RecordedJob) -> None:
    """The workers are stopped, which adds to the restart; it ends only with a complete start."""
    job.runs()
    job.fails(10.0, _exit(0, 10.0, 1))
    job.hears(11.0, core.GroupStopped())
    job.update(11.0, Phase.FROZEN, 2)
    job.update(12.0, Phase.FINAL, 2)
    job.update(12.2, Phase.JOINABLE)
    job.started(12.3)
    assert job.chronicle.group_state is not GroupState.HEALTHY
    job.hears(12.7, core.GroupStopped())
    job.update(13.0, Phase.FROZEN, 3)
    job.update(13.0, Phase.FINAL, 3)
    job.started(14.0)
    (restarted,) = [each for each in job.events if each.name == "RESTARTED"]
    assert restarted.duration == pytest.approx(4.0)
    assert restarted.details["parts"]["stopped"] == pytest.approx(1.5)


def test_a_spare_does_not_wait_for_a_restart(job: RecordedJob) -> None:
    """Its hours as a spare count neither for the round nor for a restart."""
    job.update(1.0, Phase.FINAL)  # it came when the round was full
    job.update(5000.0, Phase.JOINABLE)
    job.update(5000.5, Phase.FROZEN, 2)
    job.update(5001.0, Phase.FINAL, 2)
    assert ("RENDEZVOUS", 1.0) in job.told()
    job.started(5001.5)
    assert job.told("RESTARTED") == []


def test_a_node_that_becomes_a_spare_is_not_restarting(job: RecordedJob) -> None:
    """The others went on without it."""
    job.runs()
    job.update(10.0, Phase.JOINABLE)
    job.hears(10.5, core.GroupStopped())
    job.update(11.0, Phase.FINAL)
    job.update(5000.0, Phase.FROZEN, 3)
    job.update(5000.5, Phase.FINAL, 3)
    job.told()
    job.started(5001.0)
    assert job.told("RESTARTED") == []


def test_a_worker_that_ends_before_the_start_of_its_neighbours_has_started_once(job: RecordedJob) -> None:
    """Its end may be known first; its start is still reported, before the end."""
    job.update(1.0, Phase.JOINABLE)
    job.update(2.0, Phase.FROZEN, 1)
    job.update(3.0, Phase.FINAL, 1)
    job.told()
    job.ends(3.1, _exit(1, 3.1))
    job.started(3.5)
    assert job.told("START", "SUCCEEDED") == [
        ("START", pytest.approx(0.1)),
        ("SUCCEEDED", 0.0),
        ("START", 0.5),
    ]


def test_a_worker_that_never_ran_has_failed_without_a_duration(job: RecordedJob) -> None:
    """There is no program, or no process can be made."""
    job.runs()
    at = Timestamp(5.0, EPOCH + 5)
    (event,) = job.chronicle.worker_lost(1, 1, 0, "there is no program", at, kind="not_started")
    assert (event.name, event.duration, event.details["kind"]) == ("FAILED", None, "not_started")
    (event,) = job.chronicle.worker_lost(1, 1, 77, "it outlived SIGKILL", at, kind="hung")
    assert (event.details["pid"], event.details["kind"]) == (77, "hung")


@pytest.mark.parametrize(
    ("exit_code", "name", "standing"),
    [
        (0, "SUCCEEDED", GroupState.SUCCEEDED),
        (1, "FAILED", GroupState.FAILED),
        (93, "FAILED", GroupState.FAILED),
        (143, "TERMINATED", GroupState.STOPPED),
    ],
)
def test_the_end_of_a_job_has_its_total_duration(
    job: RecordedJob, exit_code: int, name: str, standing: GroupState
) -> None:
    """A stopped job has neither succeeded nor failed."""
    job.runs()
    job.told()
    job.events = job.chronicle.ended(exit_code, "so it ended", Timestamp(60.0, EPOCH + 60))
    assert job.chronicle.group_state is standing
    last = job.events[-1]
    assert (last.source, last.name, last.duration) == (Source.AGENT, name, 60.0)
    assert last.details == {"exit_code": exit_code, "reason": "so it ended"}


def test_a_drained_host_records_one_event(job: RecordedJob) -> None:
    """Its workers run on for a while; a second request adds no event."""
    job.runs()
    job.told()
    job.hears(10.0, core.DrainRequested("drained: maintenance"))
    (event,) = [each for each in job.events if each.name == "DRAINING"]
    assert event.details == {"reason": "drained: maintenance"}
    job.hears(11.0, core.DrainRequested("drained: once more"))
    assert job.told("DRAINING") == [("DRAINING", None)]


def test_the_duration_of_a_health_check_is_recorded(job: RecordedJob) -> None:
    """The check delays a restart, so it must be visible in the events."""
    job.state = core.AgentState(checks=True)
    job.update(1.0, Phase.FROZEN, 1)
    job.hears(1.75, core.HealthChecked())
    assert ("EXAMINED", 0.75) in job.told()


@pytest.mark.parametrize("leaving", [core.StopRequested("got SIGTERM"), core.NodeUnhealthy("disk is full")])
def test_a_node_that_leaves_is_not_restarting(job: RecordedJob, leaving: core.Event) -> None:
    """Its workers are stopped, and not started again."""
    job.runs()
    job.hears(10.0, leaving)
    job.hears(10.5, core.GroupStopped())
    assert job.told("STOPPED", "RESTARTED") == []
    assert job.chronicle.group_state is GroupState.STOPPED


def test_a_watchdog_event_has_the_duration_of_the_previous_state(job: RecordedJob) -> None:
    """The first event counts from the start of the job."""
    told = [
        job.chronicle.watchdog(up, "the timer service does not answer" * (not up), Timestamp(at, EPOCH + at))
        for at, up in ((1.5, True), (10.0, False), (12.0, True))
    ]
    assert [(each.name, each.duration) for each in told] == [
        ("WATCHDOG", 1.5),
        ("WATCHDOG", 8.5),
        ("WATCHDOG", 2.0),
    ]
    assert [dict(each.details) for each in told] == [
        {"up": True},
        {"up": False, "reason": "the timer service does not answer"},
        {"up": True},
    ]
