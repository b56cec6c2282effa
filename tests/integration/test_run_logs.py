"""Commands find the runs of this host without an address, and the output of a run from any host."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT, clean_environment, rallypoint, service
from support.mortal import mortal
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

WORKER = """
import os, sys, time
rank = os.environ["RANK"]
print("hello from", rank)
print("err of", rank, file=sys.stderr)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
print("bye from", rank)
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts an agent whose workers print hello, and end when the file `done` exists."""
    (tmp_path / "worker.py").write_text(WORKER)
    with ExitStack() as stack:

        def run(*flags: str) -> subprocess.Popen[bytes]:
            command = [str(RALLYPOINT), "run", *flags, str(tmp_path / "worker.py"), str(tmp_path / "done")]
            nowhere = subprocess.DEVNULL
            agent = subprocess.Popen(
                mortal(*command), env=clean_environment(), stdin=nowhere, stdout=nowhere, stderr=nowhere
            )
            stack.callback(agent.wait, PATIENCE)
            stack.callback(agent.terminate)
            return agent

        yield run


def printed(*arguments: str) -> str:
    """Run a command, which must succeed; return its stdout."""
    result = rallypoint(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def until_prints(text: str, *arguments: str) -> None:
    wait_until(lambda: text in rallypoint(*arguments).stdout, f"{text!r} in the output of {arguments}")


def test_jobs_of_this_host_are_found(start: Start, tmp_path: Path) -> None:
    """A single job needs no run id; with several, the error lists them."""
    start("--standalone", "--rdzv-id", "one", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs"))
    until_prints("hello from 1", "logs", "one", "--rank", "1")
    until_prints("hello from 0", "logs", "one")
    assert printed("logs", "--stream", "stderr", "--rank", "1") == ""
    assert sorted(printed("logs", "--stream", "stdout").splitlines()) == [
        "[0]: hello from 0",
        "[1]: hello from 1",
    ]
    assert printed("status").splitlines()[1].split()[:2] == ["one", "FINAL"]
    status = printed("status", "one")
    assert re.search(
        r"^FINAL since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \(.+\), created .+ \(.+\)$", status, re.MULTILINE
    )
    assert f"logs of this host: {tmp_path}/logs/one_" in status
    missing = rallypoint("logs", "one", "--rank", "7")
    assert (missing.returncode, missing.stderr) == (2, "Error: run 'one' has no worker of rank 7; it has 2\n")

    start("--standalone", "--rdzv-id", "two")
    until_prints("hello from 0", "logs", "two")
    for command in (["status"], ["agent", "jobs"]):
        assert {line.split()[0] for line in printed(*command).splitlines()[1::2]} >= {"one", "two"}
    for command in (["status", "--json"], ["logs"], ["agent", "workers"]):
        refused = rallypoint(*command)
        assert refused.returncode == 2
        assert re.fullmatch(
            r"Error: this host has 2 runs: one, two; give RUN_ID, or the address, as in unix:/\S+one\S+\n",
            refused.stderr,
        )
    assert "two" in printed("agent", "workers", "two") or "RUNNING" in printed("agent", "workers", "two")


def test_the_output_of_all_hosts_is_followed(start: Start, tmp_path: Path) -> None:
    """`logs -f` includes a host that joins later."""
    with service("rendezvous", "--journal", "memory") as endpoint:
        joining = ["--rdzv-endpoint", endpoint, "--rdzv-id", "job", "--nnodes", "1:3"]
        joining += ["--rdzv-conf", "last_call_timeout=0"]
        start(*joining, "--node-id", "a", "--nproc-per-node", "2")
        until_prints("hello from 1", "logs", "job", "--rdzv-endpoint", endpoint)
        following = subprocess.Popen(
            mortal(str(RALLYPOINT), "logs", "job", "-f", "--rdzv-endpoint", endpoint),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        assert following.stdout is not None
        assert following.stderr is not None
        seen = [following.stdout.readline() for _ in range(2)]
        assert sorted(seen) == ["[0]: hello from 0\n", "[1]: hello from 1\n"]
        # The run is found without an address too: the agent of this host knows the service.
        assert "hello from 1" in printed("logs", "job")
        start(*joining, "--node-id", "b", "--supervisor-address", "127.0.0.1:0")
        until_prints("hello from 2", "logs", "job", "--rdzv-endpoint", endpoint)
        only = printed("logs", "job", "--rank", "2", "--stream", "stdout", "--rdzv-endpoint", endpoint)
        assert set(only.splitlines()) == {"[2]: hello from 2"}
        (tmp_path / "done").touch()
        rest, _ = following.communicate(timeout=PATIENCE)
        assert following.returncode == 0
        assert {f"[{rank}]: bye from {rank}" for rank in range(3)} <= set(rest.splitlines())
        over = rallypoint("logs", "job", "--rdzv-endpoint", endpoint)
        assert over.stderr == "Error: run 'job' has no nodes, and so no agents that have its logs\n"


def test_a_failure_is_shown_with_its_traceback(tmp_path: Path) -> None:
    """`events -v` shows the log file and the traceback."""
    (tmp_path / "worker.py").write_text("def fit():\n    raise ValueError('no such layer')\nfit()\n")
    with service("rendezvous", "--journal", "memory") as endpoint:
        joining = ["--rdzv-endpoint", endpoint, "--rdzv-id", "failing", "--log-dir", str(tmp_path / "logs")]
        assert rallypoint("run", *joining, tmp_path / "worker.py").returncode == 1
        shown = printed("events", "-v", "failing", "--kind", "worker-failed", "--rdzv-endpoint", endpoint)
        assert "Traceback" not in printed("events", "failing", "--rdzv-endpoint", endpoint)
        over = rallypoint("logs", "failing", "--rdzv-endpoint", endpoint)
    lines = shown.splitlines()
    assert "WORKER_FAILED" in lines[0]
    assert re.fullmatch(
        rf"    log file of \S+: {tmp_path}/logs/failing_\S+/attempt_0/0/stderr\.log", lines[1]
    )
    assert lines[2] == "    Traceback (most recent call last):"
    assert lines[-1] == "    ValueError: no such layer"
    assert re.search(r"no agents that have its logs; \S+ has \S+/stderr\.log$", over.stderr)
