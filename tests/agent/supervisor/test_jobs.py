"""A request without a run ID applies to the only job it can mean, or is refused; the last ended jobs are kept."""

from __future__ import annotations

from dataclasses import fields

import pytest
from google.protobuf.message import Message

from agent.fake_job import FakeJob, as_job, config
from rallypoint.agent.job.result import JobResult
from rallypoint.agent.supervisor.jobs import MOST_ENDED, MOST_ENDED_BYTES, Jobs
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.rpc.errors import ServiceError


def job(run_id: str, *, over: bool = False) -> FakeJob:
    return FakeJob(config=config(run_id), result=JobResult(0, "done") if over else None)


def test_without_a_name_the_job_that_runs_is_meant_or_the_last() -> None:
    """A job that ended is not chosen while another runs, even if it was launched later."""
    first, second = job("run-1"), job("run-2", over=True)
    jobs = Jobs(as_job(first), as_job(second))
    assert jobs.find("").job is as_job(first)
    first.result = JobResult(0, "done")
    assert jobs.find("").job is as_job(second)


def test_with_several_running_jobs_a_run_id_is_required() -> None:
    """A guess could stop the wrong one."""
    jobs = Jobs(as_job(job("run-1")), as_job(job("run-2")), as_job(job("run-3", over=True)))
    with pytest.raises(ServiceError) as caught:
        jobs.find("")
    assert (caught.value.reason, caught.value.metadata) == ("WHICH_JOB", {"run_ids": '["run-1","run-2"]'})
    assert jobs.find("run-2").run_id == "run-2"
    assert jobs.find("run-3").run_id == "run-3"


def test_of_one_run_the_job_that_runs_is_meant_or_the_latest() -> None:
    """A run may be launched again under its name."""
    old, new = job("run-1", over=True), job("run-1")
    jobs = Jobs(as_job(old), as_job(new))
    assert jobs.find("run-1").job is as_job(new)


@pytest.mark.parametrize(
    ("run_id", "told"), [("", "has no job, running or ended"), ("run-7", "has no job of run 'run-7'")]
)
def test_a_missing_job_is_not_found(run_id: str, told: str) -> None:
    """The message states whether the agent has any job."""
    with pytest.raises(ServiceError, match=told) as caught:
        Jobs().find(run_id)
    assert caught.value.reason == "NO_JOB"


def test_the_last_jobs_that_ended_are_remembered_and_all_that_run() -> None:
    """An agent that lives for a year must not keep them all."""
    jobs = Jobs()
    jobs.add(as_job(job("early-bird")))
    for number in range(MOST_ENDED + 5):
        jobs.add(as_job(job(f"run-{number}", over=True)), pb.LaunchJobRequest(launch_id=f"launch-{number}"))
    names = [taken.run_id for taken in jobs.latest_first]
    assert names == [f"run-{number}" for number in range(MOST_ENDED + 4, 4, -1)] + ["early-bird"]
    assert jobs.launched("launch-4") is None
    taken = jobs.launched("launch-5")
    assert taken is not None
    assert taken.run_id == "run-5"
    # Their requests, of up to 4 MiB each, are dropped.
    assert not any(isinstance(getattr(taken, each.name), Message) for each in fields(taken))
    assert jobs.launched("") is None
    assert [each.config.run_id for each in jobs.running] == ["early-bird"]
    large = pb.LaunchJobRequest(spec=pb.JobSpec(command=["x" * (MOST_ENDED_BYTES // 2)]))
    for number in range(3):
        jobs.add(as_job(job(f"large-{number}", over=True)), large)
    assert [taken.run_id for taken in jobs.latest_first] == ["large-2", "early-bird"]
