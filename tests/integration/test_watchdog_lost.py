"""Workers have a watchdog, or its loss is visible everywhere; and a job may refuse to run without one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.cli_process import rallypoint, service
from integration.agents import Start, agents, ended
from integration.scene import RUN
from local_cluster import Job, LocalCluster
from support.ports import free_port
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("second_worker.py")
OBEDIENT = Path(__file__).with_name("obedient_worker.py")
# Seconds for which the worker of the second job hangs; then it would succeed, but it must be killed before.
HANGS = "40"
# Seconds without a watchdog after which a host leaves; agents connect faster, and the service restarts faster.
SOON, IN_TIME = 5.0, 20.0


@pytest.fixture
def port() -> int:
    """A free port; the next one is free too."""
    return free_port(2)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts an agent of a static job, with one worker."""
    with agents(tmp_path, "--log-format", "json", PET_RDZV_BACKEND="static") as start:
        yield start


def joined(said: str) -> tuple[int, str]:
    """Return the first lease of an agent, and its node id."""
    records = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    lease = next(int(record["lease"]) for record in records if record["event"] == "joined")
    node = next(str(record["node_id"]) for record in records if "node_id" in record)
    return lease, node


@pytest.mark.slow
def test_the_second_job_of_a_host_is_guarded(tmp_path: Path, start: Start, port: int) -> None:
    """A static rendezvous starts again with low lease numbers, while the timer service remembers higher ones."""
    with service("timer") as timers:
        common = [f"--timer-endpoint={timers}", f"--master-port={port}"]
        agents = [start(*common, "--nnodes=2", f"--node-rank={rank}", WORKER, tmp_path) for rank in (0, 1)]
        first = [ended(agent) for agent in agents]
        assert [code for code, _ in first] == [0, 0], first
        lease, node = max(joined(said) for _, said in first)
        second = start(*common, "--nnodes=1", f"--node-id={node}", WORKER, tmp_path, HANGS)
        code, said = ended(second)
        assert joined(said)[0] < lease
        assert (code, "did not leave 'step' within 0.5 s" in said) == (1, True)


def test_a_job_that_requires_a_watchdog_starts_no_worker_without(tmp_path: Path, port: int) -> None:
    """It waits for the timeout, and the error names the missing timer service."""
    result = rallypoint(
        *("run", "--standalone", "--require-watchdog", "--watchdog-timeout", "0.5"),
        *("--timer-endpoint", f"127.0.0.1:{port}", WORKER, tmp_path),
    )
    assert result.returncode == 3
    assert (
        "Error: this host is not fit to run workers: no watchdog has guarded its workers for 0.5 s, and the job "
        "requires one: the timer service does not answer"
    ) in result.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.slow
async def test_a_lost_watchdog_is_visible_in_status_job_state_and_events(tmp_path: Path) -> None:
    """The run's status, the agent's job state and its events show the loss, and the return."""
    events = tmp_path / "events"
    async with LocalCluster(tmp_path / "cluster") as cluster:
        await cluster.start_rendezvous()
        timer = await cluster.start_timer()
        cluster._environment["RALLYPOINT_EVENT_LOG_HANDLER"] = f"file:{events}"
        job = Job(RUN, (str(OBEDIENT), str(tmp_path), "wait"), workers=1, log_dir=tmp_path / "logs")
        agent = await cluster.start_agent("a", job)
        await until(
            lambda: events.exists() and "WATCHDOG" in events.read_text(), "the agent to have a watchdog"
        )

        async def shown(there: bool) -> None:
            needle = "no watchdog guards the workers of a: "
            async with asyncio.timeout(PATIENCE):
                while True:
                    status = await asyncio.to_thread(
                        rallypoint, "status", RUN, "--rdzv-endpoint", cluster.rendezvous_endpoint
                    )
                    trouble = (await cluster.get_job("a")).watchdog_trouble
                    if (needle in status.stdout, bool(trouble)) == (not there, not there):
                        break
            assert there or needle + trouble in status.stdout

        await timer.kill()
        await shown(there=False)
        await cluster.start_timer()
        await shown(there=True)
        (tmp_path / "finish").touch()
        assert await agent.ended(PATIENCE) == 0
    records = [json.loads(line) for line in events.read_text().splitlines()]
    told = [record for record in records if record["event"] == "WATCHDOG"]
    assert [record["up"] for record in told] == [True, False, True]
    assert told[1]["reason"]


def requires_a_watchdog(cluster: LocalCluster, folder: Path, timeout: float) -> Job:
    """Return a job whose worker waits for a signal or `finish`, on hosts that leave without a watchdog."""
    cluster._environment |= {
        "RALLYPOINT_REQUIRE_WATCHDOG": "1",
        "RALLYPOINT_WATCHDOG_TIMEOUT": f"{timeout:g}",
    }
    return Job(RUN, (str(OBEDIENT), str(folder), "wait"), workers=1, log_dir=folder / "logs")


async def test_a_host_that_lost_its_watchdog_leaves_a_job_that_requires_one(tmp_path: Path) -> None:
    """It stops its workers gracefully, and reports the reason."""
    async with LocalCluster(tmp_path / "cluster") as cluster:
        await cluster.start_rendezvous()
        timer = await cluster.start_timer()
        agent = await cluster.start_agent("a", requires_a_watchdog(cluster, tmp_path, SOON))
        await cluster.output.first("its worker to start", lambda line: line.event == "started")
        await timer.kill()
        assert await agent.ended(PATIENCE) == 3
        assert f"no watchdog has guarded its workers for {SOON:g} s" in agent.report


@pytest.mark.slow
async def test_a_watchdog_that_is_back_in_time_is_no_reason_to_leave(tmp_path: Path) -> None:
    """The restart of the service ends the time without a watchdog."""
    async with LocalCluster(tmp_path / "cluster") as cluster:
        await cluster.start_rendezvous()
        timer = await cluster.start_timer()
        agent = await cluster.start_agent("a", requires_a_watchdog(cluster, tmp_path, IN_TIME))
        await cluster.output.first("its worker to start", lambda line: line.event == "started")
        await timer.kill()
        timer = await cluster.start_timer()
        await timer.log.first("the agent again", lambda line: line.event == "agent subscribed")
        await asyncio.sleep(IN_TIME)
        (tmp_path / "finish").touch()
        assert await agent.ended(PATIENCE) == 0
