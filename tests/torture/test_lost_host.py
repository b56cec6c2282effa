"""A host is lost with its workers, and their peers fail: no restart is counted, and only the lost host is reported."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.marks import slow
from torture.length import FULL_LENGTH, ordinarily
from torture.lost_hosts import PATIENCE, HostedJob, Plan, Way, hosted_job

pytestmark = pytest.mark.integration

REPEATS = ordinarily(1, in_full=20)
LAST_CALL = 3.0
GRACE = 2.0  # of a node whose connection broke; the default, as all settings here except the last call
LEASE = 15.0  # of a node that sends nothing
# Allowed extra time, on a machine with no other load: survivors stop their workers meanwhile.
SLACK = 2.0

KINDS = ["sockets", pytest.param("gloo", marks=pytest.mark.torch)]
# The way to lose the host; the seconds after which workers of a silent peer fail, before its lease ends or after; and
# the number of allowed restarts.
SCENES = [
    pytest.param(Way.AGENT_KILLED, 30.0, 0, id="agent-killed"),
    slow(Way.TREE_KILLED, 30.0, 0, id="tree-killed"),
    pytest.param(Way.CUT, 30.0, 0, id="cut-unnoticed"),
    pytest.param(Way.CUT, 5.0, 0, id="cut-noticed"),
    pytest.param(Way.CUT, 5.0, 3, id="cut-noticed-budget"),
    pytest.param(Way.POWER_OFF, 30.0, 0, id="power-off-unnoticed"),
    pytest.param(Way.POWER_OFF, 5.0, 0, id="power-off-noticed"),
    pytest.param(Way.POWER_OFF, 5.0, 3, id="power-off-noticed-budget"),
]


@pytest.mark.timeout(REPEATS * 3 * PATIENCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("way", "timeout", "max_restarts"), SCENES)
async def test_the_others_go_on_without_a_restart(
    tmp_path: Path, kind: str, way: Way, timeout: float, max_restarts: int
) -> None:
    """This holds if none is allowed. Each host is lost in its turn, also that of rank 0."""
    if kind == "gloo":
        pytest.importorskip("torch")
    if way.is_silent and not FULL_LENGTH:
        pytest.skip("takes as long as a lease; it is played at full length")
    plan = Plan(
        hosts=("a", "b", "c"),
        nodes="2:3",
        kind=kind,
        timeout=timeout,
        workers=1,
        max_restarts=max_restarts,
        conf={"last_call_timeout": f"{LAST_CALL:g}"},
    )
    took = []
    for repeat in range(REPEATS):
        async with hosted_job(plan, tmp_path / str(repeat), parts=way.is_silent) as job:
            before = (await job.get_run()).round
            victim = by_rank(await job.get_run())[repeat % 3]
            # A round that failed at once re-forms with a node that is silent, and not known to be lost.
            took.append(await lose(job, victim, way, left=2, given_up=max_restarts > 0))
            assert await job.finish() == {host: 0 for host in plan.hosts if host != victim}, job.logs()
            await check(job, [victim], after=before, given_up=max_restarts > 0)
    report(
        f"{kind}, {max_restarts} restarts, timeout {timeout:g} s: {way.value}",
        took,
        (LEASE if way.is_silent else GRACE) + LAST_CALL,
    )


@pytest.mark.slow
@pytest.mark.timeout(REPEATS * 6 * PATIENCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "way", [Way.AGENT_KILLED, Way.TREE_KILLED, Way.POWER_OFF], ids=lambda way: way.name.lower()
)
async def test_no_healthy_node_is_taken_out_for_the_loss_of_others(
    tmp_path: Path, kind: str, way: Way
) -> None:
    """Three hosts are lost one after the other, more than the allowed failures of a node; two had a spare."""
    if kind == "gloo":
        pytest.importorskip("torch")
    if not FULL_LENGTH and (way is not Way.TREE_KILLED or kind == "gloo"):
        pytest.skip("takes a minute; it is played at full length")
    plan = Plan(
        hosts=("a", "b", "c", "d", "e"),
        nodes="2:3",
        kind=kind,
        timeout=5.0,
        workers=1,
        max_restarts=3,
        conf={"last_call_timeout": f"{LAST_CALL:g}", "max_restarts_per_node": "2"},
    )
    shrinking: list[float] = []
    replacing: list[float] = []
    for repeat in range(ordinarily(1, in_full=7)):
        async with hosted_job(plan, tmp_path / str(repeat), parts=way.is_silent) as job:
            await job.wait_for_spares(2)
            before = (await job.get_run()).round
            stays = set(by_rank(await job.get_run())[:2])
            for left in (3, 3, 2):
                victim = next(name for name in by_rank(await job.get_run()) if name not in stays)
                (shrinking if left == 2 else replacing).append(
                    await lose(job, victim, way, left=left, given_up=True)
                )
            assert await job.finish() == dict.fromkeys(sorted(stays), 0), job.logs()
            await check(job, job.lost, after=before, given_up=True)
    least = LEASE if way.is_silent else GRACE
    report(f"{kind}: {way.value}, with a spare", replacing, least)
    report(f"{kind}: {way.value}, no spare left", shrinking, least + LAST_CALL)


@pytest.mark.timeout(ordinarily(1, in_full=5) * 3 * PATIENCE)
@pytest.mark.parametrize("killed", [False, True], ids=["paused", "restarted"])
async def test_a_host_that_is_lost_while_the_service_is_away_costs_no_restart(
    tmp_path: Path, killed: bool
) -> None:
    """The service first receives the failures of its peers; about the lost node it may receive nothing more."""
    if not FULL_LENGTH:
        pytest.skip("takes as long as a lease; it is played at full length")
    plan = Plan(
        hosts=("a", "b", "c"),
        nodes="2:3",
        kind="sockets",
        timeout=30.0,
        workers=1,
        max_restarts=0,
        conf={"last_call_timeout": f"{LAST_CALL:g}"},
    )
    took = []
    for repeat in range(ordinarily(1, in_full=5)):
        async with hosted_job(plan, tmp_path / str(repeat)) as job:
            run = await job.get_run()
            victim = by_rank(run)[repeat % 3]
            if killed:
                await job.kill_service()
            else:
                job.pause_service()
            began = await job.lose(victim, Way.TREE_KILLED)
            # Long enough for the workers of the others to fail, and for their agents to find that they can't report it.
            await asyncio.sleep(4.0)
            if killed:
                await job.restart_service()
            else:
                job.resume_service()
            await job.full_round(2, run.round)
            took.append(time.time() - began)
            assert await job.finish() == {host: 0 for host in plan.hosts if host != victim}, job.logs()
            await check(job, [victim], after=run.round)
    what = "restarted" if killed else "paused"
    print(f"service {what} while a host was lost: two hosts in touch after {max(took):.1f} s at most")  # noqa: T201


def by_rank(run: pb.Run) -> list[str]:
    """Return the participants, by rank."""
    seated = [node for node in run.nodes if node.HasField("assignment")]
    return [node.node_id for node in sorted(seated, key=lambda node: node.assignment.group_rank)]


async def lose(job: HostedJob, victim: str, way: Way, *, left: int, given_up: bool = False) -> float:
    """Lose a host, and wait until the other workers are connected; return the seconds to the next FINAL round.

    `given_up`: a round that never runs may form meanwhile.
    """
    before = (await job.get_run()).round
    seen = len(job.watch.states.items)
    lost_at = await job.lose(victim, way)
    run = await job.full_round(left, before)
    final = next(
        state
        for state in job.watch.states.items[seen:]
        if state.run.round == run.round and state.run.phase == pb.PHASE_FINAL
    )
    met = await job.in_touch(run.round, left)
    assert {line["restart_count"] for line in met} == {0}, await job.story()
    assert run.round <= before + 1 + given_up, await job.story()
    return final.time - lost_at


async def check(job: HostedJob, victims: Sequence[str], *, after: int, given_up: bool = False) -> None:
    """Check that only the lost hosts are named, in the order of their loss, and no restart was counted."""
    run, story = await job.get_run(), await job.story()
    assert run.run_end.outcome == pb.OUTCOME_SUCCEEDED, story
    assert (run.restart_count, run.counted_restarts, list(run.evicted_node_ids)) == (0, 0, []), story
    events = await job.events()
    assert [each.node_id for each in events if each.kind == pb.EVENT_KIND_NODE_LOST] == list(victims), story
    rounds = [each for each in await job.rounds() if each.number >= after]
    if given_up:
        rounds = [each for each in rounds if each.final]
    else:
        assert [each.number for each in rounds] == list(range(after, after + len(victims) + 1)), story
    ended = [(each.cause, each.node_id, each.restarts) for each in rounds[:-1]]
    assert ended == [("NODE_LOST", victim, 0) for victim in victims], story
    assert all(each.final for each in rounds), story


def report(what: str, took: Sequence[float], least: float) -> None:
    """Print the times until workers ran again, and check them at full length."""
    print(  # noqa: T201
        f"{what}, {len(took)} times: the next round ran after {statistics.median(took):.2f} s (median), "
        f"{max(took):.2f} s at most; grace or lease, and last call: {least:g} s"
    )
    assert not FULL_LENGTH or max(took) <= least + SLACK
