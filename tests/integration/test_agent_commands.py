"""`rallypoint agent …`: users that know only a host's address can inspect and control its jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.daemons import WORKER, Cluster, Started, cluster, users_channel
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

FLOOD = 40_000_000
"""Bytes that a worker writes at once: many times the size of all buffers between it and a reader."""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Cluster]:
    """One daemon."""
    with cluster(tmp_path, 1) as made:
        yield made


def launch(host: Cluster, *order: str, flags: tuple[str, ...] = ()) -> None:
    """Submit a job, and detach."""
    flags = ("--detach", "--rdzv-id", "run-7", "--nproc-per-node", "2", "--max-restarts", "3", *flags)
    submitted = host.submit(*order, flags=flags)
    assert submitted.ended() == 0, submitted.said


def agent(host: Cluster, command: str, *arguments: str) -> Started:
    """Run a command about the host to its end."""
    return host.run("agent", command, *arguments, "--agent", host.hosts[0].address)


def answer(host: Cluster, command: str, *arguments: str) -> Any:
    """Run a command with `--json`; return its parsed output."""
    return json.loads(agent(host, command, *arguments, "--json").printed)


def refused(host: Cluster, command: str, *arguments: str) -> str:
    """Run a command that is refused; return the one line of its error."""
    program = agent(host, command, *arguments)
    assert program.ended() == 2
    assert len(program.said.splitlines()) == 1
    return program.said


@pytest.mark.slow
def test_a_job_is_inspected_controlled_and_ended(host: Cluster, tmp_path: Path) -> None:
    """Commands show its state, workers and stacks, kill one worker, restart all, and stop all."""
    assert agent(host, "jobs").printed == "no jobs\n"
    assert "running or ended (NO_JOB)" in refused(host, "workers")
    launch(host, "wait")
    host.up(0, 1)
    assert "run-7  RUNNING  1" in agent(host, "jobs").printed
    assert [job["state"] for job in answer(host, "jobs")["jobs"]] == ["JOB_STATE_RUNNING"]
    workers = answer(host, "workers", "run-7")["workers"]
    assert [worker["rank"] for worker in workers] == [0, 1]
    assert all(int(worker["usage"]["memoryBytes"]) > 1_000_000 for worker in workers)
    table = agent(host, "workers").printed
    assert all(worker["pid"] in table for worker in workers)

    stacks = answer(host, "stacks", "--rank", "1")["stacks"]
    assert [(each["rank"], each["pid"]) for each in stacks] == [(1, workers[1]["pid"])]
    assert "sleeps for a time it chose" in agent(host, "stacks").printed

    assert "it has 0, 1 (NO_WORKER)" in refused(host, "reap", "--rank", "5")
    reaped = agent(host, "reap", "--rank", "1", "--reason", "it is in the way").printed
    assert reaped.startswith(f"rank 1, process {workers[1]['pid']}, is killed; diagnostics are in ")
    evidence = Path(reaped.strip().rpartition(" are in ")[2]).read_text()
    assert "it was killed through SupervisorService: it is in the way" in evidence
    host.up(0, 1, restarts=1)

    pids = [worker["pid"] for worker in answer(host, "workers")["workers"]]
    restarted = agent(host, "restart", "run-7", "--reason", "a whim").printed
    assert restarted == "round 2 ended, all workers restart\n"
    wait_until(lambda: host.hosts[0].job().round == 3 and len(host.hosts[0].job().workers) == 2, "round 3")
    assert not {worker["pid"] for worker in answer(host, "workers")["workers"]} & set(pids)
    assert host.hosts[0].job().restart_count == 1

    assert agent(host, "stop", "--now", "--reason", "enough").printed.startswith(
        "the host is leaving the run"
    )
    wait_until(lambda: host.hosts[0].job().state == pb.JOB_STATE_ENDED, "the end")
    assert "ENDED (143)" in agent(host, "jobs").printed
    assert "has ended on this host (JOB_ENDED)" in refused(host, "restart")
    over = "the job of run run-7 has ended here already, with exit code 143\n"
    assert agent(host, "stop").printed == over


def test_a_host_is_drained(host: Cluster, tmp_path: Path) -> None:
    """Its workers are warned and, after the grace, stopped gracefully; then the host leaves the run."""
    launch(host, "save")
    host.up(0, 1)
    drained = agent(host, "drain", "--grace", "0.2", "--reason", "power cut").printed
    assert drained == "the host will leave run-7; its workers are warned\n"
    wait_until(lambda: host.hosts[0].job().state == pb.JOB_STATE_ENDED, "the end")
    assert (tmp_path / "saved.0").exists()
    assert "power cut" in host.hosts[0].job().detail
    assert agent(host, "drain").printed == "the host has no job to leave\n"


@pytest.mark.slow
def test_logs_are_followed_over_a_restart_complete_and_in_order(host: Cluster) -> None:
    """`logs --follow` prints each line of each attempt once, from before the first worker to the end of the job."""
    launch(host, "count", "20000")
    followed = agent(host, "logs", "--follow", "--no-prefix", "--stream", "stdout", "run-7")
    assert followed.ended() == 0, followed.said
    numbers = [line.split() for line in followed.printed.splitlines() if not line.startswith("rank")]
    # The failure of either worker ends the first attempt, so the output of the other may be cut.
    second = [int(number) for attempt, number in numbers if attempt == "1"]
    assert sorted(second) == sorted([*range(20_000)] * 2)
    by_rank = agent(host, "logs", "--stream", "stdout").printed.splitlines()
    for rank in (0, 1):
        mine = [line.removeprefix(f"[{rank}]: ") for line in by_rank if line.startswith(f"[{rank}]: ")]
        lines = [line for line in mine if line.startswith("1 ")]
        assert lines == [f"1 {number}" for number in range(20_000)]
        first = [line for line in mine if line.startswith("0 ")]
        assert first == [f"0 {number}" for number in range(len(first))]
    tail = agent(host, "logs", "--tail", "20", "--rank", "1", "--stream", "stdout").printed.splitlines()
    assert tail == ["[1]: 1 19998", "[1]: 1 19999"]


@pytest.mark.slow
def test_a_stalled_log_reader_blocks_no_worker_and_no_agent(host: Cluster, tmp_path: Path) -> None:
    """It blocks neither the workers, which end, nor the agent; and it receives all bytes when it reads again."""
    script = tmp_path / "flood.py"
    script.write_text(
        f"import os\nfor _ in range({FLOOD // 1_000_000}):\n    os.write(1, b'x' * 999_999 + b'\\n')\n"
    )
    with users_channel(host.hosts[0].address) as channel:
        stub = pb_grpc.SupervisorServiceStub(channel)
        agents = host.hosts[0].address
        submitted = host.run("submit", "--agents", agents, "--detach", "--rdzv-id", "run-8", script)
        assert submitted.ended() == 0, submitted.said
        stalled = stub.StreamLogs(pb.StreamLogsRequest(run_id="run-8", follow=True), timeout=PATIENCE)
        first = next(stalled)  # and no more for now
        wait_until(lambda: host.hosts[0].job().state == pb.JOB_STATE_ENDED, "the end of the job")
        assert host.hosts[0].job().exit_code == 0
        rest = stub.StreamLogs(pb.StreamLogsRequest(run_id="run-8", cursors=[first.cursor]), timeout=PATIENCE)
        got = len(first.data) + sum(
            len(piece.data) for piece in rest if piece.cursor.stream == first.cursor.stream
        )
        assert got == FLOOD
        stalled.cancel()


def test_a_launch_by_hand_returns_the_rendezvous_endpoint(host: Cluster) -> None:
    """The daemon serves rendezvous at its own address, for jobs without an endpoint."""
    address = host.hosts[0].address
    with users_channel(address) as channel:
        stub = pb_grpc.SupervisorServiceStub(channel)
        spec = pb.JobSpec(run_id="run-9", command=["${python}", str(WORKER), str(host.folder), "finish"])
        launched = stub.LaunchJob(pb.LaunchJobRequest(spec=spec), timeout=PATIENCE)
        assert launched.rendezvous_endpoint == address
        states = stub.WatchJob(pb.WatchJobRequest(run_id="run-9"), timeout=PATIENCE)
        assert [response.job for response in states][-1].exit_code == 0
    shown = host.run("status", "run-9", "--rdzv-endpoint", address)
    assert "SUCCEEDED" in shown.printed
