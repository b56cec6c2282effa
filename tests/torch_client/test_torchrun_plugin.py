"""Stock torchruns over a Rallypoint service go on after every loss that torch can survive."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.etcd_server import EtcdCluster
from support.waiting import wait_until
from torch_client.torchrun_job import PATIENCE, TORCHRUN, is_alive, torchrun_job
from torture.length import ordinarily
from torture.mortal_server import MortalServer

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.timeout(600)]

ABC = ("a", "b", "c")
AWAY = ordinarily(4.0, in_full=30.0)
"""Seconds for which a service is away: longer than a node's disconnect grace, or the longest that users require."""


@pytest.fixture(scope="module", autouse=True)
def torch() -> None:
    """Skip without torch, which has torchrun."""
    if not TORCHRUN.exists():
        pytest.skip("torch is not installed")


def test_three_agents_form_and_end(tmp_path: Path, server: MortalServer) -> None:
    """At the full number there is no last call. Each process beside a torchrun ends with it."""
    with torchrun_job(tmp_path / "job", server.endpoint, "3") as job:
        job.start(*ABC, conf={"last_call_timeout": "600"})
        job.round_of(ABC)
        companions = [int(node.node_id.split("_")[-2]) for node in job.run().nodes]
        assert len(companions) == 3
        job.finish()
        assert not any(map(is_alive, companions))
        run = job.run()
        assert run.phase == pb.PHASE_CLOSED
        assert run.run_end.outcome == pb.OUTCOME_SUCCEEDED


def test_a_killed_worker_restarts_all(tmp_path: Path, server: MortalServer) -> None:
    """It counts at its own agent alone: the others notice the end of the round first, without a restart left. The
    next round has another port, so no worker meets one of the round before."""
    with torchrun_job(tmp_path / "job", server.endpoint, "3", max_restarts=1) as job:
        job.start(*ABC)
        first = job.round_of(ABC)
        os.kill(first["b"]["pid"], signal.SIGKILL)
        second = job.round_of(ABC, int(first["a"]["RALLYPOINT_ROUND"]))
        assert {name: line["TORCHELASTIC_RESTART_COUNT"] for name, line in second.items()} == {
            "a": "0",
            "b": "1",
            "c": "0",
        }
        assert first["a"]["MASTER_PORT"] != second["a"]["MASTER_PORT"]
        assert int(first["a"]["RALLYPOINT_FENCING_TOKEN"]) < int(second["a"]["RALLYPOINT_FENCING_TOKEN"])
        assert job.run().last_round_end.cause == pb.ROUND_END_CAUSE_WORKER_FAILED
        job.finish()


