"""A local cluster consists of the real processes, can be broken and repaired at will, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from local_cluster import RENDEZVOUS, Job, LocalCluster
from programs import ClusterError, Program
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.marks import slow
from support.processes import fresh_marker, gone, living
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

WORKER = """
import os, signal, sys
place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "RALLYPOINT_ROUND")]
print("rank {} of {} in round {}".format(*place), flush=True)
if sys.argv[1] == "wait":
    signal.pause()
"""


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A variable in the environment of all processes of the test."""
    with fresh_marker() as text:
        monkeypatch.setenv("CLUSTER_MARKER", text)
        yield text


def job(folder: Path, what: str = "wait", nodes: str = "1:2") -> Job:
    """Return a job of nodes with two workers that do almost nothing."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    conf = {"last_call_timeout": "0.2", "disconnect_grace": "0.2"}
    return Job(f"run-{what}", (str(script), what), nodes=nodes, conf=conf, log_dir=folder / "workers")


def final(workers: int) -> tuple[str, Callable[[pb.Run], bool]]:
    """Return the arguments for RunWatch.until."""
    return f"{workers} workers", lambda run: run.phase == pb.PHASE_FINAL and run.world_size == workers


async def heard(cluster: LocalCluster, text: str) -> None:
    """Wait for a line of a worker's output."""
    await cluster.output.first(text, lambda line: line.text == text)


def refused(endpoint: str) -> bool:
    """Return True if no process listens there."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.slow
async def test_a_job_runs_to_its_end(tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings in the environment are not the cluster's; after the job, neither a process nor a port is left."""
    monkeypatch.setenv("RALLYPOINT_TLS_CERT", "/nowhere.pem")
    async with LocalCluster(tmp_path) as cluster:
        await asyncio.gather(cluster.start_rendezvous(), cluster.start_timer())
        todo = job(tmp_path, "end", nodes="2")
        agents = await asyncio.gather(*(cluster.start_agent(name, todo) for name in ("one", "two")))
        watch = cluster.watch(todo.run_id)
        seen = await watch.until("the end", lambda run: run.phase == pb.PHASE_CLOSED)
        assert seen.run.run_end.outcome == pb.OUTCOME_SUCCEEDED
        assert [await agent.ended(20) for agent in agents] == [0, 0]
        assert {line.text for line in cluster.output.items} >= {
            f"rank {rank} of 4 in round 1" for rank in range(4)
        }
        with pytest.raises(ClusterError, match="waited for more, but run run-end is closed: all 4 workers"):
            await watch.until("more", lambda run: False)
        endpoints = [cluster.rendezvous_endpoint, cluster.timer_endpoint]
        assert living(marker)
    assert gone(marker)
    assert all(refused(endpoint) for endpoint in endpoints)


@pytest.mark.slow
async def test_an_agent_is_killed_and_started_again(tmp_path: Path, marker: str) -> None:
    """Its workers die with it; the service notices, and admits it again; its name is free only once it is dead."""
    async with LocalCluster(tmp_path) as cluster:
        await cluster.start_rendezvous()
        todo = job(tmp_path)
        agents = await asyncio.gather(*(cluster.start_agent(name, todo) for name in ("one", "two")))
        watch = cluster.watch(todo.run_id)
        await watch.until(*final(workers=4))
        with pytest.raises(ClusterError, match=rf"two is running \(pid {agents[1].pid}\)"):
            await cluster.start_agent("two", todo)
        # It need not be its first: on a slow machine a round may be formed before both have joined.
        await agents[1].log.first(
            "its workers of that round",
            lambda line: line.event == "starting workers" and line.fields["world_size"] == 4,
        )
        await agents[1].kill()
        alone = await watch.until(*final(workers=2))
        assert alone.run.last_round_end.node_id == "two"
        await cluster.start_agent("two", todo)
        again = await watch.until(*final(workers=4))
        assert again.run.round > alone.run.round
    assert gone(marker)


