"""SupervisorService reports the state of this host's jobs as it changes, and stops, drains or restarts them."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc
import pytest

from agent.fake_job import FakeJob, as_job, config, ended, running, worker_group
from rallypoint.agent.core.core import AgentState, Workers
from rallypoint.agent.job.result import JobResult
from rallypoint.agent.supervisor import servicer
from rallypoint.agent.supervisor.jobs import Jobs
from rallypoint.agent.supervisor.servicer import Launch, supervisor_registration
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.serving.server import Server
from support.refusals import refusal
from support.waiting import PATIENCE, until


class Agent:
    """An agent that serves, and may have jobs."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def serve(self, *jobs: FakeJob, launch: Launch | None = None) -> pb_grpc.SupervisorServiceAsyncStub:
        """Serve; return a stub."""
        registration = supervisor_registration(Jobs(*map(as_job, jobs)), launch)
        server = Server(ServerOptions(), services=[registration])
        await server.start()
        self._stack.push_async_callback(server.stop)
        channel = await self._stack.enter_async_context(open_channel(server.address))
        return pb_grpc.SupervisorServiceStub(channel)


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    """An agent that ends with the test."""
    async with AsyncExitStack() as stack:
        yield Agent(stack)


async def next_state(states: Any) -> pb.Job:
    """Return the next state in the stream."""
    response = await states.read()
    assert isinstance(response, pb.WatchJobResponse)
    return response.job


def named(run_id: str) -> FakeJob:
    """A job of a run."""
    return FakeJob(config=config(run_id))


async def test_jobs_are_returned_by_name_or_as_a_list(agent: Agent) -> None:
    """A single job has its workers, a list of jobs has none."""
    first = FakeJob(config=config("run-1"), group=worker_group(), workers=[running(0)])
    stub = await agent.serve(first, named("run-2"))
    job = (await stub.GetJob(pb.GetJobRequest(run_id="run-1"))).job
    assert (job.run_id, len(job.workers)) == ("run-1", 1)
    jobs = (await stub.ListJobs(pb.ListJobsRequest())).jobs
    assert [(job.run_id, len(job.workers)) for job in jobs] == [("run-2", 0), ("run-1", 0)]


async def test_jobs_and_workers_come_a_page_at_a_time(agent: Agent) -> None:
    """The latest job comes first, workers by local rank; a token belongs to the page before."""
    workers = [running(rank) for rank in range(5)]
    stub = await agent.serve(named("run-1"), named("run-2"), FakeJob(config=config("run-3"), workers=workers))
    jobs, of_jobs = [], pb.ListJobsRequest(page_size=2)
    while True:
        page = await stub.ListJobs(of_jobs)
        jobs.append([job.run_id for job in page.jobs])
        of_jobs.page_token = page.next_page_token
        if not of_jobs.page_token:
            break
    assert jobs == [["run-3", "run-2"], ["run-1"]]
    ranks, of_workers = [], pb.ListWorkersRequest(run_id="run-3", page_size=3)
    while True:
        part = await stub.ListWorkers(of_workers)
        ranks.append([worker.local_rank for worker in part.workers])
        of_workers.page_token = part.next_page_token
        if not of_workers.page_token:
            break
    assert ranks == [[0, 1, 2], [3, 4]]
    for request in (pb.ListJobsRequest(page_size=-1), pb.ListJobsRequest(page_token="2")):  # noqa: S106
        assert (await refusal(stub.ListJobs(request))).reason == "INVALID_ARGUMENT"


