"""A job runs on all agents or on none, even if one refuses, a connection breaks, or the launch is cancelled."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.rpc.pace import Pace
from rallypoint.submission.launching import NotLaunched, launch_everywhere
from submission.fake_agents import agents, gone_agent, refusal
from support.waiting import PATIENCE, until

REQUEST = pb.LaunchJobRequest(spec=pb.JobSpec(run_id="run-1", command=["true"]), launch_id="launch-1")


async def at_once(_: float) -> None:
    """Sleep without delay."""
    await asyncio.sleep(0)


PACE = Pace(sleep=at_once)


async def test_all_agents_get_the_job() -> None:
    """All agents get the same request."""
    async with agents("a", "b") as (fakes, remotes):
        answers = await launch_everywhere(remotes, REQUEST, None)
        assert [answer.node_id for answer in answers] == ["a", "b"]
        assert [fake.launches for fake in fakes] == [[REQUEST], [REQUEST]]
        assert [fake.stops for fake in fakes] == [[], []]


async def test_if_one_refuses_the_others_stop() -> None:
    """The others stop at once; the error names the refusing agent and its reason, and its own job is not stopped."""
    async with agents("a", "b", "c") as (fakes, remotes):
        fakes[1].refusals.append(refusal("JOB_RUNNING"))
        fakes[1].job = pb.Job(run_id="run-1", launch_id="somebody else's", state=pb.JOB_STATE_RUNNING)
        with pytest.raises(NotLaunched) as caught:
            await launch_everywhere(remotes, REQUEST, None)
        assert f"agent {fakes[1].address} did not accept the job: the agent will not (JOB_RUNNING)" in str(
            caught.value
        )
        assert "this launch runs nowhere now" in str(caught.value)
        for fake in (fakes[0], fakes[2]):
            taken = fake.job is not None
            assert [(stop.run_id, stop.now) for stop in fake.stops] == [("run-1", True)] * taken
        assert fakes[1].stops == []


async def test_an_agent_that_is_not_there_is_tried_for_a_while() -> None:
    """An agent that may be starting is retried until the timeout; then the others get a stop request."""
    now = [0.0]

    async def passing(seconds: float) -> None:
        now[0] += max(seconds, 0.5)
        await asyncio.sleep(0)

    pace = Pace(clock=lambda: now[0], sleep=passing, draw=lambda: 1.0)
    async with agents("a", "b") as (fakes, remotes):
        busy = [refusal("TOO_MANY_REQUESTS", grpc.StatusCode.RESOURCE_EXHAUSTED) for _ in range(100)]
        for error in busy:
            error.retry_after = 0.1
        fakes[1].refusals = busy[:3]
        await launch_everywhere(remotes, REQUEST, None, timeout=10.0, pace=pace)
        assert len(fakes[1].launches) == 4
        fakes[1].refusals = busy
        with pytest.raises(NotLaunched, match="TOO_MANY_REQUESTS"):
            await launch_everywhere(remotes, REQUEST, None, timeout=10.0, pace=pace)
        assert fakes[0].stops[0].now


async def test_an_unreachable_agent_is_named_in_the_error() -> None:
    """An unreachable agent is named in the error, and the others get a stop request with its name."""
    now = [0.0]
    async with agents("a", "b") as (fakes, remotes):

        async def pass_when_launched(_: float) -> None:
            await until(lambda: all(fake.job for fake in fakes), "the job at the others")
            now[0] += 1.0

        pace = Pace(clock=lambda: now[0], sleep=pass_when_launched)
        async with gone_agent("gone") as gone:
            with pytest.raises(NotLaunched, match=f"agent {gone.endpoint} did not accept the job"):
                await launch_everywhere([*remotes, gone], REQUEST, None, timeout=1.0, pace=pace)
        assert [fake.stops[0].reason for fake in fakes] == ["gone did not accept it"] * 2


async def test_a_launch_that_is_broken_off_is_taken_back() -> None:
    """If a launch is cancelled (Ctrl-C) while an agent is still starting the job, all agents get a stop request."""
    async with agents("a", "b") as (fakes, remotes):
        fakes[1].launching = asyncio.Event()
        launching = asyncio.create_task(launch_everywhere(remotes, REQUEST, None))
        await until(lambda: all(fake.job is not None for fake in fakes), "both have the job")
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(launching, PATIENCE)
        assert [[stop.now for stop in fake.stops] for fake in fakes] == [[True], [True]]
