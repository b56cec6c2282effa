"""Launch a job on the agents of all its hosts, or on none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.rpc.endpoint import ClientSecurity
from rallypoint.rpc.errors import ServiceError, decode
from rallypoint.rpc.loop import cancel_all
from rallypoint.rpc.pace import Pace
from rallypoint.rpc.text import one_line
from rallypoint.serving.requests import SENTENCE_BYTES
from rallypoint.submission.following import RemoteAgent, in_words, is_lost

LAUNCH_TIMEOUT = 20.0
"""Seconds in which every agent must accept the job: enough for starting agents, not for hosts that are down."""

TAKE_BACK_TIMEOUT = 10.0
"""Seconds in which agents must confirm that a cancelled job does not run."""


class NotLaunched(Exception):
    """An agent did not accept the job, so no agent runs it; one line with agent and reason."""


async def launch_everywhere(
    agents: Sequence[RemoteAgent],
    request: pb.LaunchJobRequest,
    security: ClientSecurity,
    *,
    timeout: float = LAUNCH_TIMEOUT,
    pace: Pace | None = None,
) -> list[pb.LaunchJobResponse]:
    """Launch a job on all agents; if one of them fails, stop the job on the others.

    Cancellation of this call stops the job as well.

    Args:
        request: The same for each; it must have a launch_id.
        security: How connections to the agents are secured, for advice in errors.
        timeout: Seconds for all launches.

    Raises:
        NotLaunched: An agent did not accept the job.
    """
    pace = pace or Pace()
    calls = [asyncio.create_task(_launch(agent, request, timeout, pace)) for agent in agents]
    try:
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        failed = [
            (agent, call.exception())
            for agent, call in zip(agents, calls, strict=True)
            if call.done() and call.exception() is not None
        ]
        if not failed:
            return [call.result() for call in calls]
    except asyncio.CancelledError:
        await cancel_all(calls)
        await take_back(agents, request, "its submission was interrupted")
        raise
    await cancel_all(calls)
    refused, error = failed[0]
    left = await take_back(agents, request, f"{refused.label} did not accept it")
    if not isinstance(error, ServiceError):
        raise error or AssertionError("a call that failed has an error")
    perhaps = f"; it may still run on {', '.join(left)}: check there" if left else ""
    raise NotLaunched(
        f"agent {refused.endpoint} did not accept the job: {in_words(error, security)}; "
        f"this launch runs nowhere now{perhaps}"
    )


async def take_back(agents: Sequence[RemoteAgent], request: pb.LaunchJobRequest, reason: str) -> list[str]:
    """Stop a launch's job at once on all agents; return the names of agents where it may still run."""
    stopped = await asyncio.gather(*(_take_back(agent, request, reason) for agent in agents))
    return [agent.label for agent, sure in zip(agents, stopped, strict=True) if not sure]


async def _launch(
    agent: RemoteAgent, request: pb.LaunchJobRequest, timeout: float, pace: Pace
) -> pb.LaunchJobResponse:
    deadline, backoff = pace.clock() + timeout, pace.backoff()
    while True:
        try:
            return await agent.stub.LaunchJob(request, timeout=max(0.1, deadline - pace.clock()))
        except grpc.aio.AioRpcError as rpc_error:
            error = decode(rpc_error)
        left = deadline - pace.clock()
        if not is_lost(error) or left <= 0:
            raise error
        await pace.sleep(min(left, (error.retry_after or 0.0) + backoff.next()))


async def _take_back(agent: RemoteAgent, request: pb.LaunchJobRequest, reason: str) -> bool:
    """Return True if the job of this launch does not run there now; another job of the run is not touched."""
    run_id = request.spec.run_id
    try:
        async with asyncio.timeout(TAKE_BACK_TIMEOUT):
            job = (await agent.stub.GetJob(pb.GetJobRequest(run_id=run_id))).job
            if job.launch_id == request.launch_id and job.state != pb.JOB_STATE_ENDED:
                reason = one_line(reason, SENTENCE_BYTES)
                await agent.stub.StopJob(pb.StopJobRequest(run_id=run_id, reason=reason, now=True))
    except grpc.aio.AioRpcError as rpc_error:
        error = decode(rpc_error)
        # An unreachable agent usually never had the job: it is the agent that did not accept it.
        return not is_lost(error) or error.code is grpc.StatusCode.UNAVAILABLE
    except TimeoutError:
        return False
    return True
