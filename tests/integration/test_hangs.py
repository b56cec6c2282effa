"""A hung worker dies soon after its deadline, for every kind of hang, before the others; its report has its stack."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration.scene import RUN, Scene, scene
from programs import Deaths
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.channel import open_channel
from rallypoint.timer.v1 import timer_service_pb2 as timer_pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as timer_grpc
from support.marks import slow
from support.refusals import refusal
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("hanging_worker.py")
AFTER = 0.5
# Seconds after its deadline by which a worker is dead, even on a very busy machine.
MOST_LATE = 15.0


@asynccontextmanager
async def hanging(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    *more: str,
    after: float = AFTER,
    max_restarts: int = 1,
) -> AsyncIterator[Scene]:
    """Run one host with two workers, the second of which hangs in round 1."""
    async with scene(folder, monkeypatch, nodes="1", max_restarts=max_restarts) as stage:
        command = (str(WORKER), str(folder), way, "1", str(after), *more)
        stage.job = replace(stage.job, command=command)
        yield stage


async def hangs(stage: Scene) -> Mapping[str, Any]:
    """Wait until the worker hangs; return the fields of its event."""
    (said,) = await stage.said("hanging", 1)
    return said


def hang_file(stage: Scene, local_rank: int = 1) -> str:
    """Return the agent's diagnostics of that worker in its first attempt."""
    (file,) = (stage.folder / "logs").glob(f"*/attempt_0/{local_rank}/hang.txt")
    return file.read_text()


async def reaped(stage: Scene, function: str) -> str:
    """Wait for the hung worker's end, and for the next round; return its diagnostics.

    The neighbour ends later, gracefully, because the round ends.
    """
    said = await hangs(stage)
    neighbour = next(line for line in await stage.said("started", 2) if line["rank"] == 0)
    neighbours_death = asyncio.create_task(Deaths([neighbour["pid"]]).all(PATIENCE))
    died = await Deaths([said["pid"]]).all(PATIENCE)
    late = died - (said["at"] + said["after"])
    text = hang_file(stage)
    print(f"dead {late * 1000:.0f} ms after its deadline, evidence included: {text.splitlines()[2]}")  # noqa: T201
    assert 0 <= late < MOST_LATE
    assert function in text
    assert await neighbours_death >= died
    assert [line["rank"] for line in await stage.said("told to stop", 1)] == [0]
    second = await stage.started(2, round_=2)
    assert [fields["rank"] for fields in second] == [0, 1]
    detail = (await stage.becomes("round 2", lambda run: run.round == 2)).last_round_end.detail
    assert "worker of rank 1 on node a failed: it did not leave 'step' within 0.5 s" in detail
    await stage.finish()
    return text


@pytest.mark.parametrize(
    ("way", "function", "state"),
    [
        slow("gil", "in sleep_with_the_gil", "it sleeps for a time it chose"),
        slow("regex", "in match_catastrophically", "it computes"),
        slow("lock", "in wait_in_a_lock", "it waits for a lock or another thread"),
        ("stop", "in stop_itself", "it was stopped by a signal"),
        slow("others", "in sleep_beside_others", "other threads compute while its main thread"),
    ],
)
async def test_a_hung_worker_dies_soon_and_its_report_has_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, function: str, state: str
) -> None:
    """It hangs in C with the GIL held, in a lock, stopped, or beside busy threads; the job continues and succeeds."""
    async with hanging(tmp_path, monkeypatch, way) as stage:
        await stage.start_agents("a")
        summary = (await reaped(stage, function)).splitlines()[2]
    # A busy machine may have given it little CPU time, so the summary may differ.
    assert state.split(" ", 1)[0] in summary
    assert re.search(rf"{state}|it computes at the moment|for a part of the time", summary)
    assert re.search(r"it used \d+\.\d s of processor time in the \d\.\d s since it began$", summary)


