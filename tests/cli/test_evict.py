"""`rallypoint evict`: takes a node or a host out and keeps it out, and refuses a name that is not in the run."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator

import pytest

from cli.cli_process import RALLYPOINT, clean_environment, rallypoint, refusal, service
from support.marks import slow
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

HOST = socket.gethostname()


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A rendezvous service."""
    with service("rendezvous", "--journal", "memory") as address:
        yield address


def start(endpoint: str, *flags: str) -> subprocess.Popen[str]:
    """Start an agent of the run; it waits for another one for ever."""
    command = [
        str(RALLYPOINT),
        "run",
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-id",
        "job",
        *flags,
    ]
    command += ["--no-python", "true"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment())


def ended(agent: subprocess.Popen[str]) -> str:
    """Return the last line of an agent that was refused."""
    _, said = agent.communicate(timeout=PATIENCE)
    assert agent.returncode == 2, said
    return said.splitlines()[-1]


def evict(endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return rallypoint("evict", "job", *arguments, "--rdzv-endpoint", endpoint)


def joined(endpoint: str, count: int) -> bool:
    return f"({count} joined" in rallypoint("status", "job", "--rdzv-endpoint", endpoint).stdout


@pytest.mark.parametrize(
    "flags", [pytest.param([], id="its own name"), slow(["--node-id", HOST], id="the host's name")]
)
def test_a_host_is_kept_out(endpoint: str, flags: list[str]) -> None:
    """Its agent has another name when it is started again; the names of other hosts are not affected."""
    agent = start(endpoint, *flags)
    wait_until(lambda: joined(endpoint, 1), "the agent")
    answer = evict(endpoint, HOST, "--host", "--reason", "bad memory")
    assert answer.stdout.startswith(
        f"host {HOST} was taken out of run job and is refused from now on: {HOST}"
    )
    assert "bad memory" in ended(agent)
    assert "bad memory" in ended(start(endpoint, *flags))
    # A second time, nothing changes, and it is no mistake.
    assert (
        evict(endpoint, HOST, "--host").stdout
        == f"host {HOST} is refused from now on; it is not in run job\n"
    )
    other = start(endpoint, "--node-id", f"{HOST}-2")
    wait_until(lambda: joined(endpoint, 1), "another host")
    assert evict(endpoint, HOST, "--host", "--readmit").stdout == f"host {HOST} may join run job\n"
    again = start(endpoint, *flags)
    assert (other.wait(PATIENCE), again.wait(PATIENCE)) == (0, 0)
    for process in (other, again):
        process.communicate()


def test_a_name_that_is_not_in_the_run_is_a_mistake(endpoint: str) -> None:
    """With --force it is accepted: the node may still join."""
    agent = start(endpoint, "--node-id", "n1")
    wait_until(lambda: joined(endpoint, 1), "the agent")
    for flags in ([], ["--host"]):
        told = refusal(evict(endpoint, "n2", *flags))
        assert "n2 is not in run job; --force refuses it all the same (`rallypoint status job` shows" in told
    told = refusal(evict(endpoint, "n2", "--readmit"))
    assert told.startswith("node n2 is not evicted from run job (")
    assert evict(endpoint, "n2", "--force").stdout == "node n2 is refused from now on; it is not in run job\n"
    assert "node 'n2'" in ended(start(endpoint, "--node-id", "n2"))
    assert evict(endpoint, "n2", "--readmit").stdout == "node n2 may join run job\n"
    assert evict(endpoint, "n1").stdout == "node n1 was taken out of run job and is refused from now on\n"
    assert "node 'n1'" in ended(agent)