async def test_a_worker_is_named_by_its_rank_and_its_process(agent: Agent) -> None:
    """A missing rank does not mean rank 0, and a request for a replaced process is refused."""
    state = AgentState(workers=Workers.RUNNING)
    stub = await agent.serve(FakeJob(group=worker_group(), state=state, workers=[running(0)]))
    error = await refusal(stub.ReapWorker(pb.ReapWorkerRequest()))
    assert error.field_violations[0][0] == "rank"
    bad = {"reason": "a\nb", "run_id": "x" * 257}
    for call, fields in (
        (stub.ReapWorker(pb.ReapWorkerRequest(**bad)), "reason run_id rank"),  # type: ignore[arg-type]
        (stub.StopJob(pb.StopJobRequest(**bad)), "reason run_id"),  # type: ignore[arg-type]
        (stub.Drain(pb.DrainRequest(**bad, grace={"seconds": -1})), "reason run_id grace"),  # type: ignore[arg-type]
    ):
        refused = await refusal(call)
        assert " ".join(field for field, _ in refused.field_violations) == fields
    error = await refusal(stub.ReapWorker(pb.ReapWorkerRequest(rank=running(0).rank, pid=10**6)))
    assert (error.reason, error.metadata) == ("WORKER_REPLACED", {"pid": str(running(0).pid)})


async def test_a_restart_of_another_round_is_refused(agent: Agent) -> None:
    """The workers of another round are not restarted."""
    group = worker_group()
    stub = await agent.serve(
        FakeJob(group=group, state=AgentState(workers=Workers.RUNNING), workers=[running(0)])
    )
    error = await refusal(stub.RestartWorkers(pb.RestartWorkersRequest(round=group.assignment.round + 1)))
    assert error.reason == "ROUND_OVER"
    assert error.metadata == {"current_round": str(group.assignment.round)}


async def test_a_watcher_gets_the_latest_state_until_the_end(agent: Agent) -> None:
    """First comes the current state, then each change; states that were replaced before they were sent are left out."""
    job = FakeJob()
    stub = await agent.serve(job)
    states = stub.WatchJob(pb.WatchJobRequest(), timeout=PATIENCE)
    assert (await next_state(states)).state == pb.JOB_STATE_WAITING
    for restarts in range(100):
        job.state = AgentState(workers=Workers.RUNNING, started=1, restart_count=restarts)
        job.changed.notify()
    told = await next_state(states)
    assert (told.state, told.restart_count) == (pb.JOB_STATE_RUNNING, 99)
    job.changed.notify()  # nothing visible
    await stub.GetJob(pb.GetJobRequest())  # by now the watcher has run, and would have sent a state
    job.end(JobResult(0, "done"))
    assert (await next_state(states)).state == pb.JOB_STATE_ENDED
    assert await states.read() is grpc.aio.EOF


async def test_watching_a_job_that_ended_ends_at_once(agent: Agent) -> None:
    """The stream has one state."""
    job = FakeJob()
    job.end(JobResult(1, "failed"))
    stub = await agent.serve(job)
    states = [response.job async for response in stub.WatchJob(pb.WatchJobRequest(), timeout=PATIENCE)]
    assert [(each.state, each.exit_code) for each in states] == [(pb.JOB_STATE_ENDED, 1)]


async def test_streams_are_bounded_and_given_back(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients above the limit are asked to retry later; a client that leaves makes room."""
    monkeypatch.setattr(servicer, "MOST_STREAMS", 1)
    stub = await agent.serve(FakeJob())
    first = stub.WatchJob(pb.WatchJobRequest())
    await first.read()
    error = await refusal(stub.WatchJob(pb.WatchJobRequest(), timeout=PATIENCE).read())
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS")
    assert error.retry_after
    first.cancel()
    told: object = None
    async with asyncio.timeout(PATIENCE):
        # The agent notices the end of the first stream later.
        while not isinstance(told, pb.WatchJobResponse):
            with suppress(grpc.aio.AioRpcError):
                told = await stub.WatchJob(pb.WatchJobRequest(), timeout=PATIENCE).read()


async def test_readers_of_logs_leave_an_agent_the_files_that_it_needs_itself(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without free descriptors it could start no worker: readers get half of the system's limit."""
    job = FakeJob(config=config(workers=16))
    stub = await agent.serve(job)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (128, 4096))
    everything = pb.StreamLogsRequest(follow=True)
    streams = [stub.StreamLogs(everything), stub.StreamLogs(everything)]
    await until(lambda: len(job.changed._watchers) == 2, "the streams")
    one_stream = pb.StreamLogsRequest(follow=True, stream=pb.LOG_STREAM_STDERR)
    error = await refusal(stub.StreamLogs(one_stream, timeout=PATIENCE).read())
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS")
    assert "keep 64 log files open, and 16 more would be above 64, half of" in error.message
    assert error.retry_after
    await stub.WatchJob(pb.WatchJobRequest(), timeout=PATIENCE).read()  # needs no file
    for stream in streams:
        stream.cancel()


