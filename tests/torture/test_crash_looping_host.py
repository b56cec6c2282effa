"""A host's agent joins, dies, and is started again, over and over: the job of the others goes on.

The lost share of their time is computed for an hour of every schedule in
`tests/rendezvous/core/test_crash_looping_joiner.py`.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from ha.waiting import until
from local_cluster import Seen
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from torture.length import ordinarily
from torture.lost_hosts import PATIENCE, Plan, hosted_job

pytestmark = [pytest.mark.slow, pytest.mark.integration]

JOINER = "joiner"
PLAN = Plan(
    hosts=("a", "b"),
    later=(JOINER,),
    nodes="2:3",
    kind="sockets",
    timeout=30.0,
    workers=1,
    max_restarts=0,
    conf={"last_call_timeout": "2"},
)
SECONDS = ordinarily(6.0, in_full=600.0)
SECONDS_OF_RUNNING = ordinarily(15.0, in_full=600.0)
EVERY = ordinarily(2.0, in_full=10.0)  # seconds between two starts of the joiner


def share_of_running(states: list[Seen], began: float, ended: float) -> float:
    """Return the share of a period (Unix seconds) in which a round was FINAL."""
    ends = [state.time for state in states[1:]] + [ended]
    running = 0.0
    for state, end in zip(states, ends, strict=True):
        if state.run.phase == pb.PHASE_FINAL:
            running += max(0.0, min(ended, end) - max(began, state.time))
    return running / (ended - began)


@pytest.mark.timeout(6 * PATIENCE + 2 * SECONDS)
async def test_an_agent_that_is_killed_when_it_has_joined_stops_no_worker(tmp_path: Path) -> None:
    """Under the default policy, a newcomer that can't stay for some seconds is no reason to end a round."""
    async with hosted_job(PLAN, tmp_path / "job") as job:
        before = (await job.get_run()).round

        async def joined() -> str:
            return "" if job.has_joined(JOINER) else "it has not"

        began, lives = time.time(), 0
        while time.time() < began + SECONDS:
            lives += 1
            await job.start_agent(JOINER)
            await until("the joiner to join", joined, PATIENCE)
            await job.kill_agent(JOINER)
            await asyncio.sleep(max(0.0, began + lives * EVERY - time.time()))
        share = share_of_running(job.watch.states.items, began, time.time())
        print(f"{lives} lives of a joiner, killed once it had joined: the others ran for {share:.1%}")  # noqa: T201
        run = await job.get_run()
        assert (run.round, run.restart_count) == (before, 0), job.logs()
        assert share == 1.0
        assert await job.finish() == {"a": 0, "b": 0}, job.logs()


@pytest.mark.timeout(6 * PATIENCE + 2 * SECONDS_OF_RUNNING)
async def test_an_agent_that_is_killed_whenever_it_runs_is_let_in_less_and_less(tmp_path: Path) -> None:
    """Workers of the others fail with it each time: no restart is counted, and the run goes on."""
    async with hosted_job(PLAN, tmp_path / "job") as job:
        before = (await job.get_run()).round
        began, lives = time.time(), 0

        async def ran() -> str:
            job.check_survivors()
            runs = len(job.met(job.started_round(JOINER))) == 3
            return "" if runs or time.time() > began + SECONDS_OF_RUNNING else "it has not"

        while time.time() < began + SECONDS_OF_RUNNING:
            lives += 1
            await job.start_agent(JOINER)
            await until("the joiner to run", ran, PATIENCE + SECONDS_OF_RUNNING)
            await job.kill_agent(JOINER)
        share = share_of_running(job.watch.states.items, began, time.time())
        run = await job.full_round(2, before - 1)
        print(f"{lives} lives of a joiner, killed once it ran: the others ran for {share:.1%}")  # noqa: T201
        assert run.restart_count == 0, job.logs()
        assert await job.finish() == {"a": 0, "b": 0}, job.logs()
