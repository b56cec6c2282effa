"""`rallypoint submit`: a job on the daemons of several hosts, from launch to end, also with failures on the way."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.daemons import WORKER, Cluster, cluster, interrupt
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from serving.conftest import make_certificates
from support.waiting import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Cluster]:
    """Two daemons, for one job each."""
    with cluster(tmp_path) as made:
        yield made


def test_a_job_runs_on_all_hosts_and_its_output_names_host_and_rank(
    two_hosts: Cluster, tmp_path: Path
) -> None:
    """Output lines name host and rank; workers have the requested folder and variables; the run's name is printed."""
    flags = ("--nproc-per-node", "2", "--cwd", tmp_path, "--env", "FLAVOUR=a b", "--rdzv-id", "run-7")
    submitted = two_hosts.submit("finish", flags=flags)
    assert submitted.ended() == 0, submitted.said
    ranks = {int(worker.rank): host.address for host in two_hosts.hosts for worker in host.job().workers}
    assert sorted(submitted.printed.splitlines()) == sorted(
        f"[{ranks[rank]} {rank}]: rank {rank} of 4 in {tmp_path} with a b" for rank in range(4)
    )
    assert re.search(r"^\d\d:\d\d:\d\d run run-7 is launched on", submitted.said, re.MULTILINE)
    assert "round 1 runs: 4 workers" in submitted.said


@pytest.mark.slow
def test_restarts_are_reported_and_the_job_goes_on(two_hosts: Cluster) -> None:
    """The output has the traceback of the failed worker, and the new round."""
    submitted = two_hosts.submit("fail-once", flags=("--max-restarts", "2"))
    assert submitted.ended() == 0, submitted.said
    assert "ValueError: the first attempt is never good" in submitted.said
    assert "round 2 runs: 2 workers (restart 1 of 2)" in submitted.said
    assert submitted.printed.count("rank 1 of 2") == 2  # the other one may be stopped before it prints a line


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["auto", "human"])
def test_a_job_that_fails_has_the_exit_code_of_run_and_its_report(
    log_format: str, two_hosts: Cluster
) -> None:
    """The report is there for a failure on any host; with a JSON log it is a field of the last line."""
    submitted = two_hosts.submit("fail", flags=("--log-format", log_format))
    assert submitted.ended() == 1, submitted.said
    report = submitted.said
    if log_format == "auto":
        end = json.loads(report.splitlines()[-1])
        assert (end["event"], end["exit_code"]) == ("job ended", 1)
        report = end["report"]
    report = report.partition("The failure that ended the run:")[2]
    assert "ValueError: it will never be good" in report


def test_ctrl_c_stops_the_job_everywhere_in_good_order(two_hosts: Cluster, tmp_path: Path) -> None:
    """Workers on all hosts save before they end."""
    submitted = two_hosts.submit("save")
    two_hosts.up(0, 1)
    interrupt(submitted)
    assert submitted.ended() == 130, submitted.said
    assert (tmp_path / "saved.0").exists()
    assert (tmp_path / "saved.1").exists()
    assert [host.job().state for host in two_hosts.hosts] == [pb.JOB_STATE_ENDED] * 2
    assert submitted.printed.count("saves") == 2


@pytest.mark.slow
def test_a_second_ctrl_c_kills_the_workers_everywhere(two_hosts: Cluster) -> None:
    """The workers ignore the first one, and the shutdown timeout of half an hour is cut short."""
    submitted = two_hosts.submit("ignore", flags=("--shutdown-timeout", "1800"))
    two_hosts.up(0, 1)
    interrupt(submitted)
    states = [pb.JOB_STATE_STOPPING] * 2
    wait_until(lambda: [host.job().state for host in two_hosts.hosts] == states, "the first to be heard")
    time.sleep(0.25)  # sooner, it would count as the first one
    interrupt(submitted)
    assert submitted.ended() == 130, submitted.said
    assert "killing the workers on all hosts" in submitted.said
    assert [host.job().state for host in two_hosts.hosts] == [pb.JOB_STATE_ENDED] * 2