def test_survivors_of_a_killed_agent_go_on_without_a_restart(
    tmp_path: Path, server: MortalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """No restart is allowed or needed, as long as their workers do not die of it: after grace and last call they form
    a round of their own."""
    with torchrun_job(tmp_path / "job", server.endpoint, "2:3", max_restarts=0) as job:
        job.start(*ABC)
        first = job.round_of(ABC)
        began = time.monotonic()
        job.kill("c")
        second = job.round_of(("a", "b"), int(first["a"]["RALLYPOINT_ROUND"]))
        with capsys.disabled():
            sys.stdout.write(
                f"\nagent killed to workers of the next round: {time.monotonic() - began:.1f} s (grace 2, call 1)\n"
            )
        assert {line["TORCHELASTIC_RESTART_COUNT"] for line in second.values()} == {"0"}
        assert job.run().last_round_end.cause == pb.ROUND_END_CAUSE_NODE_LOST
        job.finish()


def test_an_agent_that_is_stopped_leaves_at_once(tmp_path: Path, server: MortalServer) -> None:
    """torch calls nothing then. The others form a round as soon as its workers are gone, not after a grace."""
    with torchrun_job(tmp_path / "job", server.endpoint, "2:3") as job:
        job.start(*ABC, conf={"disconnect_grace": "600"})
        first = job.round_of(ABC)
        assert job.kill("c", signal.SIGTERM) == 1
        job.round_of(("a", "b"), int(first["a"]["RALLYPOINT_ROUND"]))
        assert job.run().last_round_end.cause == pb.ROUND_END_CAUSE_NODE_LEFT
        job.finish()


def test_a_newcomer_is_let_in_without_a_restart(tmp_path: Path, server: MortalServer) -> None:
    """No restart is allowed."""
    with torchrun_job(tmp_path / "job", server.endpoint, "1:3", max_restarts=0) as job:
        job.start("a", "b")
        first = job.round_of(("a", "b"))
        job.start("c")
        second = job.round_of(ABC, int(first["a"]["RALLYPOINT_ROUND"]))
        assert first["a"]["MASTER_PORT"] != second["a"]["MASTER_PORT"]
        job.finish()


def test_a_spare_takes_the_place_of_a_killed_agent(tmp_path: Path, server: MortalServer) -> None:
    """It does so at once, although the last call takes ten minutes. A spare that never ran exits at the end; torchrun
    2.13 treats that as an error."""
    with torchrun_job(tmp_path / "job", server.endpoint, "2") as job:
        job.start("a", "b", conf={"last_call_timeout": "600"})
        first = job.round_of(("a", "b"))
        job.start("c", conf={"last_call_timeout": "600"})
        wait_until(
            lambda: pb.NODE_STATE_SPARE in [node.state for node in job.run().nodes], "a spare", PATIENCE
        )
        job.kill("a")
        job.round_of(("b", "c"), int(first["a"]["RALLYPOINT_ROUND"]))
        job.start("d", conf={"last_call_timeout": "600"})
        wait_until(
            lambda: pb.NODE_STATE_SPARE in [node.state for node in job.run().nodes], "a spare", PATIENCE
        )
        job.touch("finish")
        assert job.codes() == {"b": 0, "c": 0, "d": 1}
        assert "Rendezvous gracefully exited: the run is closed" in job.log("d")


@pytest.mark.parametrize("way", ["paused", "killed"])
def test_a_service_that_is_away_disturbs_no_worker(tmp_path: Path, server: MortalServer, way: str) -> None:
    """The same workers run before, meanwhile and afterwards, and the job can survive the same losses as before."""
    with torchrun_job(tmp_path / "job", server.endpoint, "3", max_restarts=1) as job:
        job.start(*ABC)
        first = job.round_of(ABC)
        if way == "paused":
            server.pause()
        else:
            server.kill()
        time.sleep(AWAY)  # nothing must happen
        if way == "paused":
            server.go_on()
        else:
            server.start()
        wait_until(lambda: all(node.connected for node in job.run().nodes), "all to be back", PATIENCE)
        assert len(job.started()) == 3
        assert all(is_alive(line["pid"]) for line in first.values())
        os.kill(first["b"]["pid"], signal.SIGKILL)
        job.round_of(ABC, int(first["a"]["RALLYPOINT_ROUND"]))
        job.finish()


def test_a_worker_that_fails_while_the_service_is_away_waits_for_it(
    tmp_path: Path, server: MortalServer
) -> None:
    """The agent waits in `next_rendezvous`; no agent ends."""
    with torchrun_job(tmp_path / "job", server.endpoint, "3", max_restarts=1) as job:
        job.start(*ABC)
        first = job.round_of(ABC)
        server.kill()
        os.kill(first["b"]["pid"], signal.SIGKILL)
        wait_until(lambda: "will restart worker group" in job.log("b"), "b to stop its workers", PATIENCE)
        time.sleep(AWAY)  # nothing must happen
        job.check()
        server.start()
        job.round_of(ABC, int(first["a"]["RALLYPOINT_ROUND"]))
        job.finish()


def test_another_replica_takes_over(tmp_path: Path, etcd: EtcdCluster) -> None:
    """The owner of the run is killed: no worker notices, and the job can survive the same losses as before."""
    journal = f"{etcd.url}/torchrun-{os.getpid()}"
    servers = [
        MortalServer(
            tmp_path / name, flags=("--journal", journal, "--replica-name", name, "--lease-ttl", "2")
        )
        for name in ("one", "two")
    ]
    try:
        for each in servers:
            each.start()
        endpoints = ",".join(each.endpoint for each in servers)
        with torchrun_job(tmp_path / "job", endpoints, "3", max_restarts=1) as job:
            job.start(*ABC)
            first = job.round_of(ABC)
            (owner,) = (each for each in servers if "round final" in each.log())
            owner.kill()
            wait_until(lambda: all(node.connected for node in job.run().nodes), "the next owner", PATIENCE)
            assert len(job.started()) == 3
            os.kill(first["b"]["pid"], signal.SIGKILL)
            job.round_of(ABC, int(first["a"]["RALLYPOINT_ROUND"]))
            job.finish()
    finally:
        for each in servers:
            each.close()


@pytest.mark.parametrize("then", ["waits", "is killed", "is stopped"])
def test_an_agent_that_finishes_early_ends_no_other(tmp_path: Path, server: MortalServer, then: str) -> None:
    """It may be killed or stopped at its exit barrier: its work is done, and it is no loss."""
    with torchrun_job(tmp_path / "job", server.endpoint, "3") as job:
        job.start(*ABC)
        job.round_of(ABC)
        job.touch("finish.a")
        wait_until(
            lambda: pb.NODE_STATE_SUCCEEDED in [node.state for node in job.run().nodes],
            "the success of a",
            PATIENCE,
        )
        if then != "waits":
            job.kill("a", signal.SIGKILL if then == "is killed" else signal.SIGTERM)
            wait_until(lambda: len(job.run().nodes) == 2, "the loss to be noticed", PATIENCE)
        assert len(job.started()) == 3
        job.finish()
        assert len(job.started()) == 3
        assert job.run().run_end.outcome == pb.OUTCOME_SUCCEEDED


def test_a_finished_agent_is_not_needed_in_the_next_round(tmp_path: Path, server: MortalServer) -> None:
    """torch can't start its workers again. It leaves the others alone, and ends with success at once."""
    with torchrun_job(tmp_path / "job", server.endpoint, "2:3", max_restarts=1) as job:
        job.start(*ABC)
        first = job.round_of(ABC)
        job.touch("finish.a")
        wait_until(
            lambda: pb.NODE_STATE_SUCCEEDED in [node.state for node in job.run().nodes],
            "the success of a",
            PATIENCE,
        )
        job.touch("fail.b")
        job.round_of(("b", "c"), int(first["a"]["RALLYPOINT_ROUND"]))
        assert job.agents["a"].wait(PATIENCE) == 0
        job.finish()


def test_a_failure_without_a_restart_left_ends_the_run(tmp_path: Path, server: MortalServer) -> None:
    """It ends for all its agents, at once. The run has the failure in torch's words."""
    with torchrun_job(tmp_path / "job", server.endpoint, "3", max_restarts=0) as job:
        job.start(*ABC)
        first = job.round_of(ABC)
        job.touch("fail.b")
        assert job.codes() == dict.fromkeys(ABC, 1)
        end = job.run().run_end
        assert end.outcome == pb.OUTCOME_FAILED
        assert end.failure.exit_code == 7
        assert end.failure.rank == int(first["b"]["RANK"])
        assert end.failure.pid == first["b"]["pid"]
        assert "RendezvousClosedError: the run is closed" in job.log("a")


@pytest.mark.parametrize("max_restarts", [1, 0])
def test_workers_that_die_of_a_killed_agent(tmp_path: Path, server: MortalServer, max_restarts: int) -> None:
    """Workers with open connections do so, long before the service knows of the loss. The run counts no failure; each
    torchrun needs one restart, and ends without. The run always stays open, for torchruns that are started again."""
    with torchrun_job(tmp_path / "job", server.endpoint, "2:3", max_restarts=max_restarts) as job:
        job.start(*ABC)
        first = job.round_of(ABC)
        job.kill("c")
        job.touch("fail.a")
        job.touch("fail.b")
        if max_restarts == 0:
            assert job.codes() == {"a": 1, "b": 1}
            assert job.run().phase == pb.PHASE_JOINABLE
            job.agents.clear()
            job.start("a", "b")
        second = job.round_of(("a", "b"), int(first["a"]["RALLYPOINT_ROUND"]))
        assert {line["TORCHELASTIC_RESTART_COUNT"] for line in second.values()} == {str(max_restarts)}
        assert job.run().restart_count == 0
        job.finish()


def test_workers_meet(tmp_path: Path, server: MortalServer) -> None:
    """They meet at MASTER_ADDR and MASTER_PORT, with torch's own collectives, in two rounds."""
    worker = Path(__file__).with_name("gloo_worker.py")
    with torchrun_job(tmp_path / "job", server.endpoint, "1:2", "--local-addr=127.0.0.1") as job:
        job.start("a", worker=worker)
        first = job.round_of("a")
        job.start("b", worker=worker)
        job.round_of(("a", "b"), int(first["a"]["RALLYPOINT_ROUND"]))
        job.finish()