async def test_workers_are_listed_with_their_progress(agent: Agent) -> None:
    """Progress is present where workers reported it; ended workers have their exit code."""
    job = FakeJob(
        group=worker_group(), workers=[running(0, pid=2**22 + 1), running(1, pid=2**22 + 2), ended(2, code=3)]
    )
    stub = await agent.serve(job)
    answer = await stub.ListWorkers(pb.ListWorkersRequest())
    assert answer.round == 3
    assert [worker.HasField("progress") for worker in answer.workers] == [True, False, False]
    assert answer.workers[2].exit_code == 3


async def test_a_job_is_stopped_once(agent: Agent) -> None:
    """The reason is passed on; a second request would kill the workers, so that needs a field of its own."""
    job = FakeJob()
    stub = await agent.serve(job)
    await stub.StopJob(pb.StopJobRequest(reason="maintenance"))
    await stub.StopJob(pb.StopJobRequest(reason="maintenance"))
    assert job.asked == [("stopped through SupervisorService: maintenance", False)]
    await stub.StopJob(pb.StopJobRequest(now=True))
    assert job.asked[1:] == [("stopped through SupervisorService: no reason given", True)]


async def test_all_jobs_that_stay_can_be_drained_at_once(agent: Agent) -> None:
    """The whole host is drained; the grace period is passed on if there is one."""
    jobs = [named("run-1"), named("run-2"), FakeJob(config=config("run-3"), stopping=True), named("run-4")]
    jobs[3].end(JobResult(0, "done"))
    stub = await agent.serve(*jobs)
    answer = await stub.Drain(pb.DrainRequest(reason="power cut", all_jobs=True))
    assert answer.run_ids == ["run-1", "run-2"]
    assert [job.asked for job in jobs] == [[(None, "power cut")], [(None, "power cut")], [], []]
    request = pb.DrainRequest(run_id="run-2")
    request.grace.FromSeconds(5)
    assert (await stub.Drain(request)).run_ids == ["run-2"]
    assert jobs[1].asked[1:] == [(5.0, "no reason given")]
    for run_id in ("run-3", "run-4"):
        error = await refusal(stub.Drain(pb.DrainRequest(run_id=run_id)))
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "JOB_ENDED")
    request.grace.FromSeconds(-1)
    assert (await refusal(stub.Drain(request))).field_violations[0][0] == "grace"
    both = await refusal(stub.Drain(pb.DrainRequest(run_id="run-1", all_jobs=True)))
    assert both.field_violations[0][0] == "run_id"
    assert (await refusal(stub.Drain(pb.DrainRequest()))).reason == "WHICH_JOB"


@pytest.mark.parametrize("reason", ["x" * 1025, "two\nlines", "\x1b[2J"])
async def test_a_reason_must_fit_a_line(agent: Agent, reason: str) -> None:
    """It ends up in logs and on terminals."""
    job = FakeJob()
    stub = await agent.serve(job)
    for call in (
        stub.StopJob(pb.StopJobRequest(reason=reason)),
        stub.RestartWorkers(pb.RestartWorkersRequest(reason=reason)),
        stub.ReapWorker(pb.ReapWorkerRequest(reason=reason)),
        stub.Drain(pb.DrainRequest(reason=reason)),
    ):
        assert (await refusal(call)).field_violations[0][0] == "reason"
    assert job.asked == []