@pytest.mark.slow
def test_a_host_that_dies_is_reported_and_the_others_go_on(two_hosts: Cluster, tmp_path: Path) -> None:
    """The run's settings permit one host, so it continues; the command follows it to its end, which is a success."""
    flags = (
        "--nnodes",
        "1:2",
        "--reconnect-timeout",
        "3",
        "--rdzv-conf",
        "disconnect_grace=0.1,last_call_timeout=2",
    )
    submitted = two_hosts.submit("wait-for", "go", flags=(*flags, "--max-restarts", "1"))
    two_hosts.up(0)
    wait_until(lambda: all(host.job().world_size == 2 for host in two_hosts.hosts), "a round of both")
    dead = two_hosts.hosts[1]  # the first one serves the rendezvous
    dead.program.process.kill()
    wait_until(lambda: f"{dead.address}: lost the connection" in submitted.said, "the loss to be told")
    wait_until(lambda: two_hosts.hosts[0].job().world_size == 1, "a round without it")
    (tmp_path / "go").touch()
    assert submitted.ended() == 0, submitted.said
    assert f"{dead.address} is lost: it has not answered" in submitted.said


@pytest.mark.slow
def test_a_job_runs_on_all_hosts_or_on_none(two_hosts: Cluster) -> None:
    """An agent with another job refuses; the others are stopped, and one line names the agent and the reason."""
    busy = two_hosts.hosts[1]
    first = two_hosts.start("submit", "--agents", busy.address, "--detach", WORKER, two_hosts.folder, "wait")
    assert first.ended() == 0, first.said
    assert first.printed.strip() == busy.job().run_id
    second = two_hosts.submit("wait")
    assert second.ended() == 2
    assert len(second.said.splitlines()) == 1
    assert second.said.startswith(
        f"Error: agent {busy.address} did not accept the job: this agent runs a job"
    )
    other = two_hosts.run("agent", "jobs", "--agent", two_hosts.hosts[0].address)
    assert "RUNNING" not in other.printed
    assert "WAITING" not in other.printed
    assert busy.job().state == pb.JOB_STATE_RUNNING


@pytest.mark.slow
def test_a_missing_script_is_reported_by_its_host(two_hosts: Cluster) -> None:
    """The script must be on the hosts; the command does not check the local files."""
    agents = ",".join(host.address for host in two_hosts.hosts)
    submitted = two_hosts.run("submit", "--agents", agents, "/nowhere/train.py")
    assert submitted.ended() == 1
    assert "/nowhere/train.py" in submitted.said
    assert "No such file or directory" in submitted.said


@pytest.mark.slow
def test_with_tls_only_a_client_with_a_certificate_may_submit(tmp_path: Path) -> None:
    """Hosts use the same certificates for the rendezvous at the first daemon, each as server and as client."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command (apt install openssl)")
    files = make_certificates(tmp_path / "tls", "ours")
    server = ("--tls-cert", str(files.server), "--tls-key", str(files.server_key), "--tls-ca", str(files.ca))
    with cluster(tmp_path, 2, "--host", "localhost", *server, "--tls-client-ca", str(files.ca)) as hosts:
        mine = ("--tls-ca", files.ca, "--tls-cert", files.client, "--tls-key", files.client_key)
        submitted = hosts.submit("finish", flags=mine)
        assert submitted.ended() == 0, submitted.said
        alone = hosts.start("submit", "--agents", hosts.hosts[0].address, *mine, WORKER, tmp_path, "finish")
        assert alone.ended() == 0, alone.said
        address = hosts.hosts[0].address
        assert hosts.run("agent", "jobs", "--agent", address, *mine).printed.count("ENDED (0)") == 2
        stranger = hosts.run("agent", "jobs", "--agent", address, "--tls-ca", files.ca)
        assert stranger.ended() == 2
        assert "it may require a client certificate" in stranger.said
