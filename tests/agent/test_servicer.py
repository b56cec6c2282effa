"""SupervisorService tells what the job on this host does, and makes it stop when asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from rallypoint.agent.core import AgentState, Phase, Workers
from rallypoint.agent.crew import Worker
from rallypoint.agent.job import Job
from rallypoint.agent.job_result import JobResult
from rallypoint.agent.servicer import Launch, supervisor_registration
from rallypoint.agent.spawn_protocol import WorkerExit
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.serving.channel import open_channel
from rallypoint.serving.errors import decode
from rallypoint.serving.server import Server
from rallypoint.serving.settings import ServerOptions


@dataclass
class FakeJob:
    """As much of a job as the service looks at."""

    state: AgentState = field(default_factory=AgentState)
    workers: list[Worker] = field(default_factory=list)
    result: JobResult | None = None
    log_dir: Path | None = None
    stopping: bool = False
    asked: list[str] = field(default_factory=list)
    config: Any = field(default_factory=lambda: SimpleNamespace(run_id="run-1", node_id="node-a"))

    def request_stop(self, detail: str) -> None:
        """Note the request."""
        self.asked.append(detail)
        self.stopping = True


class Agent:
    """An agent that serves, and may have a job."""

    def __init__(self, stack: AsyncExitStack) -> None:
        """No job yet."""
        self._stack = stack
        self.job: FakeJob | None = None

    async def serve(self, launch: Launch | None = None) -> pb_grpc.SupervisorServiceAsyncStub:
        """Serve; returns what to ask."""
        registration = supervisor_registration(lambda: cast(Job, self.job), launch)
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


def ended(rank: int, *, code: int | None = None, signal: int | None = None) -> Worker:
    """A worker that ended."""
    how = WorkerExit(rank, 70 + rank, exit_code=code, signal=signal, at=1.0, time=2.0)
    return Worker(rank, 4 + rank, 70 + rank, 1_800_000_000.5, how)


async def test_a_job_is_told_with_its_workers(agent: Agent) -> None:
    """Who runs, who ended and how, by local rank."""
    stub = await agent.serve()
    agent.job = FakeJob(
        state=AgentState(workers=Workers.RUNNING, phase=Phase.FINAL, started=3, restart_count=2),
        workers=[Worker(0, 4, 70, 1_800_000_000.5), ended(1, code=0), ended(2, code=3), ended(3, signal=9)],
        log_dir=Path("/logs/run-1_x"),
    )
    job = (await stub.GetJob(pb.GetJobRequest())).job
    assert (job.run_id, job.node_id, job.state) == ("run-1", "node-a", pb.JOB_STATE_RUNNING)
    assert (job.round, job.restart_count, job.log_dir) == (3, 2, "/logs/run-1_x")
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
    ("state", "result", "told"),
    [
        (AgentState(), None, pb.JOB_STATE_WAITING),
        (AgentState(workers=Workers.RUNNING, started=1), None, pb.JOB_STATE_RUNNING),
        (AgentState(workers=Workers.STOPPING, started=1), None, pb.JOB_STATE_STOPPING),
        (AgentState(started=2, succeeded=2), None, pb.JOB_STATE_WAITING_FOR_OTHERS),
        (AgentState(started=2, succeeded=1), None, pb.JOB_STATE_WAITING),
        (AgentState(finished=True), JobResult(1, "it failed"), pb.JOB_STATE_ENDED),
    ],
)
async def test_a_job_is_in_one_state(
    agent: Agent, state: AgentState, result: JobResult | None, told: pb.JobState.ValueType
) -> None:
    """The one that says what it waits for; how it ended, once it has."""
    stub = await agent.serve()
    agent.job = FakeJob(state=state, result=result)
    job = (await stub.GetJob(pb.GetJobRequest())).job
    assert job.state == told
    assert (job.exit_code, job.detail) == ((1, "it failed") if result else (0, ""))


async def test_a_job_is_stopped_once(agent: Agent) -> None:
    """With who asked, and why; a second request would kill its workers at once, which is not what is asked for."""
    stub = await agent.serve()
    agent.job = FakeJob()
    await stub.StopJob(pb.StopJobRequest(reason="maintenance"))
    await stub.StopJob(pb.StopJobRequest(reason="maintenance"))
    assert agent.job.asked == ["stopped through SupervisorService: maintenance"]
    agent.job = FakeJob()
    await stub.StopJob(pb.StopJobRequest())
    assert agent.job.asked == ["stopped through SupervisorService: no reason given"]


@pytest.mark.parametrize("reason", ["x" * 1025, "two\nlines", "\x1b[2J"])
async def test_a_reason_must_fit_a_line(agent: Agent, reason: str) -> None:
    """It ends up in logs and on terminals."""
    stub = await agent.serve()
    agent.job = FakeJob()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.StopJob(pb.StopJobRequest(reason=reason))
    assert decode(caught.value).field_violations[0][0] == "reason"
    assert agent.job.asked == []


async def test_an_agent_without_a_job_says_so(agent: Agent) -> None:
    """A daemon, before its first."""
    stub = await agent.serve()
    for call in (stub.GetJob(pb.GetJobRequest()), stub.StopJob(pb.StopJobRequest())):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert (caught.value.code(), decode(caught.value).reason) == (grpc.StatusCode.NOT_FOUND, "NO_JOB")


async def test_an_agent_of_one_job_takes_no_other(agent: Agent) -> None:
    """`rallypoint run` runs what it was started for."""
    stub = await agent.serve()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.LaunchJob(pb.LaunchJobRequest())
    assert decode(caught.value).reason == "NOT_A_DAEMON"


async def test_a_daemon_is_given_the_job_as_it_was_sent(agent: Agent) -> None:
    """And answers with the name of its node."""
    taken: list[pb.JobSpec] = []

    def launch(spec: pb.JobSpec) -> str:
        taken.append(spec)
        return "node-7"

    stub = await agent.serve(launch)
    spec = pb.JobSpec(run_id="run-1", command=["true"])
    assert (await stub.LaunchJob(pb.LaunchJobRequest(spec=spec))).node_id == "node-7"
    assert taken == [spec]
