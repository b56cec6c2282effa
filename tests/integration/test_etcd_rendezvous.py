"""Jobs with only an etcd, as in scripts for torchrun: no host is special, and the loss of any host is survivable."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from integration.agents import Start, ended, waiting_agents
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import parse_address
from rallypoint.etcd.values import KeyValue
from serving.conftest import Certificates, make_certificates
from support.etcd_server import EtcdCluster, EtcdTLS, etcd_cluster
from support.ports import free_port
from support.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

# Seconds. A vanished host is detected when its leases expire; the rest is quick on an idle machine.
PATIENCE = 120.0
WORKER = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
round_ = os.environ["RALLYPOINT_ROUND"]
(folder / f"{round_}.{os.environ['RANK']}").write_text(f"{os.environ['WORLD_SIZE']} {os.getpid()}")
while not (folder / "finish").exists():
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of one authority, for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command (apt install openssl)")
    return make_certificates(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts an agent of a job whose workers wait for the file `finish`."""
    with waiting_agents(tmp_path, WORKER) as start:
        yield start


def in_etcd(etcd: EtcdCluster, space: str) -> list[KeyValue]:
    """Return all entries of a run in etcd."""

    async def read() -> list[KeyValue]:
        async with EtcdClient(parse_address(etcd.url, {})) as client:
            return list((await client.get(f"{space}/".encode(), f"{space}0".encode())).pairs)

    return asyncio.run(read())


def owner_of(
    etcd: EtcdCluster, space: str, agents: list[subprocess.Popen[str]]
) -> subprocess.Popen[str] | None:
    """Return the agent that serves the run now."""
    for pair in in_etcd(etcd, space):
        if pair.key == f"{space}/owners/0000".encode():
            port = int(json.loads(pair.value)["address"].rpartition(":")[2])
            for agent in agents:
                if agent.poll() is None and port in _listening(agent.pid):
                    return agent
    return None


