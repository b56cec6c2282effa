"""The message of a job has one state, its reason, and the state of each worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.fake_job import LAUNCHED, VALUE_ERROR, FakeJob, as_job, ended, running, worker_group
from rallypoint.agent.core.core import AgentState, Workers
from rallypoint.agent.job.drain import DrainNotice
from rallypoint.agent.job.result import JobResult
from rallypoint.agent.supervisor.jobs import TakenJob, job_message, worker_message
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.workers.usage import Usage
from rallypoint.rendezvous.core.state import Phase


def told(job: FakeJob, launch_id: str = "") -> pb.Job:
    """The protocol message of the job."""
    return job_message(TakenJob(as_job(job), launch_id))


def test_the_message_of_a_job_has_its_workers() -> None:
    """It lists running and ended workers by local rank, with their exit codes; and its log folder and its run."""
    job = told(
        FakeJob(
            state=AgentState(workers=Workers.RUNNING, phase=Phase.FINAL, started=3, restart_count=2),
            group=worker_group(),
            workers=[running(0), ended(1, code=0), ended(2, code=3), ended(3, signal=9)],
            log_dir=Path("/logs/run-1_x"),
        ),
        "launch-1",
    )
    assert (job.run_id, job.node_id, job.state) == ("run-1", "node-a", pb.JOB_STATE_RUNNING)
    assert (job.round, job.world_size, job.restart_count, job.log_dir) == (3, 8, 2, "/logs/run-1_x")
    assert (job.rendezvous_endpoint, job.launch_id) == ("10.0.0.1:29400", "launch-1")
    assert job.start_time.ToMilliseconds() == 1_800_000_000_500
    assert not job.HasField("end_time")
    assert [(worker.local_rank, worker.rank, worker.pid) for worker in job.workers] == [
        (number, 4 + number, 70 + number) for number in range(4)
    ]
    assert [(worker.state, worker.exit_code) for worker in job.workers] == [
        (pb.WORKER_STATE_RUNNING, 0),
        (pb.WORKER_STATE_SUCCEEDED, 0),
        (pb.WORKER_STATE_FAILED, 3),
        (pb.WORKER_STATE_FAILED, -9),
    ]
    assert job.workers[0].start_time.ToMilliseconds() == 1_800_000_000_500


@pytest.mark.parametrize(
    ("state", "expected", "detail"),
    [
        (AgentState(), pb.JOB_STATE_WAITING, "waits for a round of 2 to 4 nodes"),
        (
            AgentState(started=2, succeeded=1, detail="node b was lost"),
            pb.JOB_STATE_WAITING,
            "waits for a round of 2 to 4 nodes; the previous round ended: node b was lost",
        ),
        (AgentState(workers=Workers.RUNNING, started=1), pb.JOB_STATE_RUNNING, ""),
        (AgentState(workers=Workers.STOPPING, started=1), pb.JOB_STATE_STOPPING, "a worker failed"),
        (AgentState(started=1, leaving="maintenance"), pb.JOB_STATE_STOPPING, "maintenance"),
        (
            AgentState(started=2, succeeded=2),
            pb.JOB_STATE_WAITING_FOR_OTHERS,
            "the workers here succeeded; those of other hosts have not all",
        ),
    ],
)
def test_a_job_is_in_one_state(state: AgentState, expected: pb.JobState.ValueType, detail: str) -> None:
    """The detail states the reason why the job waits or stops."""
    job = told(FakeJob(state=state, stop_reason="a worker failed"))
    assert (job.state, job.detail, job.exit_code) == (expected, detail, 0)


def test_a_drained_job_reports_its_deadline() -> None:
    """Clients that wait for the host see the deadline."""
    state = AgentState(workers=Workers.RUNNING, started=1)
    job = told(FakeJob(state=state, draining=DrainNotice("power cut", LAUNCHED + 90, 90.0)))
    assert (job.state, job.detail) == (pb.JOB_STATE_DRAINING, "power cut")
    assert job.drain_deadline.ToMilliseconds() == 1_800_000_090_500


def test_an_ended_job_reports_its_result() -> None:
    """It has the exit code, one sentence, and the report of the failure that ended the run."""
    ending = FakeJob(state=AgentState(workers=Workers.RUNNING))
    ending.end(JobResult(1, "rank 3 failed", VALUE_ERROR))
    job = told(ending)
    assert (job.state, job.exit_code, job.detail) == (pb.JOB_STATE_ENDED, 1, "rank 3 failed")
    assert job.end_time.ToMilliseconds() == 1_800_000_060_500
    assert "ValueError: bad" in job.failure_report
    assert "Traceback" in job.failure_report
    listed = job_message(TakenJob(as_job(ending)), whole=False)
    # A hundred reports would exceed the message limit.
    assert (listed.exit_code, listed.failure_report) == (1, "")


def test_the_usage_of_a_worker_is_reported_while_it_runs() -> None:
    """So is its progress; both are unknown for a worker that has ended."""
    usage = Usage(processor_seconds=12.5, processors=1.25, memory_bytes=4096, processes=3, threads=9)
    worker = worker_message(running(0), usage, (17, 2.5))
    assert worker.usage.processor_time.ToMilliseconds() == 12_500
    assert (worker.usage.processors, worker.usage.memory_bytes) == (1.25, 4096)
    assert (worker.usage.process_count, worker.usage.thread_count) == (3, 9)
    assert (worker.progress.step, worker.progress.idle.ToMilliseconds()) == (17, 2500)
    over = worker_message(ended(1, code=0), usage, (17, 2.5))
    assert not over.HasField("usage")
    assert not over.HasField("progress")


def test_a_job_without_a_watchdog_reports_the_reason() -> None:
    """Programs read the reason from its own field, people in the detail."""
    running_state = AgentState(workers=Workers.RUNNING, phase=Phase.FINAL, started=3)
    job = told(
        FakeJob(
            state=running_state, group=worker_group(), watchdog_trouble="the timer service does not answer"
        )
    )
    assert job.watchdog_trouble == "the timer service does not answer"
    assert job.detail == "no watchdog guards the workers: the timer service does not answer"
