"""Agents that a test controls, served like real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import grpc

from rallypoint.agent.supervisor.servicer import SERVICE_NAME
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.server import Registration, Server
from rallypoint.submission.following import RemoteAgent


class FakeAgent(pb_grpc.SupervisorServiceServicer):
    """An agent that accepts or refuses a job; it sends the states and the output that a test puts into its queues."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.address = ""
        self.launches: list[pb.LaunchJobRequest] = []
        self.stops: list[pb.StopJobRequest] = []
        self.log_requests: list[pb.StreamLogsRequest] = []
        self.refusals: list[ServiceError] = []
        self.launching: asyncio.Event | None = None
        self.job: pb.Job | None = None
        # The next items of the streams: a message, an error to end with, or None for the end.
        self.states: asyncio.Queue[pb.Job | ServiceError | None] = asyncio.Queue()
        self.output: asyncio.Queue[pb.StreamLogsResponse | ServiceError | None] = asyncio.Queue()

    async def LaunchJob(self, request: pb.LaunchJobRequest, context: Any) -> pb.LaunchJobResponse:
        """Accept the job, unless a refusal is set."""
        self.launches.append(request)
        if self.refusals:
            raise self.refusals.pop(0)
        self.job = pb.Job(run_id=request.spec.run_id, launch_id=request.launch_id, state=pb.JOB_STATE_WAITING)
        if self.launching is not None:
            await self.launching.wait()
        return pb.LaunchJobResponse(node_id=self.label, rendezvous_endpoint="rendezvous:1")

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        """Return the job, if there is one."""
        if self.job is None:
            raise ServiceError(grpc.StatusCode.NOT_FOUND, "NO_JOB", "no job")
        return pb.GetJobResponse(job=self.job)

    async def StopJob(self, request: pb.StopJobRequest, context: Any) -> pb.StopJobResponse:
        """Record the request."""
        self.stops.append(request)
        return pb.StopJobResponse()

    async def WatchJob(self, request: pb.WatchJobRequest, context: Any) -> None:  # type: ignore[override]
        """Send the states from the test."""
        while (job := await self.states.get()) is not None:
            if isinstance(job, ServiceError):
                raise job
            await context.write(pb.WatchJobResponse(job=job))

    async def StreamLogs(self, request: pb.StreamLogsRequest, context: Any) -> None:  # type: ignore[override]
        """Send the output from the test."""
        self.log_requests.append(request)
        while (piece := await self.output.get()) is not None:
            if isinstance(piece, ServiceError):
                raise piece
            await context.write(piece)


def refusal(reason: str, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION) -> ServiceError:
    """Return the error of an agent that refuses."""
    return ServiceError(code, reason, "the agent will not")


def piece(data: bytes, offset: int, *, rank: int = 0, stream: int = 1, attempt: int = 0) -> Any:
    """Return a piece of output that ends at an offset."""
    cursor = pb.LogCursor(local_rank=rank, stream=stream, attempt=attempt, offset=offset)  # type: ignore[arg-type]
    return pb.StreamLogsResponse(rank=rank, cursor=cursor, data=data)


def _fake(label: str) -> FakeAgent:
    # The missing methods are never called here.
    return FakeAgent(label)  # type: ignore[abstract]


@asynccontextmanager
async def gone_agent(label: str) -> AsyncIterator[RemoteAgent]:
    """Yield an agent whose server has stopped."""
    async with agents(label) as (_, (former,)):
        pass
    async with open_channel(former.endpoint) as channel:
        yield RemoteAgent(former.endpoint, label, pb_grpc.SupervisorServiceStub(channel))


@asynccontextmanager
async def agents(*names: str) -> AsyncIterator[tuple[list[FakeAgent], list[RemoteAgent]]]:
    """Yield agents that serve, and their clients."""
    async with AsyncExitStack() as stack:
        fakes, remotes = [_fake(name) for name in names], []
        for fake in fakes:
            add = partial(pb_grpc.add_SupervisorServiceServicer_to_server, fake)
            server = Server(ServerOptions(), services=[Registration(SERVICE_NAME, add)])
            await server.start()
            stack.push_async_callback(server.stop)
            fake.address = server.address
            channel = await stack.enter_async_context(open_channel(server.address))
            stub = pb_grpc.SupervisorServiceStub(channel)
            remotes.append(RemoteAgent(server.address, fake.label, stub))
        yield fakes, remotes
