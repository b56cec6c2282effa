"""Jobs with the rendezvous in one of their agents, as in scripts for torchrun, run and end as a whole."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT, clean_environment
from ha.namespaces import Namespaces, why_no_namespaces
from integration.agents import Start, ended, waiting_agents
from support.ports import free_port
from support.waiting import PATIENCE, until, wait_until

pytestmark = pytest.mark.integration

WORKER = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
names = ("RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
(folder / f"{os.environ['RANK']}.{os.environ['RALLYPOINT_ROUND']}").write_text(" ".join(map(os.environ.get, names)))
while not (folder / "finish").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def port() -> int:
    """A free port; the next one is free too."""
    return free_port(2)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts an agent of a job whose workers wait for the file `finish`."""
    with waiting_agents(tmp_path, WORKER) as start:
        yield start


def static(port: int, rank: int, *more: str) -> list[str]:
    """Return the flags of one of two nodes."""
    return ["--nnodes=2", f"--node-rank={rank}", f"--master-port={port}", *more]


def running(folder: Path, round_: int) -> Callable[[], bool]:
    """Return a condition: both workers of a round have started."""
    return lambda: all((folder / f"{rank}.{round_}").exists() for rank in (0, 1))


def test_static_nodes_have_the_ranks_and_the_master_that_were_given(
    tmp_path: Path, start: Start, port: int
) -> None:
    """The order in which the nodes start does not matter."""
    agents = [start(*static(port, rank)) for rank in (1, 0)]
    (tmp_path / "finish").touch()
    assert [ended(agent)[0] for agent in agents] == [0, 0]
    seen = [(tmp_path / f"{rank}.1").read_text() for rank in (0, 1)]
    assert seen == [f"{rank} {rank} 127.0.0.1 {port}" for rank in (0, 1)]


@pytest.mark.slow
def test_a_second_node_of_a_rank_is_refused(tmp_path: Path, start: Start, port: int) -> None:
    """The error is one line; the first node is not affected."""
    agents = [start(*static(port, rank)) for rank in (0, 1)]
    wait_until(running(tmp_path, 1), "the job to run")
    for rank, told in ((1, "the node rank1 is in run 'none' already"), (0, "another agent does")):
        exit_code, said = ended(start(*static(port, rank)))
        assert exit_code == 2
        assert told in said
        assert said.count("\n") == 1
    (tmp_path / "finish").touch()
    assert [ended(agent)[0] for agent in agents] == [0, 0]


@pytest.mark.slow
def test_a_node_that_was_killed_takes_its_place_back(tmp_path: Path, start: Start, port: int) -> None:
    """It gets the same rank, in the next round."""
    agents = [start(*static(port, rank)) for rank in (0, 1)]
    wait_until(running(tmp_path, 1), "the job to run")
    agents[1].kill()
    agents[1] = start(*static(port, 1))
    wait_until(running(tmp_path, 2), "the second round to run")
    (tmp_path / "finish").touch()
    assert [ended(agent)[0] for agent in agents] == [0, 0]
    assert (tmp_path / "1.2").read_text() == f"1 1 127.0.0.1 {port}"


def test_the_host_of_the_rendezvous_that_leaves_ends_the_job(tmp_path: Path, start: Start, port: int) -> None:
    """It ends for all, with the reason: without a rendezvous the others could not form a round."""
    flags = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    host = start(*flags)
    wait_until(lambda: _listens(port), "the first agent to serve rendezvous")
    other = start(*flags)
    wait_until(running(tmp_path, 1), "the job to run")
    host.terminate()
    assert ended(host)[0] == 128 + 15
    exit_code, said = ended(other)
    assert exit_code == 1
    assert "the host that served the run's rendezvous is gone: left the run: got SIGTERM" in said


@pytest.mark.slow
def test_the_host_of_the_rendezvous_that_vanishes_ends_the_job(
    tmp_path: Path, start: Start, port: int
) -> None:
    """It can't notify the others, so they give up after `read_timeout`."""
    host = start(*static(port, 0))
    wait_until(lambda: _listens(port + 1), "the host to serve rendezvous")
    other = start(*static(port, 1, "--rdzv-conf=read_timeout=5"))
    wait_until(running(tmp_path, 1), "the job to run")
    host.kill()
    exit_code, said = ended(other)
    assert exit_code == 1
    assert f"the rendezvous service is gone, none answered at 127.0.0.1:{port + 1} within 5 s" in said


@pytest.mark.slow
def test_the_host_of_the_rendezvous_may_be_started_again(tmp_path: Path, start: Start, port: int) -> None:
    """Its new service has no state, and the others join it."""
    agents = [start(*static(port, rank, "--rdzv-conf=read_timeout=60")) for rank in (0, 1)]
    wait_until(running(tmp_path, 1), "the job to run")
    for rank in (0, 1):
        (tmp_path / f"{rank}.1").unlink()
    agents[0].kill()
    agents[0] = start(*static(port, 0, "--rdzv-conf=read_timeout=60"))
    wait_until(running(tmp_path, 1), "the job to run again")
    (tmp_path / "finish").touch()
    assert [ended(agent)[0] for agent in agents] == [0, 0]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_job_of_one_host_needs_no_flag(tmp_path: Path, start: Start) -> None:
    """The defaults suffice, as with torchrun."""
    (tmp_path / "finish").touch()
    assert ended(start())[0] == 0
    assert (tmp_path / "0.1").exists()


async def test_a_second_host_with_node_rank_0_is_refused(tmp_path: Path) -> None:
    """Otherwise it would serve a second rendezvous, and wait for hosts that wait at the first."""
    if why_not := why_no_namespaces():
        pytest.skip(why_not)
    hosts = Namespaces(91, ["one", "two"])
    log, address = tmp_path / "one.log", hosts.address("one")
    run = [str(RALLYPOINT), "run", "--insecure", "--nnodes=3", "--node-rank=0", f"--master-addr={address}"]
    run += ["--no-python", "true"]
    environment = clean_environment(RALLYPOINT_LOG_FORMAT="human")
    try:
        await hosts.open()
        first = await asyncio.to_thread(_start, hosts.command("one", *run), log, environment)
        try:
            await until(lambda: "waiting for nodes: 1 of 3" in log.read_text(), "the first host")
            second = await asyncio.to_thread(
                subprocess.run,
                hosts.command("two", *run),
                capture_output=True,
                env=environment,
                timeout=PATIENCE,
            )
            assert (second.returncode, second.stderr.decode()) == (
                2,
                f"Error: can't serve rendezvous at {address}:29501: another agent does; only one host may have "
                "--node-rank 0, the default (or is_host=true, with c10d)\n",
            )
        finally:
            first.kill()
            first.wait(PATIENCE)
    finally:
        await hosts.close()


def _start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with open(log, "w") as stderr:
        return subprocess.Popen(command, stderr=stderr, env=environment)
