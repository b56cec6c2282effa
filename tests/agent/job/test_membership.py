"""A node's requests are valid for the service, and its log states the reasons for a wait."""

from __future__ import annotations

import asyncio

import pytest

from agent.job.test_job import Bench
from agent.job.test_job import bench as bench  # noqa: PLC0414  # a fixture
from rallypoint.agent.core import core
from rallypoint.agent.job import rendezvous as membership_module
from rallypoint.agent.job.rendezvous import NodeMembership
from rallypoint.agent.job.sync import Background
from rallypoint.agent.workers.group import WorkerGroup
from rallypoint.agent.workers.processes import StopReport
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.channel import open_channel
from support.waiting import PATIENCE, until


async def test_a_host_with_a_long_reason_leaves_like_any_other(bench: Bench) -> None:
    """Its long reason is shortened, and not refused."""
    stays = bench.job("touch $1/up; sleep 600", "a", nodes=(1, 2))
    bench.start(stays)
    leaves = bench.job("sleep 600", "b", nodes=(1, 2))
    running = bench.start(leaves)
    await until(lambda: leaves.state.started > 0, "a round with it")
    leaves.drain(0.0, "x\n" * 1024)
    result = await asyncio.wait_for(running, PATIENCE)
    assert result.exit_code == 143
    await until(lambda: stays.state.started > leaves.state.started, "a round without it")
    assert (await bench.state()).last_round_end.detail.startswith("node b left: drained: x x x")


async def test_a_delayed_restart_is_in_the_log(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """An operator who finds a host without workers must be able to see the reason."""
    job = bench.job("exit 7", restarts=2)
    settings = job.config.settings
    assert isinstance(settings, pb.RunSettings)
    settings.restart_backoff.FromMilliseconds(300)
    await bench.run(job)
    held = [record.getMessage() for record in caplog.records if "restart delayed" in record.getMessage()]
    assert len(held) == 1
    assert "exited with code 7" in held[0]


async def test_a_membership_that_is_given_up_before_it_began_is_over_too(bench: Bench) -> None:
    """A job with two stop requests at its very start would wait for ever for the end of its membership."""
    told: list[core.Event] = []
    job = bench.job("exit 0")
    await job._groups.close(unfit=False)
    config = job.config
    async with open_channel(config.rendezvous.endpoint) as channel:
        membership = NodeMembership(config, channel, told.append)
        membership.join(Background(lambda error: None).begin)
        membership.abandon()
        await until(lambda: bool(told), "the end")
    assert told == [core.MembershipEnded()]


async def test_workers_are_not_stopped_before_the_run_knows_that_their_host_goes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of other hosts fail without their peers: if that is reported first, it uses up a restart."""
    monkeypatch.setattr(membership_module, "DEPARTURE_TIMEOUT", PATIENCE)
    job = bench.job("touch $1/up; sleep 600")
    running = bench.start(job)
    await bench.has("up")
    seen: list[str] = []
    say, stop = job._membership.depart, WorkerGroup.stop

    def depart_late(reason: str) -> None:
        def depart_now() -> None:
            seen.append("said")
            say(reason)

        asyncio.get_running_loop().call_later(0.3, depart_now)

    async def note_stop(group: WorkerGroup, number: int, timeout: float) -> StopReport:
        seen.append("stopped")
        return await stop(group, number, timeout)

    monkeypatch.setattr(job._membership, "depart", depart_late)
    monkeypatch.setattr(WorkerGroup, "stop", note_stop)
    job.request_stop("got SIGTERM")
    assert (await asyncio.wait_for(running, PATIENCE)).exit_code == 143
    assert seen[:2] == ["said", "stopped"]


@pytest.mark.parametrize("in_a_hurry", [False, True])
async def test_an_undelivered_departure_delays_a_host_only_briefly(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, in_a_hurry: bool
) -> None:
    """After a second request the job does not wait at all."""
    monkeypatch.setattr(membership_module, "DEPARTURE_TIMEOUT", 3600.0 if in_a_hurry else 0.1)
    job = bench.job("touch $1/up; sleep 600")
    running = bench.start(job)
    await bench.has("up")
    monkeypatch.setattr(job._membership, "depart", lambda reason: None)
    job.request_stop("got SIGTERM")
    if in_a_hurry:
        await until(lambda: job.state.leaving is not None, "the first request")
        job.request_stop("got SIGTERM again", at_once=True)
    assert (await asyncio.wait_for(running, PATIENCE)).exit_code == 143