def _listening(pid: int) -> set[int]:
    return {
        each.laddr.port
        for each in psutil.Process(pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


def replica_ports(agents: list[subprocess.Popen[str]]) -> list[set[int]]:
    """Return the ports at which the agents listen: an agent that is no longer a replica has no port for others."""
    return [_listening(agent.pid) for agent in agents]


def worlds(folder: Path) -> dict[str, list[str]]:
    """Return by round the files of its workers, ordered by rank."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("[0-9]*.[0-9]*")):
        found.setdefault(path.name.partition(".")[0], []).append(path.read_text())
    return found


def running(folder: Path, size: int) -> Callable[[], bool]:
    """Return a condition: the latest round has `size` workers, and all have started."""

    def all_there() -> bool:
        found = worlds(folder)
        latest = found[max(found, key=int)] if found else []
        return len(latest) == size and all(each.startswith(f"{size} ") for each in latest)

    return all_there


def test_torchruns_flags_and_torchs_url_lead_to_one_run(
    tmp_path: Path, start: Start, etcd: EtcdCluster
) -> None:
    """They name the same etcd, prefix and run; it ends for all, and its entries in etcd have leases."""
    flags = ["--nnodes=2", "--rdzv-backend=etcd", f"--rdzv-endpoint={etcd.endpoints}", "--rdzv-id=two"]
    url = f"{etcd.url}/two?min_workers=2&max_workers=2&timeout=900"
    agents = [start(*flags), start(f"--rdzv-endpoint={url}")]
    wait_until(running(tmp_path, 2), "the job to run", PATIENCE)
    (tmp_path / "finish").touch()
    ends = [ended(agent) for agent in agents]
    assert [exit_code for exit_code, _ in ends] == [0, 0]
    assert [said for _, said in ends if "shards" in said] == [], "nothing is wrong with a normal end"
    left = in_etcd(etcd, "/torchelastic/p2p/two")
    assert left, "who comes late has to hear that it is over"
    assert all(pair.lease for pair in left), "what has no lease stays for ever"
    assert not [pair for pair in left if b"/owners/" in pair.key or b"/seats/" in pair.key]
    exit_code, said = ended(start(*flags))
    assert exit_code == 4, "the run had succeeded"
    assert "run 'two' is closed (SUCCEEDED: all 2 workers of round 1 succeeded)" in said


@pytest.mark.slow
def test_the_host_that_serves_may_vanish(tmp_path: Path, start: Start, etcd: EtcdCluster) -> None:
    """Another host takes the run over, and the job continues with the remaining nodes, as after any lost host."""
    url = f"{etcd.url}/vanish?min_workers=2&max_workers=3&last_call_timeout=3&etcd_prefix=/jobs"
    agents = [start(f"--rdzv-endpoint={url}") for _ in range(3)]
    wait_until(running(tmp_path, 3), "the job to run", PATIENCE)
    owner = owner_of(etcd, "/jobs/vanish", agents)
    assert owner is not None
    owner.kill()
    wait_until(running(tmp_path, 2), "the others to go on", PATIENCE)
    (tmp_path / "finish").touch()
    others = [agent for agent in agents if agent is not owner]
    assert [ended(agent)[0] for agent in others] == [0, 0]
    rounds = list(worlds(tmp_path))
    assert len(rounds) == len(set(rounds)), "no round number is given out twice"


@pytest.mark.slow
def test_the_host_that_serves_may_leave(tmp_path: Path, start: Start, etcd: EtcdCluster) -> None:
    """It first hands the run over to another host. With c10d this would end the job."""
    flags = ["--nnodes=1:2", "--rdzv-backend=etcd-v2", f"--rdzv-endpoint={etcd.endpoints}", "--rdzv-id=leave"]
    agents = [start(*flags, "--rdzv-conf=last_call_timeout=3") for _ in range(2)]
    wait_until(running(tmp_path, 2), "the job to run", PATIENCE)
    owner = owner_of(etcd, "/torch/elastic/rendezvous/leave", agents)
    assert owner is not None
    owner.terminate()
    assert ended(owner)[0] == 128 + signal.SIGTERM
    (other,) = [agent for agent in agents if agent is not owner]
    wait_until(running(tmp_path, 1), "the other to go on", PATIENCE)
    (tmp_path / "finish").touch()
    assert ended(other)[0] == 0


@pytest.mark.slow
def test_the_host_that_serves_may_be_paused(tmp_path: Path, start: Start, etcd: EtcdCluster) -> None:
    """Another host takes the run over; when the first one runs again, it has lost its lease and joins as a new node."""
    url = f"{etcd.url}/pause?min_workers=2&max_workers=3&last_call_timeout=3"
    flags = [f"--rdzv-endpoint={url}", "--rdzv-conf=scale_up_delay=1"]
    agents = [start(*flags) for _ in range(3)]
    wait_until(running(tmp_path, 3), "the job to run", PATIENCE)
    owner = owner_of(etcd, "/torchelastic/p2p/pause", agents)
    assert owner is not None
    owner.send_signal(signal.SIGSTOP)
    wait_until(running(tmp_path, 2), "the others to go on", PATIENCE)
    owner.send_signal(signal.SIGCONT)
    wait_until(running(tmp_path, 3), "all three to run", PATIENCE)
    (tmp_path / "finish").touch()
    said = {}
    for agent in agents:
        exit_code, said[agent.pid] = ended(agent)
        assert exit_code == 0
    assert "lease lost, joining again" in said[owner.pid]


@pytest.mark.slow
def test_a_run_that_etcd_dropped_goes_on_above_all_its_numbers(
    tmp_path: Path, start: Start, etcd: EtcdCluster
) -> None:
    """Its lease expired, and the agents could not renew it: they join again, and each round number is used once."""
    agents = [start("--nnodes=2", f"--rdzv-endpoint={etcd.url}/dropped") for _ in range(2)]
    wait_until(running(tmp_path, 2), "the job to run", PATIENCE)
    space = "/torchelastic/p2p/dropped"
    (lease,) = (pair.lease for pair in in_etcd(etcd, space) if pair.key == f"{space}/run".encode())

    async def drop() -> None:
        async with EtcdClient(parse_address(etcd.url, {})) as client:
            await client.revoke(lease)

    asyncio.run(drop())
    wait_until(lambda: len(worlds(tmp_path).get("2", [])) == 2, "the second round to run", PATIENCE)
    (tmp_path / "finish").touch()
    assert [ended(agent)[0] for agent in agents] == [0, 0]
    assert list(worlds(tmp_path)) == ["1", "2"]


@pytest.mark.slow
def test_etcd_may_be_restarted_under_a_job(tmp_path: Path, start: Start) -> None:
    """Workers neither stop nor restart, even in an outage longer than a lease; the job ends normally."""
    with etcd_cluster(tmp_path / "own") as etcd:
        (member,) = etcd.members
        agents = [start("--nnodes=2", f"--rdzv-endpoint={etcd.url}/restart") for _ in range(2)]
        wait_until(running(tmp_path, 2), "the job to run", PATIENCE)
        before = worlds(tmp_path)
        member.kill()
        # An outage longer than the owner's lease: it must stop serving the run.
        owner = replica_ports(agents)
        wait_until(lambda: replica_ports(agents) != owner, "the run to be served by nobody", PATIENCE)
        member.start()
        member.wait()
        assert worlds(tmp_path) == before
        for line in (line for lines in before.values() for line in lines):
            os.kill(int(line.split()[1]), 0)
        (tmp_path / "finish").touch()
        assert [ended(agent)[0] for agent in agents] == [0, 0]
        assert worlds(tmp_path) == before


def test_all_of_it_may_be_tls(tmp_path: Path, start: Start, certificates: Certificates) -> None:
    """etcd requires client certificates, and the rendezvous among the hosts checks the names in theirs."""
    files = certificates
    with etcd_cluster(tmp_path / "own", tls=EtcdTLS(files.server, files.server_key, files.ca)) as etcd:
        query = f"protocol=https&cert={files.client}&key={files.client_key}&cacert={files.ca}&min_workers=2"
        tls = [f"--tls-ca={files.ca}", f"--tls-cert={files.server}", f"--tls-key={files.server_key}"]
        url = f"--rdzv-endpoint={etcd.url}/tls?{query}"
        agents = [start(url, "--local-addr=localhost", *tls) for _ in range(2)]
        wait_until(running(tmp_path, 2), "the job to run", PATIENCE)
        (tmp_path / "finish").touch()
        assert [ended(agent)[0] for agent in agents] == [0, 0]


@pytest.mark.slow
def test_an_unreachable_etcd_is_reported(tmp_path: Path, start: Start) -> None:
    """The error is one line, before a worker starts; at most one warning about a retry comes before it."""
    agent = start(
        "--nnodes=2", f"--rdzv-endpoint=etcd://127.0.0.1:{free_port()}/job", "--rdzv-conf=read_timeout=1"
    )
    exit_code, said = ended(agent)
    assert exit_code == 2
    *before, last = said.splitlines()
    assert "no etcd answers at 127.0.0.1:" in last
    assert len(before) <= 1
    assert all("warning no etcd answers yet, trying again " in line for line in before)