async def test_the_rendezvous_service_is_killed_and_started_again(tmp_path: Path, marker: str) -> None:
    """The port and the journal stay the same: watches go on, and the workers never notice."""
    async with LocalCluster(tmp_path) as cluster:
        await cluster.start_rendezvous()
        todo = job(tmp_path)
        agent = await cluster.start_agent("one", todo)
        watch = cluster.watch(todo.run_id)
        seen = await watch.until(*final(workers=2))
        for rank in (0, 1):
            await heard(cluster, f"rank {rank} of 2 in round {seen.run.round}")
        before, endpoint = await cluster.get_job("one"), cluster.rendezvous_endpoint
        assert len(before.workers) == 2
        await cluster.programs[RENDEZVOUS].kill()
        assert refused(endpoint)
        await cluster.start_rendezvous()
        await agent.log.first("the agent to resume", lambda line: line.event == "resumed")
        assert (await cluster.get_run(todo.run_id)).round == seen.run.round
        assert (await cluster.get_job("one")).workers == before.workers
        assert cluster.rendezvous_endpoint == endpoint
        await cluster.start_agent("two", todo)
        await watch.until(*final(workers=4))
        revisions = [each.run.revision for each in watch.states.items]
        assert revisions == sorted(set(revisions))
    assert gone(marker)


@pytest.mark.parametrize("how", ["failing", slow("cancelled"), slow("cancelled twice")])
async def test_no_process_stays_after_any_exit_of_the_block(how: str, tmp_path: Path, marker: str) -> None:
    """An exception, Ctrl-C, and a second Ctrl-C while everything is being stopped."""
    started = asyncio.Event()
    agents: list[Program] = []

    async def block() -> None:
        async with LocalCluster(tmp_path) as cluster:
            await cluster.start_rendezvous()
            agents.append(await cluster.start_agent("one", job(tmp_path)))
            await cluster.watch("run-wait").until(*final(workers=2))
            started.set()
            if how == "failing":
                raise LookupError
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await asyncio.wait({task, asyncio.create_task(started.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert started.is_set()
    if how != "failing":
        task.cancel()
    if how == "cancelled twice":
        await asyncio.sleep(0.05)  # at any moment of the stop; the outcome does not depend on it
        task.cancel()
    with pytest.raises(LookupError if how == "failing" else asyncio.CancelledError):
        await task
    assert gone(marker)
    if how != "cancelled twice":
        assert await agents[0].ended() == 128 + signal.SIGTERM
        assert '"node left"' in (tmp_path / "rendezvous.log").read_text()  # in good order


@pytest.mark.parametrize("number", [slow(signal.SIGKILL), signal.SIGTERM])
async def test_a_service_that_ends_unasked_ends_the_work(
    number: signal.Signals, tmp_path: Path, marker: str
) -> None:
    """No timeout must pass: the error names the service, and how it ended. One that the test ended is no error."""
    async with LocalCluster(tmp_path) as cluster:
        rendezvous = await cluster.start_rendezvous()
        timer = await cluster.start_timer()
        await rendezvous.kill()
        how = "signal SIGKILL" if number == signal.SIGKILL else "exit code 0"

        async def work() -> None:
            os.kill(timer.pid, number)
            await asyncio.Event().wait()

        with pytest.raises(ClusterError, match=rf"^timer ended with {how}, see .*timer\.log$"):
            await asyncio.wait_for(cluster.unless_one_fails(work()), PATIENCE)
    assert gone(marker)


@pytest.mark.slow
async def test_clusters_can_run_side_by_side(tmp_path: Path, marker: str) -> None:
    """The kernel chooses the ports; two clusters can't share a folder."""
    async with LocalCluster(tmp_path / "one") as one, LocalCluster(tmp_path / "two") as two:
        await asyncio.gather(one.start_rendezvous(), two.start_rendezvous())
        assert one.rendezvous_endpoint != two.rendezvous_endpoint
        log = (tmp_path / "one" / "rendezvous.log").read_text()
        assert '"ready"' in log
        with pytest.raises(ClusterError, match=r"another cluster runs in .*one; choose another folder"):
            await LocalCluster(tmp_path / "one").__aenter__()
        assert (tmp_path / "one" / "rendezvous.log").read_text() == log
        assert one.programs[RENDEZVOUS].running
    assert gone(marker)