def questions(stub: pb_grpc.SupervisorServiceAsyncStub, run_id: str = "") -> dict[str, Awaitable[Any]]:
    """Call every method about a job."""
    return {
        "GetJob": stub.GetJob(pb.GetJobRequest(run_id=run_id)),
        "WatchJob": stub.WatchJob(pb.WatchJobRequest(run_id=run_id)).read(),
        "ListWorkers": stub.ListWorkers(pb.ListWorkersRequest(run_id=run_id)),
        "StreamLogs": stub.StreamLogs(pb.StreamLogsRequest(run_id=run_id)).read(),
        "StopJob": stub.StopJob(pb.StopJobRequest(run_id=run_id)),
        "RestartWorkers": stub.RestartWorkers(pb.RestartWorkersRequest(run_id=run_id)),
        "ReapWorker": stub.ReapWorker(pb.ReapWorkerRequest(run_id=run_id, rank=4)),
        "DumpStacks": stub.DumpStacks(pb.DumpStacksRequest(run_id=run_id)),
    }


async def test_an_agent_without_a_job_returns_an_error(agent: Agent) -> None:
    """A daemon before its first job is an example; every method returns the error."""
    for method, call in questions(await agent.serve()).items():
        error = await refusal(call)
        assert (method, error.code, error.reason) == (method, grpc.StatusCode.NOT_FOUND, "NO_JOB")


async def test_a_name_that_no_run_can_have_is_refused(agent: Agent) -> None:
    """Otherwise it would appear unchanged in logs."""
    for method, call in questions(await agent.serve(FakeJob()), "a\nb").items():
        error = await refusal(call)
        assert (method, error.reason) == (method, "INVALID_ARGUMENT")
        assert error.field_violations[0][0] == "run_id"


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (FakeJob(), "JOB_NOT_RUNNING"),
        (FakeJob(group=worker_group(), state=AgentState(workers=Workers.STOPPING)), "JOB_NOT_RUNNING"),
        (FakeJob(result=JobResult(0, "done")), "JOB_ENDED"),
    ],
)
async def test_workers_that_do_not_run_are_not_touched(agent: Agent, job: FakeJob, reason: str) -> None:
    """They are not restarted, killed or diagnosed."""
    calls = questions(await agent.serve(job))
    for method in ("RestartWorkers", "ReapWorker", "DumpStacks"):
        error = await refusal(calls.pop(method))
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
    await asyncio.gather(*calls.values(), return_exceptions=True)


async def test_a_worker_of_another_host_is_not_found(agent: Agent) -> None:
    """The error lists the ranks of this host."""
    state = AgentState(workers=Workers.RUNNING)
    stub = await agent.serve(FakeJob(group=worker_group(), state=state, workers=[running(0), running(1)]))
    for call in (
        stub.ReapWorker(pb.ReapWorkerRequest(rank=3)),
        stub.DumpStacks(pb.DumpStacksRequest(ranks=[4, 3])),
        stub.StreamLogs(pb.StreamLogsRequest(ranks=[3])).read(),
    ):
        error = await refusal(call)
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "NO_WORKER")
        assert error.metadata == {"ranks": "[4,5]"}


async def test_an_agent_of_one_job_takes_no_other(agent: Agent) -> None:
    """`rallypoint run` runs only its own job."""
    stub = await agent.serve()
    assert (await refusal(stub.LaunchJob(pb.LaunchJobRequest()))).reason == "NOT_A_DAEMON"


async def test_a_daemon_is_given_the_launch_as_it_was_sent(agent: Agent) -> None:
    """Its reply is sent back."""
    taken: list[pb.LaunchJobRequest] = []

    async def launch(request: pb.LaunchJobRequest) -> pb.LaunchJobResponse:
        taken.append(request)
        return pb.LaunchJobResponse(node_id="node-7", rendezvous_endpoint="a:1")

    stub = await agent.serve(launch=launch)
    request = pb.LaunchJobRequest(spec=pb.JobSpec(run_id="run-1", command=["true"]), launch_id="launch-1")
    answer = await stub.LaunchJob(request)
    assert (answer.node_id, answer.rendezvous_endpoint) == ("node-7", "a:1")
    assert taken == [request]
