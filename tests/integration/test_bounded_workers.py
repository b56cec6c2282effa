"""Workers have the processors, limits and signals that the flags of `rallypoint run` set."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT, clean_environment, rallypoint
from rallypoint.agent.workers.affinity import bind, read_topology
from support.marks import slow
from support.mortal import mortal
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

PROBE = """
import json, os, pathlib, resource, sys
seen = {
    "cpus": sorted(os.sched_getaffinity(0)),
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
}
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(seen))
"""

LISTENER = """
import os, pathlib, signal, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]

def heard(number, _frame):
    pathlib.Path(folder, f"{signal.Signals(number).name}.{rank}").touch()
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        sys.exit(0)

handled = [signal.SIGTERM, signal.SIGINT] + [signal.SIGUSR1, signal.SIGUSR2] * (rank == "0")
for number in handled:
    signal.signal(number, heard)
if os.fork() == 0:
    signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path(folder, "child").touch())
    while os.getppid() > 1:
        time.sleep(0.01)
pathlib.Path(folder, f"ready.{rank}").touch()
while True:
    time.sleep(0.01)
"""


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Run two workers that record signals."""
    command = ["run", "--standalone", "--nproc-per-node", "2", "--log-dir", str(folder / "logs"), *flags]
    listener = ["--no-python", "--", sys.executable, "-c", LISTENER, str(folder)]
    with subprocess.Popen(
        mortal(str(RALLYPOINT), *command, *listener),
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as agent:
        try:
            wait_until(lambda: len(list(folder.glob("ready.*"))) == 2, "both workers")
            yield agent
        finally:
            agent.kill()


def heard(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("SIG*"))


@pytest.mark.parametrize("binding", [slow("node"), "socket", slow("core-complex")])
def test_workers_run_where_they_are_bound(tmp_path: Path, binding: str) -> None:
    """A worker's CPU mask in the kernel is the one that `bind` returns, within the agent's own mask."""
    allowed = {max(os.sched_getaffinity(0))}
    flags = ("--standalone", "--nproc-per-node", "2", "--numa-binding", binding, "--no-python", "--")
    ran = rallypoint(
        *("run", *flags, sys.executable, "-c", PROBE, tmp_path),
        environment={"TMPDIR": str(tmp_path)},
        program=("taskset", "-c", str(*allowed), str(RALLYPOINT)),
        timeout=PATIENCE * 2,
    )
    assert ran.returncode == 0, ran.stderr
    decided = bind(binding, read_topology(os.environ), allowed, 2)
    for rank, cpus in enumerate(decided):
        assert json.loads((tmp_path / str(rank)).read_text())["cpus"] == sorted(cpus) == sorted(allowed)


@pytest.mark.slow
def test_more_workers_than_cores_can_not_have_some_each(tmp_path: Path) -> None:
    """`exclusive` with too few cores is refused before a worker starts: no restart would help."""
    many = str(len(os.sched_getaffinity(0)) + 1)
    command = [
        "run",
        "--standalone",
        "--nproc-per-node",
        many,
        "--numa-binding",
        "exclusive",
        "--no-python",
        "--",
    ]
    ran = rallypoint(*command, "touch", tmp_path / "ran", environment={"TMPDIR": str(tmp_path)})
    assert ran.returncode == 2
    assert "--numa-binding: NUMA node 0 has" in ran.stderr
    assert "they can't have one each" in ran.stderr
    assert not (tmp_path / "ran").exists()


def test_workers_have_the_limits_that_were_asked_for(tmp_path: Path) -> None:
    """`--rlimit` may be repeated, and sets soft and hard limits."""
    limits = ["--rlimit", "core=0", "--rlimit", "nofile=200:300"]
    command = [
        "run",
        "--standalone",
        *limits,
        "--no-python",
        "--",
        sys.executable,
        "-c",
        PROBE,
        str(tmp_path),
    ]
    ran = rallypoint(*command, environment={"TMPDIR": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    seen = json.loads((tmp_path / "0").read_text())
    assert (seen["core"], seen["nofile"]) == ([0, 0], [200, 300])


def test_users_signals_reach_those_workers_that_expect_them(tmp_path: Path) -> None:
    """Their children do not receive it, nor does a worker that it would kill: a warning names that one."""
    with running(tmp_path) as agent:
        agent.send_signal(signal.SIGUSR1)
        wait_until(lambda: heard(tmp_path) == ["SIGUSR1.0"], "the signal")
        assert agent.stderr is not None
        while "is not passed on to workers that it would kill" not in (line := agent.stderr.readline()):
            assert line, "the agent has ended without a warning"
        assert "local_ranks=[1]" in line
        time.sleep(0.05)
        assert agent.poll() is None
        assert not (tmp_path / "child").exists()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [(signal.SIGTERM, "SIGUSR2"), slow(signal.SIGHUP, "SIGUSR2"), slow(signal.SIGINT, "SIGINT")],
)
def test_workers_are_stopped_by_the_signal_of_the_users_choice(
    tmp_path: Path, sent: signal.Signals, expected: str
) -> None:
    """`--stop-signal` replaces SIGTERM and SIGHUP; SIGINT is passed on unchanged."""
    with running(tmp_path, "--stop-signal", "SIGUSR2", "--shutdown-timeout", "20") as agent:
        agent.send_signal(sent)
        agent.communicate(timeout=PATIENCE * 2)
        assert agent.returncode == 128 + sent
    assert f"{expected}.0" in heard(tmp_path)
    assert "SIGTERM.0" not in heard(tmp_path)
