"""Each relevant state change of a submitted job is reported once."""

from __future__ import annotations

from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.submission.output import JobStatusLines


def job(state: pb.JobState.ValueType, round_: int = 0, detail: str = "", **fields: int) -> pb.Job:
    """Return a state of the job on a host."""
    return pb.Job(state=state, round=round_, detail=detail, world_size=4, **fields)  # type: ignore[arg-type]


def test_a_change_that_all_hosts_report_is_written_once() -> None:
    """A state change that all hosts report is written once: here for two hosts with one failed worker."""
    story = JobStatusLines(max_restarts=3)
    waiting = job(pb.JOB_STATE_WAITING, detail="waits for a round of 2 nodes")
    first = job(pb.JOB_STATE_RUNNING, 1)
    stopping = job(pb.JOB_STATE_STOPPING, 1, "a worker failed")
    second = job(pb.JOB_STATE_RUNNING, 2, restart_count=1)
    third = job(pb.JOB_STATE_RUNNING, 3, restart_count=1)
    done = job(pb.JOB_STATE_ENDED, 3, "all 4 workers of round 3 succeeded")
    told = [
        sentence
        for state in (waiting, first, first, stopping, second, third, done)
        for label in ("a", "b")
        for sentence in story.update(label, state)
    ]
    assert told == [
        "a waits for a round of 2 nodes",
        "round 1 runs: 4 workers",
        "round 1 ends: a worker failed",
        "round 2 runs: 4 workers (restart 1 of 3)",
        "round 3 runs: 4 workers",
        "a has ended: all 4 workers of round 3 succeeded",
        "b has ended: all 4 workers of round 3 succeeded",
    ]


def test_a_job_that_waits_between_rounds_reports_the_reason() -> None:
    """A job with too few hosts for a round reports its reason to wait: an operator must add a host."""
    story = JobStatusLines(max_restarts=3)
    why = "waits for a round of 2 nodes; the previous round ended: node b left"
    states = [job(pb.JOB_STATE_RUNNING, 1), job(pb.JOB_STATE_WAITING, 1, why), job(pb.JOB_STATE_RUNNING, 2)]
    told = [sentence for state in states for label in ("a", "c") for sentence in story.update(label, state)]
    assert told == ["round 1 runs: 4 workers", f"a {why}", "round 2 runs: 4 workers"]
    assert list(story.update("late", states[1])) == []
    assert list(story.update("a", job(pb.JOB_STATE_WAITING, 2, why))) == [f"a {why}"]


def test_hosts_that_go_are_named() -> None:
    """Each host that leaves or is lost is named once, with the reason."""
    story = JobStatusLines(max_restarts=0)
    drained = job(pb.JOB_STATE_DRAINING, 1, "power cut")
    over = job(pb.JOB_STATE_ENDED, 1, "left the run", exit_code=143)
    told = [sentence for state in (drained, drained, over, over) for sentence in story.update("a", state)]
    told += [
        *story.lose("b", "it has not answered for 60 s"),
        *story.lose("b", "it has not answered for 60 s"),
    ]
    assert told == [
        "a is drained: power cut",
        "a has ended with exit code 143: left the run",
        "b is lost: it has not answered for 60 s",
    ]