@pytest.mark.slow
async def test_the_report_of_a_run_that_ends_has_the_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no restart left, the report on the console has the stacks of the hung worker."""
    async with hanging(tmp_path, monkeypatch, "lock", max_restarts=0) as stage:
        (agent,) = await stage.start_agents("a")
        assert await agent.ended(PATIENCE) == 1
        report = agent.report
    reason = re.search(r"^  reason +(.+)$", report, re.MULTILINE)
    assert reason is not None
    assert re.fullmatch(r"it did not leave 'step' within 0\.5 s \(found \d+\.\d{3} s later\)", reason[1])
    assert re.search(
        r"^  rank 1, process \d+, hangs in 'step', which may take 0\.5 s: ", report, re.MULTILINE
    )
    assert re.search(r'^    File ".*hanging_worker\.py", line \d+ in wait_in_a_lock$', report, re.MULTILINE)
    assert re.search(r"^  All of it: .*/attempt_0/1/hang\.txt$", report, re.MULTILINE)


async def test_the_child_processes_of_a_hung_worker_die_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child in a session of its own dies too."""
    async with hanging(tmp_path, monkeypatch, "child") as stage:
        await stage.start_agents("a")
        (said,) = await stage.said("child", 1)
        childs_death = asyncio.create_task(Deaths([said["child"]]).all(PATIENCE))
        await reaped(stage, "in wait_for_a_child")
        await childs_death


@pytest.mark.slow
async def test_a_chosen_signal_comes_before_the_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that handles the signal can still report or save its state."""
    async with hanging(tmp_path, monkeypatch, "child", str(int(signal.SIGTERM))) as stage:
        await stage.start_agents("a")
        # The hung one first, by its timer's signal; its neighbour because the round ends. The order of lines is random.
        told = {line["rank"]: line["at"] for line in await stage.said("told to stop", 2)}
        assert told[1] < told[0]
        await stage.started(2, round_=2)
        await stage.finish()


@pytest.mark.slow
async def test_a_timer_that_only_reports_kills_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent collects the diagnostics, and the job continues."""
    async with hanging(tmp_path, monkeypatch, "others", "0") as stage:
        (agent,) = await stage.start_agents("a")
        said = await hangs(stage)
        told = await agent.log.first(
            "a word of it", lambda line: line.event == "a worker hangs; its timer does not kill it"
        )
        assert (told.fields["rank"], told.fields["pid"]) == (1, said["pid"])
        assert Path(told.fields["evidence"]).read_text() == hang_file(stage)  # noqa: ASYNC240
        assert "in sleep_beside_others" in hang_file(stage)
        job = await stage.cluster.get_job("a")
        assert [worker.pid for worker in job.workers][1] == said["pid"]
        run = await stage.cluster.get_run(RUN)
        assert (run.round, run.phase) == (1, pb.PHASE_FINAL)


async def test_a_stranger_sets_no_timer_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before nor after its agent subscribes; such a timer would get the worker killed as hung."""
    async with hanging(tmp_path, monkeypatch, "lock", "unguarded") as stage:
        await stage.cluster.start_timer()
        async with open_channel(stage.cluster.timer_endpoint) as channel:
            stub = timer_grpc.TimerServiceStub(channel)
            request = timer_pb.AcquireTimerRequest(run_id=RUN, node_id="a", worker_id="1@1", scope="step")
            request.after.FromMilliseconds(1)
            await stub.AcquireTimer(request, timeout=PATIENCE)
            await stage.start_agents("a")
            said = await hangs(stage)

            async with asyncio.timeout(PATIENCE):  # until the agent has subscribed
                while (await stub.ListTimers(timer_pb.ListTimersRequest())).timers:  # noqa: ASYNC110 (a remote state)
                    await asyncio.sleep(0.05)
            for lease in (None, 1, 2**63 - 1):
                request.lease = lease or 0
                if lease is None:
                    request.ClearField("lease")
                assert (
                    await refusal(stub.AcquireTimer(request, timeout=PATIENCE))
                ).reason == "LEASE_NOT_PROVEN"
        job = await stage.cluster.get_job("a")
        assert said["pid"] in {worker.pid for worker in job.workers}
        run = await stage.cluster.get_run(RUN)
        assert (run.round, run.phase) == (1, pb.PHASE_FINAL)
